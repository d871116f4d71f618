package capture

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
)

const (
	intruderImage = "localhost/ctrlmesh/intruder:dev"
	intruderName  = "intruder"

	// Bounds for an agent or a manager under attack: its memory, below its limit, and the
	// response times of others. An attack does not reduce its processor time.
	maxMeshMemory = 400 << 20
	maxLatency    = 2 * time.Second
	maxSlower     = 4 // times what it was before, where that is more
)

// floods are the kinds of floods of the intruder.
var floods = []string{"connections", "garbage", "handshakes", "slowloris", "headers", "resets", "streams"}

// hostile attacks the mesh as root of a member, with the network capabilities that a pod can
// have: it attacks the mesh, other pods through the mesh, and the redirection. Then it attacks from
// outside, and as a tenant.
func (s *suite) hostile(ctx context.Context) error {
	if err := s.startFleet(ctx); err != nil {
		return err
	}
	node := s.Nodes[0]
	members := s.fleet.Members
	victim := members[slices.IndexFunc(members, func(m *fleet.Member) bool {
		return m.Spec.NodeName == node && m.Mode == "ebpf" && m.Policy == fleet.Closed
	})]
	begun, err := s.Mark()
	if err != nil {
		return err
	}
	decoy, err := s.startDecoy(ctx, victim.Namespace)
	if err != nil {
		return err
	}
	if err := s.startIntruder(ctx, victim); err != nil {
		return err
	}
	s.attackAsMember(ctx, victim, decoy)
	outsider, err := s.startOutsider(ctx, node)
	if err != nil {
		return err
	}
	if err := s.attackFromOutside(ctx, victim, outsider); err != nil {
		return err
	}
	if err := s.attackAsTenant(ctx, victim, outsider); err != nil {
		return err
	}
	requests, err := s.PodRequests(begun, victim.Namespace+"/"+intruderName)
	if err != nil {
		return err
	}
	leaked, err := s.fleet.Leaks(ctx, requests, nil)
	if err != nil {
		return err
	}
	if len(leaked) > 0 {
		s.Doubt("hostile: %d requests of the intruder bypassed the mesh", len(leaked))
	}
	return s.fleet.WaitServed(ctx, time.Now())
}

// attack counts an attack. do returns why it failed, or an error if it succeeded or could
// not be made.
func (s *suite) attack(name string, do func() (string, error)) {
	s.counts.attacks++
	why, err := do()
	if err != nil {
		s.Doubt("hostile: %s: %v", name, err)
		s.Logf("  ! %s: %v", name, err)
		return
	}
	s.counts.repelled++
	s.Logf("  %s: %s", name, why)
}

// attackAsMember makes the attacks that need a pod on the mesh.
func (s *suite) attackAsMember(ctx context.Context, victim *fleet.Member, d decoy) {
	intrude := func(args ...string) func() (string, error) {
		return func() (string, error) { return s.intrude(ctx, victim.Namespace, args...) }
	}
	s.attack("other pods' packets", intrude("sniff"))
	s.attack("the mesh's listener", intrude("join"))
	s.attack("ways round the redirection", intrude("forge"))
	s.attack("another pod's token", intrude("borrow", "/token/token"))
	s.attack("another address", func() (string, error) {
		why, err := s.intrude(ctx, victim.Namespace, "misdirect", d.address)
		if err != nil {
			return "", err
		}
		n, err := s.connections(ctx, d)
		if err == nil && n > 0 {
			err = fmt.Errorf("the decoy had %d visitors", n)
		}
		return why, err
	})
	s.attack("a lock whose name is not UTF-8", func() (string, error) {
		why, err := s.intrude(ctx, victim.Namespace, "misname")
		if err != nil {
			return "", err
		}
		return why, s.reportsArrive(ctx, victim)
	})
	for _, kind := range floods {
		s.attack("a flood of "+kind, func() (string, error) {
			return s.withBystander(ctx, victim, func(ctx context.Context) (string, error) {
				return s.intrude(ctx, victim.Namespace, "flood", kind)
			})
		})
	}
}
