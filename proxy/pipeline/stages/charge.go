package stages

import (
	"strings"

	"golang.org/x/net/http/httpguts"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/uuid"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// upgradeStage reads the protocol to which a request wants to change. It ignores a wish for
// WebSocket where what is read is filtered: clients that get 200 instead, as Java clients for
// their watches, read on by HTTP. It refuses every other use of the header: two servers could
// disagree on a request that asks for h2c and is served over HTTP/1.1.
type upgradeStage struct {
	// allowed: the resource is one whose connection may change protocol.
	allowed bool
}

func newUpgradeStage(_ *Policy, key match.Kind) pipeline.Stage {
	return upgradeStage{pipeline.Upgrades(key)}
}

func (s upgradeStage) Apply(x *pipeline.State) *pipeline.Outcome {
	protocol, refused := s.protocol(&x.Req)
	if refused != nil {
		return pipeline.RefusalFor(meshv1.RefusedUpgrade, refused)
	}
	x.Protocol = protocol
	return nil
}

// protocol returns the protocol to which r wants to change, "" for none.
func (s upgradeStage) protocol(r *pipeline.Request) (string, *apierrors.StatusError) {
	name, n := r.Header.Count("Upgrade")
	asked := httpguts.HeaderValuesContainsToken(r.Header.Values("Connection"), "upgrade")
	if n == 0 && !asked {
		return "", nil
	}
	switch {
	case n != 1 || !asked || r.Proto == pipeline.HTTP2:
		return "", status.BadRequest("malformed upgrade")
	case !strings.EqualFold(name, "SPDY/3.1") && !strings.EqualFold(name, "websocket"):
		return "", status.BadRequest("an upgrade to %q is not proxied", pipeline.Bounded(name))
	case !s.allowed && r.AsksWebSocket() && r.Reads() && r.Info.IsResourceRequest:
		return "", nil
	case !s.allowed:
		return "", status.BadRequest("this resource is not upgraded")
	case r.Length != 0:
		return "", status.BadRequest("an upgrade has no body")
	}
	return name, nil
}

// chargeStage charges a request to the budget of its kind.
type chargeStage struct {
	delivery pipeline.Delivery
	urgent   func(*pipeline.RequestInfo) bool // not nil: a request may be
}

func newChargeStage(p *Policy, key match.Kind) pipeline.Stage {
	return chargeStage{pipeline.DeliveryOf(key), urgent(p, key)}
}

func (s chargeStage) Apply(x *pipeline.State) *pipeline.Outcome {
	switch {
	case s.urgent != nil && s.urgent(x.Req.Info):
		return pipeline.Refusal(x.Memory.Charge(&x.Memory.Budgets.Lock))
	case s.delivery == pipeline.DeliveryStream || x.Protocol != "":
		return pipeline.Refusal(x.Memory.Charge(&x.Memory.Budgets.Long))
	}
	return pipeline.Refusal(x.Memory.Short())
}

// rechargeStage moves a request from the locks' budget to another if its body shows
// that it is not about a lock.
type rechargeStage struct{}

// newRechargeStage returns nil where no request is charged to the locks' budget.
func newRechargeStage(p *Policy, key match.Kind) pipeline.Stage {
	if urgent(p, key) == nil {
		return nil
	}
	return rechargeStage{}
}

func (rechargeStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Lock.Named != nil || x.Memory.Budget != &x.Memory.Budgets.Lock {
		return nil
	}
	return pipeline.Refusal(x.Memory.Short())
}

// forwardedHeaderStage removes the header fields that concern the client's connection.
type forwardedHeaderStage struct{}

func newForwardedHeaderStage(*Policy, match.Kind) pipeline.Stage { return forwardedHeaderStage{} }

func (forwardedHeaderStage) Apply(x *pipeline.State) *pipeline.Outcome {
	x.Out.DropHopByHop()
	return nil
}

// auditStage adds an audit id to a request, which relates its access line to the audit log
// of the apiserver.
type auditStage struct{}

func newAuditStage(*Policy, match.Kind) pipeline.Stage { return auditStage{} }

func (auditStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Debug && !x.Out.Header.Has(pipeline.AuditHeader) {
		x.Out.Set(pipeline.AuditHeader, string(uuid.NewUUID()))
	}
	return nil
}

// connectStage records a connection into a pod or a service.
type connectStage struct {
	policy *Policy
	enter  func(*pipeline.State, *Policy) bool
}

// newConnectStage returns nil for requests that open no connection.
func newConnectStage(p *Policy, key match.Kind) pipeline.Stage {
	if !key.Connects() {
		return nil
	}
	return connectStage{p, p.env.Enter}
}

func (s connectStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Connected = s.enter(x, s.policy); !x.Connected {
		return pipeline.Restart
	}
	return nil
}
