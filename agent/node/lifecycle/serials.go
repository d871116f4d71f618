package lifecycle

import (
	"fmt"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Serials reject policies that are older than what a pod has had, so that no policy which
// arrives late undoes a later one. The zero value rejects none.
type Serials struct {
	// Highest is the highest serial of a policy that the pod has had.
	Highest uint64
	// Least is the least serial of a policy that the pod may act on.
	Least uint64
}

// RestoreSerials returns the serials of a pod whose policy was saved with Saved.
func RestoreSerials(saved *meshv1.PodPolicy) Serials {
	s := Serials{Highest: saved.GetSerial(), Least: saved.GetSerial()}
	if saved.GetRefuse() != "" && s.Highest > 0 {
		s.Highest-- // a refusal is saved with the least serial
	}
	return s
}

// Barred reports whether the pod was refused since the policy with the highest serial.
func (s Serials) Barred() bool { return s.Least > s.Highest }

// Check returns why the pod must not act on p, nil if it may.
func (s Serials) Check(p *meshv1.PodPolicy) error {
	required := p.GetRequiredSerial()
	switch {
	case required > 0 && (s.Barred() || required > s.Highest) && p.GetRefuse() == "":
		return fmt.Errorf("policy %s requires a pod that has had serial %d and was not refused since, which this agent does not know", p.GetVersion(), required)
	case p.GetRefuse() != "" || p.GetSerial() >= s.Least:
		return nil
	case p.GetSerial() == 0:
		return fmt.Errorf("policy %s: the pod was a member of a root's shard, and is served under no other configuration: delete the pod, so that its controller creates another", p.GetVersion())
	}
	return fmt.Errorf("policy %s has serial %d, and the pod may act on %d or later: it comes from a former leader of the manager", p.GetVersion(), p.GetSerial(), s.Least)
}

// Raise notes that the pod has had p. A refusal bars all policies before it.
func (s *Serials) Raise(p *meshv1.PodPolicy) {
	s.Highest = max(s.Highest, p.GetSerial())
	least := s.Highest
	if least > 0 && p.GetRefuse() != "" {
		least++
	}
	s.Least = max(s.Least, least)
}
