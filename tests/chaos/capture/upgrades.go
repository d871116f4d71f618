package capture

import (
	"context"
	"fmt"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// upgrades replaces the agents again and again. Clients must not notice: no request fails and
// no informer relists.
func (s *suite) upgrades(ctx context.Context) error {
	if err := kube.InOrder(ctx, s.startFleet, s.fleet.WaitInformers); err != nil {
		return err
	}
	for i := range wantUpgrades {
		if err := s.upgrade(ctx); err != nil {
			return fmt.Errorf("upgrade %d: %w", i+1, err)
		}
		s.counts.upgrades++
	}
	return nil
}

// upgrade replaces the agents once.
func (s *suite) upgrade(ctx context.Context) error {
	begun, err := s.Mark()
	if err != nil {
		return err
	}
	// Requests in flight when the last old agent exited count, too.
	if err := kube.InOrder(ctx, s.RestartAgents, s.fleet.WaitWorking); err != nil {
		return err
	}
	over := time.Now()
	failed, err := s.fleet.Count("failed", s.fleet.Members, begun.At, over, func(_ *fleet.Member, r fleet.Request) bool { return !r.OK() })
	if err != nil {
		return err
	}
	requests, err := s.PodRequests(begun, fleet.IDs(s.fleet.Members)...)
	if err != nil {
		return err
	}
	relists := 0
	for _, q := range requests {
		if q.Agent == fleet.InformerAgent && q.Fills() {
			if relists == 0 {
				s.Logf("  ! relist: %s", q)
			}
			relists++
		}
	}
	// Members that fail open have no reason to bypass the mesh either.
	leaked, err := s.fleet.Leaks(ctx, requests, nil)
	if err != nil {
		return err
	}
	s.counts.failed += failed
	s.counts.relists += relists
	s.counts.leaked += len(leaked)
	s.Logf("  rolled out in %v: of %d requests %d failed, %d relists, %d leaked", over.Sub(begun.At).Round(100*time.Millisecond), len(requests), failed, relists, len(leaked))
	return nil
}
