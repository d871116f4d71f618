package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// fenceStage refuses, or counts, requests for objects that another shard owns.
type fenceStage struct {
	*isolation.Fence
	policy  *policy
	foreign prometheus.Counter
	unknown prometheus.Counter // of Observe
	dryRun  *dryRun            // not nil: they are observed for the dry run alone
}

// newFenceStage returns nil where the shard owns the objects of all requests.
func newFenceStage(p *policy, key match.Kind) *fenceStage {
	f := p.Fence(key)
	if f == nil {
		return nil
	}
	count := func(action string) prometheus.Counter {
		return p.metrics.Counter(p.env.metrics.Foreign, metrics.Verb(key.Verb), action)
	}
	if f.Observe {
		return &fenceStage{Fence: f, policy: p, foreign: count("observed"), unknown: count("unknown")}
	}
	return &fenceStage{Fence: f, policy: p, foreign: count("refused")}
}

func (s *fenceStage) apply(x *state) *outcome {
	switch {
	case x.exempt:
		return nil
	case s.ByUID:
		return s.object(x)
	case s.InBody:
		return s.create(x)
	case s.Foreign(x.req.info.Namespace):
		return s.encounter(x, "namespace "+x.req.info.Namespace, x.req.info.Namespace)
	}
	return nil
}

// encounter handles a request for an object that another shard owns; the key is empty if
// it is not known.
func (s *fenceStage) encounter(x *state, what, key string) *outcome {
	if s.dryRun != nil {
		s.dryRun.note(x)
		return nil
	}
	s.foreign.Inc()
	if s.Observe {
		return nil
	}
	return s.policy.forbidden(x.req.info, what, key)
}

// undecided handles a request whose object has an unknown key.
func (s *fenceStage) undecided(refused *apierrors.StatusError) *outcome {
	if s.Observe {
		s.unknown.Inc()
		return nil
	}
	return refusalBy(meshv1.RefusedUnknown, refused)
}

// create decides on the creation of a Namespace by the name in the body.
func (s *fenceStage) create(x *state) *outcome {
	if s.Observe && x.out.header.get("Content-Encoding") != "" {
		return s.undecided(nil)
	}
	name, refused, err := nameInBody(x)
	switch {
	case refused != nil:
		return refusal(refused)
	case errors.Is(err, filter.ErrType):
		return s.undecided(status.UnsupportedMediaType("the name of a namespace must be read: %v", err))
	case err != nil:
		return s.undecided(status.BadRequest("the name of a namespace must be read: %v", err))
	case name == "": // the apiserver generates it
		return s.encounter(x, "a namespace whose name is to be generated", "")
	case s.Foreign(name):
		return s.encounter(x, "namespace "+name, name)
	}
	return nil
}

// nameInBody returns the name of the object that a request creates. The error says why it
// cannot be read.
func nameInBody(x *state) (name string, refused *apierrors.StatusError, err error) {
	raw, refused := x.readBody(lock.MaxObject)
	if refused != nil {
		return "", refused, nil
	}
	x.out.replace(raw)
	_, name, _, err = filter.KeyOf(cmp.Or(x.out.header.get("Content-Type"), typeJSON), raw)
	return name, nil, err
}

// standbyRetry is the Retry-After of what a member in standby is refused, in seconds.
// client-go repeats the request itself, so that the first one after the standby passes.
const standbyRetry = 1

// standbyStage refuses the writes of a member that owns nothing yet.
type standbyStage struct {
	*isolation.Waiting
	policy *policy
}

func (s standbyStage) apply(x *state) *outcome {
	if !s.Refuses(x.req.info.Namespace) {
		return nil
	}
	return s.policy.inStandby()
}

// inStandby refuses a write until the pod is given keys.
func (p *policy) inStandby() *outcome {
	why := p.message.GetSharding().GetStandbyReason()
	if why == "" {
		why = fmt.Sprintf("ShardingConfig %s/%s: its shard owns nothing yet", p.env.info.Namespace, p.shard)
	}
	return refusalBy(meshv1.RefusedStandby, status.Unavailable(standbyRetry, "pod %s is in standby and may not write yet: %s", p.env.id, why))
}

// forbidden refuses a request for an object that another shard owns. The key is empty if
// it is not known.
func (p *policy) forbidden(info *apirequest.RequestInfo, what, key string) *outcome {
	resource := info.Resource
	if info.Subresource != "" {
		resource += "/" + info.Subresource
	}
	refused := status.New(http.StatusForbidden, metav1.StatusReasonForbidden, 0,
		"%s %s: %s does not belong to this pod's shard, ShardingConfig %s/%s: %s",
		info.Verb, resource, what, p.env.info.Namespace, p.shard, p.Owner(key))
	refused.ErrStatus.Details = &metav1.StatusDetails{Name: info.Name, Group: info.APIGroup, Kind: info.Resource}
	return refusalBy(meshv1.RefusedForeign, refused)
}
