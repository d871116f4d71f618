package proxy

import (
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// limitStage takes a request from what the rules allow.
type limitStage struct {
	policy    *policy
	resources *limit.Resources // nil: the request is for a path
	paths     *limit.Rules
}

// newLimitStage returns nil where no rule is about such requests.
func newLimitStage(p *policy, key match.Kind, isResource bool) stage {
	if !isResource {
		if !p.traffic.rules.Paths() {
			return nil
		}
		return &limitStage{policy: p, paths: p.traffic.rules}
	}
	if resources := p.traffic.rules.OfKind(key); resources != nil {
		return &limitStage{policy: p, resources: resources}
	}
	return nil
}

// apply takes once: a request that starts over has taken already.
func (s *limitStage) apply(x *state) *outcome {
	if !x.allowed.taken.IsZero() {
		return nil
	}
	var refused *limit.Refusal
	now := time.Now()
	if s.resources != nil {
		o := x.object()
		x.allowed.ticket, refused = s.resources.Take(now, &o, x.out.header.get("User-Agent"))
	} else {
		x.allowed.ticket, refused = s.paths.TakePath(now, x.req.info.Verb, x.req.info.Path, x.out.header.get("User-Agent"))
	}
	x.allowed.taken = now
	if refused == nil {
		return nil
	}
	x.allowed.refusedBy = refused.Breaker + "/" + refused.Rule
	s.policy.limited.Count(refused.Breaker, refused.Rule, refused.Reason)
	reason := meshv1.RefusedLimited
	if refused.Opened {
		reason = meshv1.RefusedBreaker
	}
	return refusalBy(reason, limited(s.policy.env.info.Namespace, refused))
}

// limited returns the refusal of a request that is above a limit.
func limited(namespace string, r *limit.Refusal) *apierrors.StatusError {
	if r.Opened {
		return status.Unavailable(r.RetrySeconds(), "%s", r.Message(namespace))
	}
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, r.RetrySeconds(), "%s", r.Message(namespace))
}
