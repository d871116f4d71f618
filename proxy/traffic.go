package proxy

import (
	"fmt"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// traffic is the compiled Traffic of a policy, or the last valid one; not good if no valid
// one is known.
type traffic struct {
	good    bool
	rules   *limit.Rules
	faults  *fault.Rules
	egress  *egress.Policy
	source  *meshv1.Traffic // from which it was compiled; nil: unknown
	problem error           // why it is not the policy's, and which applies instead
}

// trafficOf returns the rules that apply under a policy.
func trafficOf(e *env, m *meshv1.PodPolicy) traffic {
	if m.GetRefuse() != "" && m.GetTraffic() == nil {
		if last := lastTraffic(e); !last.good {
			return last // the refusal does not imply that there are no rules
		}
	}
	out, err := newTraffic(e, m.GetTraffic())
	if err == nil {
		return out
	}
	if last := lastTraffic(e); last.good {
		last.problem = fmt.Errorf("the last good ones stay in force: %w", err)
		return last
	}
	return unknown(m.GetTraffic(), err)
}

// lastTraffic returns the rules in force; before the first policy, those of the earlier proxy.
func lastTraffic(e *env) (out traffic) {
	if pol := e.policy.Load(); pol != nil {
		return pol.traffic
	}
	if e.info.Traffic != nil {
		out, _ = newTraffic(e, e.info.Traffic) // if they are invalid, it is unknown which applied
	}
	return out
}

func newTraffic(e *env, m *meshv1.Traffic) (out traffic, err error) {
	now := time.Now()
	if out.rules, err = limit.Compile(m, e.limits, now); err != nil {
		return traffic{}, err
	}
	if out.faults, err = fault.Compile(m, e.faults, now); err != nil {
		return traffic{}, err
	}
	if out.egress, err = egress.Compile(m, out.rules, out.faults); err != nil {
		return traffic{}, err
	}
	if out.source, out.good = m, true; m == nil {
		out.source = &meshv1.Traffic{}
	}
	return out, nil
}

// unknown applies when rules are invalid and no valid ones are known: connections to other
// hosts that the rules would have seen are refused.
func unknown(m *meshv1.Traffic, problem error) traffic {
	if m.GetEgress() == nil {
		return traffic{source: m, problem: fmt.Errorf("none are in force, for it is not known which were before: %w", problem)}
	}
	return traffic{source: m, egress: egress.Refuse(), problem: fmt.Errorf("it is not known which were in force before, and connections to other hosts are refused: %w", problem)}
}

// enforce puts the rules in force.
func (p *policy) enforce() {
	now := time.Now()
	p.traffic.rules.Enforce(now)
	p.faults.Enforce(now)
	p.env.histories.Forget(func(res schema.GroupResource) bool {
		return p.lists(match.Kind{Group: res.Group, Resource: res.Resource}).Oldest() == 0
	})
}

// limitStage takes a request from what the rules allow.
type limitStage struct {
	policy    *policy
	resources *limit.Resources // nil: the request is for a path
	paths     *limit.Rules
}

// newLimitStage returns nil where no rule is about such requests.
func newLimitStage(p *policy, key match.Kind, isResource bool) pipeline.Stage {
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

// Apply takes once: a request that starts over has taken already.
func (s *limitStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if !x.Allowed.Taken.IsZero() {
		return nil
	}
	var refused *limit.Refusal
	now := time.Now()
	if s.resources != nil {
		o := x.Object()
		x.Allowed.Ticket, refused = s.resources.Take(now, &o, x.Out.Header.Get("User-Agent"))
	} else {
		x.Allowed.Ticket, refused = s.paths.TakePath(now, x.Req.Info.Verb, x.Req.Info.Path, x.Out.Header.Get("User-Agent"))
	}
	x.Allowed.Taken = now
	if refused == nil {
		return nil
	}
	x.Allowed.RefusedBy = refused.Breaker + "/" + refused.Rule
	s.policy.limited.Count(refused.Breaker, refused.Rule, refused.Reason)
	reason := meshv1.RefusedLimited
	if refused.Opened {
		reason = meshv1.RefusedBreaker
	}
	return pipeline.RefusalFor(reason, limited(s.policy.env.info.Namespace, refused))
}

// limited returns the refusal of a request that is above a limit.
func limited(namespace string, r *limit.Refusal) *apierrors.StatusError {
	if r.Opened {
		return status.Unavailable(r.RetrySeconds(), "%s", r.Message(namespace))
	}
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, r.RetrySeconds(), "%s", r.Message(namespace))
}
