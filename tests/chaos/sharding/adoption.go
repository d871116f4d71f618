package sharding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

const (
	adoptionSites   = 4 // operators that are adopted at the same time, each with its own objects
	adoptionRounds  = minAdoptions / adoptionSites
	adoptionTenants = 6
	adoptionSeed    = 12 // makes runs repeatable
	adoptionSettles = 5 * time.Minute
	// disruptEvery is the mean time between two disruptions, of all sites.
	disruptEvery = 12 * time.Second
	// killManagerEvery is the minimum between two kills of the manager. Without a manager the
	// lock of an operator that is being adopted is not acquired, so that no member leads.
	killManagerEvery = time.Minute
	// disruptAgentsEvery is the minimum between two disruptions of agents. A first grant waits
	// 65 s for writes whose responses are lost.
	disruptAgentsEvery = 75 * time.Second
	// pause is how long a rollout is paused by its partition.
	pause = 5 * time.Second
)

// siteDisruptions are the disruptions of sites while they are adopted and removed.
var siteDisruptions = []struct {
	name  string
	cause disruption
	every time.Duration // the minimum between two with the same minimum, since all sites suffer
}{
	{"an operator killed", killPod, 0},
	{"an operator killed", killPod, 0},
	{"an operator's pod deleted", deletePod, 0},
	{"an agent killed", killAgent, disruptAgentsEvery},
	{"the manager killed", killManager, killManagerEvery},
	{"an agent cut off", partitionAgent, disruptAgentsEvery},
}

// adoption adopts running operators and removes the mesh from them by ordinary rolling
// updates, while their objects change and the mesh, its agents and its leaders are disrupted.
func (s *suite) adoption(ctx context.Context) error {
	if err := s.ApplyCRD(ctx); err != nil {
		return err
	}
	var sites []*site
	for i := range adoptionSites {
		site, err := s.newSite(ctx, i)
		if err != nil {
			return fmt.Errorf("site %d: %w", i, err)
		}
		sites = append(sites, site)
	}
	disrupted, calm := context.WithCancel(ctx)
	disruption := make(chan error, 1)
	go func() { disruption <- disruptSites(disrupted, sites) }()
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

// disruptSites disrupts random sites until ctx ends.
func disruptSites(ctx context.Context, sites []*site) error {
	random := rand.New(rand.NewPCG(adoptionSeed, 0))
	last := map[time.Duration]time.Time{}
	for {
		if kube.Sleep(ctx, time.Duration(random.Int64N(int64(2*disruptEvery)))) != nil {
			return nil
		}
		s, d := sites[random.IntN(len(sites))], siteDisruptions[random.IntN(len(siteDisruptions))]
		start := time.Now()
		if start.Sub(last[d.every]) < d.every {
			continue
		}
		err := d.cause(ctx, s.shardedOperator, random)
		last[d.every] = time.Now()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("%s: %s: %w", s.Part, d.name, err)
		}
		s.Logf("  %s: %s, %v", s.Part, d.name, time.Since(start).Round(100*time.Millisecond))
	}
}

// judgeAdoptions stops the writer and counts the outcome of a site's adoptions.
func (s *site) judgeAdoptions(ctx context.Context) error {
	s.counts.adoptions += s.adopted
	s.JudgeWaits(ctx)
	states, writes, err := s.Evidence()
	if err != nil {
		return err
	}
	j := audit.Judge(states, writes, s.APIServerRestarts)
	outside := audit.Outside(states, j.Unknown)
	s.Counts.DoubleWrites += len(j.Foreign) + len(j.Shared)
	s.counts.outside += len(outside)
	s.LogViolations(j)
	harness.LogSome(s.World, 5, "  ! %s", outside)
	if len(states) == 0 || len(j.Unknown) == 0 || len(j.Unknown) == len(writes) {
		s.Result.Doubt("%s: the audit log has %d states, %d writes, and %d of them from outside the mesh", s.Part, len(states), len(writes), len(j.Unknown))
	}
	s.Logf("  %s: %d adoptions; %d writes, %d of them from outside the mesh, %d in what was another's, %d from outside in what was a shard's",
		s.Part, s.adopted, j.Writes, len(j.Unknown), len(j.Foreign), len(outside))
	return nil
}
