package proxy

import meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"

// Applied is what a pod's requests are decided by after a policy was set.
type Applied struct {
	// Settled is closed when no write that earlier policies allowed can take effect any
	// more; nil: none can now.
	Settled <-chan struct{}
	// Rules are the traffic rules in force: those of the policy, or the last valid ones if
	// these are invalid; nil while nobody knows them.
	Rules *meshv1.Traffic
	// Problem is why Rules are not those of the policy; nil if they are.
	Problem error
}

// Apply is SetPolicy, and returns what it put in force.
func (p *Pod) Apply(m *meshv1.PodPolicy) (Applied, error) {
	settled, err := p.SetPolicy(m)
	if err != nil {
		return Applied{}, err
	}
	rules, problem := p.Traffic()
	return Applied{Settled: settled, Rules: rules, Problem: problem}, nil
}
