package proxy

import (
	"strings"

	"golang.org/x/net/http/httpguts"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/uuid"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// upgradeStage reads the protocol to which a request wants to change. It refuses every other
// use of the header, and does not remove it: two servers could disagree on a request that
// asks for h2c and is served over HTTP/1.1.
type upgradeStage struct {
	// allowed: the resource is one whose connection may change protocol.
	allowed bool
}

func (s upgradeStage) apply(x *state) *outcome {
	protocol, refused := s.protocol(&x.req)
	if refused != nil {
		return refusalBy(meshv1.RefusedUpgrade, refused)
	}
	x.protocol = protocol
	return nil
}

// protocol returns the protocol to which r wants to change, "" for none.
func (s upgradeStage) protocol(r *request) (string, *apierrors.StatusError) {
	values := r.header["Upgrade"]
	asked := httpguts.HeaderValuesContainsToken(r.header["Connection"], "upgrade")
	if len(values) == 0 && !asked {
		return "", nil
	}
	switch {
	case len(values) != 1 || !asked || r.proto == proto2:
		return "", status.BadRequest("malformed upgrade")
	case !strings.EqualFold(values[0], "SPDY/3.1") && !strings.EqualFold(values[0], "websocket"):
		return "", status.BadRequest("an upgrade to %q is not proxied", bounded(values[0]))
	case !s.allowed:
		return "", status.BadRequest("this resource is not upgraded")
	case r.length != 0:
		return "", status.BadRequest("an upgrade has no body")
	}
	return values[0], nil
}

// admissionStage charges a request to the budget of its kind.
type admissionStage struct {
	route  route
	urgent func(*apirequest.RequestInfo) bool // not nil: a request may be
}

func (s admissionStage) apply(x *state) *outcome {
	switch {
	case s.urgent != nil && s.urgent(x.req.info):
		return refusal(x.charge(&x.accounts.lock))
	case s.route == stream || x.protocol != "":
		return refusal(x.charge(&x.accounts.long))
	}
	return refusal(x.short())
}

// readmissionStage moves a request from the locks' budget to another if its body shows
// that it is not about a lock.
type readmissionStage struct{}

func (readmissionStage) apply(x *state) *outcome {
	if x.lock != nil || x.budget != &x.accounts.lock {
		return nil
	}
	return refusal(x.short())
}

// forwardedHeaderStage removes the header fields that concern the client's connection.
type forwardedHeaderStage struct{}

func (forwardedHeaderStage) apply(x *state) *outcome {
	x.out.dropHopByHop()
	return nil
}

// auditStage adds an audit id to a request, which relates its access line to the audit log
// of the apiserver.
type auditStage struct{}

func (auditStage) apply(x *state) *outcome {
	if x.debug && x.out.header[auditHeader] == nil {
		x.out.set(auditHeader, string(uuid.NewUUID()))
	}
	return nil
}

// connectStage records a connection into a pod or a service.
type connectStage struct {
	policy *policy
	enter  func(*state, *policy) bool
}

func (s connectStage) apply(x *state) *outcome {
	if x.connected = s.enter(x, s.policy); !x.connected {
		return restart
	}
	return nil
}
