// Package capture is the chaos suite of what redirects pods to the mesh: agents, their
// upgrades, lost redirections, reviews of webhooks, attacks, and the removal of the mesh.
package capture

import (
	"context"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

// suite is the state of a run.
type suite struct {
	*harness.Testbed
	*harness.Result
	fleet  *fleet.Fleet
	counts counts
}

// New returns the capture suite. Its last part uninstalls the mesh.
func New(w *harness.Testbed, r *harness.Result) harness.Suite {
	s := &suite{Testbed: w, Result: r, fleet: &fleet.Fleet{Testbed: w}}
	return harness.Suite{
		Name: "capture",
		Parts: []harness.Part{
			{Name: "starts", Run: s.starts},
			{Name: "kills", Run: s.kills},
			{Name: "upgrades", Run: s.upgrades},
			{Name: "losses", Run: s.losses},
			{Name: "failures", Run: s.failures},
			{Name: "reviews", Run: s.reviews},
			{Name: "hostile", Run: s.hostile},
			{Name: "cleanup", Run: s.cleanup},
		},
		Counts: s.counts.list,
	}
}

// startFleet ensures that the fleet is served, and counts its capture modes.
func (s *suite) startFleet(ctx context.Context) error {
	if err := s.fleet.Ensure(ctx); err != nil {
		return err
	}
	for _, m := range s.fleet.Members {
		s.counts.captured(m.Mode)
	}
	return nil
}
