package sharding

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

const (
	adoptionSites   = 4 // operators that are adopted at the same time, each with its own objects
	adoptionRounds  = minAdoptions / adoptionSites
	adoptionTenants = 6
	adoptionSeed    = 12 // makes runs repeatable
	adoptionSettles = 5 * time.Minute
	// disruptEvery is the mean time between two tries of a disruption, of all sites.
	disruptEvery = 12 * time.Second
	// pause is how long a rollout is paused by its partition.
	pause = 5 * time.Second
)

// adoption adopts running operators and removes the mesh from them by ordinary rolling
// updates, while their objects change and the mesh, its agents and its leaders are disrupted.
func (s *suite) adoption(ctx context.Context) error {
	if err := s.ApplyCRD(ctx); err != nil {
		return err
	}
	var sites []*site
	var operators []*shardedOperator
	for i := range adoptionSites {
		site, err := s.newSite(ctx, i)
		if err != nil {
			return fmt.Errorf("site %d: %w", i, err)
		}
		sites, operators = append(sites, site), append(operators, site.shardedOperator)
	}
	disrupted, calm := context.WithCancel(ctx)
	disruption := make(chan error, 1)
	go func() { disruption <- disruptAll(disrupted, adoptionSeed, disruptEvery, siteDisruptions, operators) }()
	errs := make([]error, len(sites))
	var rounds sync.WaitGroup
	for i, s := range sites {
		rounds.Go(func() { errs[i] = s.rounds(ctx) })
	}
	rounds.Wait()
	calm()
	errs = append(errs, <-disruption)
	for _, s := range sites {
		errs = append(errs, s.judgeAdoptions(ctx), s.Remove(ctx), s.removeTenants(ctx))
	}
	return errors.Join(errs...)
}

// judgeAdoptions stops the writer and counts the outcome of a site's adoptions.
func (s *site) judgeAdoptions(ctx context.Context) error {
	s.counts.adoptions += s.adopted
	s.CheckWaits(ctx)
	states, writes, err := s.Evidence()
	if err != nil {
		return err
	}
	j := audit.Check(states, writes, s.APIServerRestarts)
	outside := audit.Outside(states, j.Unknown)
	s.Counts.DoubleWrites += len(j.Foreign) + len(j.Shared)
	s.counts.outside += len(outside)
	s.LogViolations(j)
	harness.LogSome(s.Testbed, 5, "  ! %s", outside)
	if len(states) == 0 || len(j.Unknown) == 0 || len(j.Unknown) == len(writes) {
		s.Result.Doubt("%s: the audit log has %d states, %d writes, and %d of them from outside the mesh", s.Part, len(states), len(writes), len(j.Unknown))
	}
	s.Logf("  %s: %d adoptions; %d writes, %d of them from outside the mesh, %d in what was another's, %d from outside in what was a shard's",
		s.Part, s.adopted, j.Writes, len(j.Unknown), len(j.Foreign), len(outside))
	return nil
}
