package proxy

import (
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
)

// traffic is the compiled Traffic of a policy, or of the last one whose compiles.
type traffic struct {
	rules   *limit.Rules
	faults  *fault.Rules
	egress  *egress.Policy
	told    *meshv1.Traffic // that it was compiled from
	problem error           // why it is not the policy's own
}

func newTraffic(p *Pod, m *meshv1.Traffic) (out traffic, err error) {
	if out.rules, err = limit.Compile(m, p.limits); err != nil {
		return traffic{}, err
	}
	if out.faults, err = fault.Compile(m, p.faults); err != nil {
		return traffic{}, err
	}
	if out.egress, err = egress.Compile(m, out.rules, out.faults); err != nil {
		return traffic{}, err
	}
	out.told = m
	return out, nil
}

// enforce has the rules take the place of those before.
func (p *policy) enforce() {
	now := time.Now()
	p.rules.Enforce(now)
	p.faults.Enforce(now)
	p.pod.histories.enforce(p)
}

// Traffic is what of the pod's rules is in force, and why it is not that of the last
// policy, if so.
func (p *Pod) Traffic() (*meshv1.Traffic, error) {
	if pol := p.policy.Load(); pol != nil {
		return pol.told, pol.problem
	}
	return nil, nil
}
