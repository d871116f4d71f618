package lifecycle

import (
	"fmt"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Fence rejects policies that are older than what a pod has had, so that no policy which
// arrives late undoes a later one. The zero value rejects none.
type Fence struct {
	// Highest is the highest serial of a policy that the pod has had.
	Highest uint64
	// Least is the least serial of a policy that the pod may act on.
	Least uint64
}

// RestoreFence returns the fence of a pod whose policy was saved with Saved.
func RestoreFence(saved *meshv1.PodPolicy) Fence {
	f := Fence{Highest: saved.GetSerial(), Least: saved.GetSerial()}
	if saved.GetRefuse() != "" && f.Highest > 0 {
		f.Highest-- // a refusal is saved with the least serial
	}
	return f
}

// Barred reports whether the pod was refused since the policy with the highest serial.
func (f Fence) Barred() bool { return f.Least > f.Highest }

// Check returns why the pod must not act on p, nil if it may.
func (f Fence) Check(p *meshv1.PodPolicy) error {
	required := p.GetRequiredSerial()
	switch {
	case required > 0 && (f.Barred() || required > f.Highest) && p.GetRefuse() == "":
		return fmt.Errorf("policy %s requires a pod that has had serial %d and was not refused since, which this agent does not know", p.GetVersion(), required)
	case p.GetRefuse() != "" || p.GetSerial() >= f.Least:
		return nil
	case p.GetSerial() == 0:
		return fmt.Errorf("policy %s: the pod was a member of a root's shard, and is served under no other configuration: delete the pod, so that its controller creates another", p.GetVersion())
	}
	return fmt.Errorf("policy %s has serial %d, and the pod may act on %d or later: it comes from a former leader of the manager", p.GetVersion(), p.GetSerial(), f.Least)
}

// Raise notes that the pod has had p. A refusal bars all policies before it.
func (f *Fence) Raise(p *meshv1.PodPolicy) {
	f.Highest = max(f.Highest, p.GetSerial())
	least := f.Highest
	if least > 0 && p.GetRefuse() != "" {
		least++
	}
	f.Least = max(f.Least, least)
}
