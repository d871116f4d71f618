package stages

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
	Rules   *limit.Rules
	faults  *fault.Rules
	Egress  *egress.Policy
	Source  *meshv1.Traffic // from which it was compiled; nil: unknown
	Problem error           // why it is not the policy's, and which applies instead
}

// trafficOf returns the rules that apply under a policy.
func trafficOf(e *Env, m *meshv1.PodPolicy) traffic {
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
		last.Problem = fmt.Errorf("the last good ones stay in force: %w", err)
		return last
	}
	return unknown(m.GetTraffic(), err)
}

// lastTraffic returns the rules in force; before the first policy, those of the earlier proxy.
func lastTraffic(e *Env) (out traffic) {
	if pol := e.Policy.Load(); pol != nil {
		return pol.Traffic
	}
	if e.Info.Traffic != nil {
		out, _ = newTraffic(e, e.Info.Traffic) // if they are invalid, it is unknown which applied
	}
	return out
}

func newTraffic(e *Env, m *meshv1.Traffic) (out traffic, err error) {
	now := time.Now()
	if out.Rules, err = limit.Compile(m, e.Rules.Limits, now); err != nil {
		return traffic{}, err
	}
	if out.faults, err = fault.Compile(m, e.Rules.Faults, now); err != nil {
		return traffic{}, err
	}
	if out.Egress, err = egress.Compile(m, out.Rules, out.faults); err != nil {
		return traffic{}, err
	}
	if out.Source, out.good = m, true; m == nil {
		out.Source = &meshv1.Traffic{}
	}
	return out, nil
}

// unknown applies when rules are invalid and no valid ones are known: connections to other
// hosts that the rules would have seen are refused.
func unknown(m *meshv1.Traffic, problem error) traffic {
	if m.GetEgress() == nil {
		return traffic{Source: m, Problem: fmt.Errorf("no rules are in force, because the rules in force before are unknown: %w", problem)}
	}
	return traffic{Source: m, Egress: egress.Refuse(), Problem: fmt.Errorf("it is not known which were in force before, and connections to other hosts are refused: %w", problem)}
}

// Enforce puts the rules in force.
func (p *Policy) Enforce() {
	now := time.Now()
	p.Traffic.Rules.Enforce(now)
	p.Traffic.faults.Enforce(now)
	p.env.Rules.Histories.Forget(func(res schema.GroupResource) bool {
		return p.lists(match.Kind{Group: res.Group, Resource: res.Resource}).Oldest() == 0
	})
}

// limitStage takes a request from what the rules allow.
type limitStage struct {
	policy    *Policy
	resources *limit.Resources // nil: the request is for a path
	paths     *limit.Rules
}

// newLimitStage returns nil where no rule is about such requests.
func newLimitStage(p *Policy, key match.Kind) pipeline.Stage {
	if !isResource(key) {
		if !p.Traffic.Rules.Paths() {
			return nil
		}
		return &limitStage{policy: p, paths: p.Traffic.Rules}
	}
	if resources := p.Traffic.Rules.OfKind(key); resources != nil {
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
	s.policy.Tally.Limited.Count(refused.Breaker, refused.Rule, refused.Reason)
	reason := meshv1.RefusedLimited
	if refused.Opened {
		reason = meshv1.RefusedBreaker
	}
	return pipeline.RefusalFor(reason, limited(s.policy.env.Info.Namespace, refused))
}

// limited returns the refusal of a request that is above a limit.
func limited(namespace string, r *limit.Refusal) *apierrors.StatusError {
	if r.Opened {
		return status.Unavailable(r.RetrySeconds(), "%s", r.Message(namespace))
	}
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, r.RetrySeconds(), "%s", r.Message(namespace))
}
