package proxy

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
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
