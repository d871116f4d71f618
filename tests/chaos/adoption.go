package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	adoptionSites   = 4 // operators that are adopted at the same time, each with objects of its own
	adoptionRounds  = minAdoptions / adoptionSites
	adoptionTenants = 6
	adoptionSeed    = 12 // so that a run can be repeated
	adoptionSettles = 5 * time.Minute
	// troubleEvery is the mean time between two troubles, of all sites.
	troubleEvery = 12 * time.Second
	// managerKills is the least time between two kills of the manager. Until one is back nobody
	// acquires the lock of an operator that is being adopted, and so nobody leads.
	managerKills = time.Minute
	// agentTroubles is the least time between two troubles of agents: writes whose responses
	// are lost count for 65 s, and a first grant waits for them.
	agentTroubles = 75 * time.Second
	// halfWay is how long a partitioned rollout is left half way.
	halfWay = 5 * time.Second
)

// adoption takes a running operator onto the mesh and off it again by ordinary rolling
// updates, while its objects change and the mesh, its agents and its leaders are killed
// and cut off.
func adoption(ctx context.Context, w *world, r *result) error {
	if err := w.ApplyPath(ctx, operatorDeploy+"crd.yaml"); err != nil {
		return err
	}
	var sites []*site
	for i := range adoptionSites {
		s, err := w.newSite(ctx, i)
		if err != nil {
			return fmt.Errorf("site %d: %w", i, err)
		}
		sites = append(sites, s)
	}
	troubled, calm := context.WithCancel(ctx)
	trouble := make(chan error, 1)
	go func() { trouble <- troubleSites(troubled, sites, &r.sharding) }()
	errs := make([]error, len(sites))
	var rounds sync.WaitGroup
	for i, s := range sites {
		rounds.Go(func() { errs[i] = s.rounds(ctx) })
	}
	rounds.Wait()
	calm()
	errs = append(errs, <-trouble)
	for _, s := range sites {
		errs = append(errs, s.judgeAdoptions(ctx, r), s.end(ctx), s.removeTenants(ctx))
	}
	return errors.Join(errs...)
}

// site is an operator that is adopted and removed again and again.
type site struct {
	*operator
	adopted int
}

// newSite starts an operator outside the mesh.
func (w *world) newSite(ctx context.Context, n int) (*site, error) {
	own := *w
	own.tenants, own.class = nil, fmt.Sprintf("site-%d", n)
	if err := own.addTenants(ctx, fmt.Sprintf("chaos-site-%d-%%02d", n), adoptionTenants); err != nil {
		return nil, err
	}
	o, err := own.settle(ctx, fmt.Sprintf("site-%d", n))
	if err != nil {
		return nil, err
	}
	set, err := own.statefulSet(o.home, 2)
	if err != nil {
		return nil, err
	}
	delete(set.Spec.Template.Labels, meshv1alpha1.EnableProxyLabel)
	if err := own.create(ctx, set); err != nil {
		return nil, err
	}
	s := &site{operator: o}
	if err := s.leadsOutside(ctx); err != nil {
		return nil, err
	}
	o.write = own.startWriter(o.home)
	return s, nil
}

func (s *site) removeTenants(ctx context.Context) error {
	var errs []error
	for _, t := range s.tenants {
		err := s.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: t}})
		errs = append(errs, client.IgnoreNotFound(err))
	}
	return errors.Join(errs...)
}

func (s *site) rounds(ctx context.Context) error {
	for i := range adoptionRounds {
		start := time.Now()
		if err := s.adopt(ctx, i); err != nil {
			return fmt.Errorf("%s: adoption %d: %w", s.part, i+1, err)
		}
		adopted := time.Since(start)
		if err := s.remove(ctx, i); err != nil {
			return fmt.Errorf("%s: removal %d: %w", s.part, i+1, err)
		}
		s.adopted++
		s.say("  %s: adoption %d took %v, removal %v", s.part, i+1,
			adopted.Round(100*time.Millisecond), (time.Since(start) - adopted).Round(100*time.Millisecond))
	}
	return nil
}

// adopt makes a root and labels the pod template, in either order. Every fifth time
// the rollout is left half way for a while.
func (s *site) adopt(ctx context.Context, round int) error {
	root := s.newRoot(divided(2, meshv1alpha1.OnChangeRelist))
	create := func() error {
		return s.until(ctx, "the root to be made", func(ctx context.Context) error {
			root.ResourceVersion = ""
			err := s.Create(ctx, root)
			if !apierrors.IsAlreadyExists(err) {
				return err
			}
			if there, err := s.root(ctx); err != nil || there.DeletionTimestamp != nil {
				return errors.Join(err, errors.New("the root before it is still there"))
			}
			return nil
		})
	}
	steps := []func() error{create, func() error { return s.roll(ctx, true, round%5 == 4) }}
	if round%2 == 1 {
		steps[0], steps[1] = steps[1], steps[0]
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, adoptionSettles)
	defer cancel()
	return kube.Until(ctx, "the operator to be adopted", func(ctx context.Context) error {
		root, err := s.root(ctx)
		if err != nil {
			return err
		}
		for _, c := range root.Status.Conditions {
			if c.Type == meshv1alpha1.ConditionReady && c.Status != metav1.ConditionTrue {
				return fmt.Errorf("%s: %s", c.Reason, c.Message)
			}
		}
		return s.settledNow(ctx)
	})
}

// roll puts the label on the pod template or takes it off. A rollout that is left
// half way stops after the last pod, and goes on later.
func (s *site) roll(ctx context.Context, labelled, partitioned bool) error {
	if partitioned {
		if err := s.template(ctx, labelled, 1); err != nil {
			return err
		}
		select {
		case <-time.After(halfWay): // that it stays half way is the test
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return s.template(ctx, labelled, 0)
}

// template changes the pod template's label and the rollout's partition.
func (s *site) template(ctx context.Context, labelled bool, partition int) error {
	value := "null"
	if labelled {
		value = `"true"`
	}
	patch := fmt.Appendf(nil, `{"spec":{"updateStrategy":{"rollingUpdate":{"partition":%d}},"template":{"metadata":{"labels":{%q:%s}}}}}`,
		partition, meshv1alpha1.EnableProxyLabel, value)
	return s.until(ctx, "the pod template to be changed", func(ctx context.Context) error {
		return s.Patch(ctx, s.set(), client.RawPatch(types.StrategicMergePatchType, patch))
	})
}

func (s *site) set() *appsv1.StatefulSet {
	return &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: s.home, Name: operatorName}}
}

// remove withdraws the root, takes the label off, and waits until the operator works
// outside the mesh. Every third time the root is deleted right away.
func (s *site) remove(ctx context.Context, round int) error {
	if round%3 == 2 {
		if err := s.deleteRoot(ctx); err != nil {
			return err
		}
		if err := s.template(ctx, false, 0); err != nil {
			return err
		}
		return s.leadsOutside(ctx)
	}
	if err := s.change(ctx, func(c *meshv1alpha1.ShardingConfigSpec) { c.Root.Disable = new(true) }); err != nil {
		return err
	}
	if err := s.roll(ctx, false, round%5 == 3); err != nil {
		return err
	}
	if err := s.leadsOutside(ctx); err != nil {
		return err
	}
	return s.deleteRoot(ctx)
}

func (s *site) deleteRoot(ctx context.Context) error {
	return s.until(ctx, "the root to be deleted", func(ctx context.Context) error {
		root := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: s.home, Name: operatorName}}
		return client.IgnoreNotFound(s.Delete(ctx, root))
	})
}

// leadsOutside waits until the rollout is complete, no root owns anything, and a pod
// of the operator holds its own lock.
func (s *site) leadsOutside(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, adoptionSettles)
	defer cancel()
	return kube.Until(ctx, "the operator to work outside the mesh", func(ctx context.Context) error {
		if err := s.RolledOut(ctx, s.set()); err != nil {
			return err
		}
		root, err := s.root(ctx)
		switch {
		case client.IgnoreNotFound(err) != nil:
			return err
		case err == nil && root.DeletionTimestamp != nil:
			return errors.New("its root is still there")
		}
		var lease coordinationv1.Lease
		if err := s.Get(ctx, client.ObjectKey{Namespace: s.home, Name: operatorLock}, &lease); err != nil {
			return err
		}
		if holder := lease.Spec.HolderIdentity; holder == nil || !strings.HasPrefix(*holder, operatorName+"-") {
			return errors.New("no pod of the operator holds the lock")
		}
		return nil
	})
}

// siteTroubles are what befalls sites while they are adopted and removed.
var siteTroubles = []struct {
	name  string
	cause func(context.Context, *operator, *rand.Rand, *shardingCounts) error
	least time.Duration // between two of those with the same, because all sites suffer it
}{
	{"an operator killed", killOperator, 0},
	{"an operator killed", killOperator, 0},
	{"an operator's pod deleted", deleteOperator, 0},
	{"an agent killed", killAgent, agentTroubles},
	{"the manager killed", killManager, managerKills},
	{"an agent cut off", cutOff, agentTroubles},
}

// troubleSites causes troubles at random sites until ctx ends.
func troubleSites(ctx context.Context, sites []*site, c *shardingCounts) error {
	random := rand.New(rand.NewPCG(adoptionSeed, 0))
	last := map[time.Duration]time.Time{}
	for {
		select {
		case <-time.After(time.Duration(random.Int64N(int64(2 * troubleEvery)))):
		case <-ctx.Done():
			return nil
		}
		s, trouble := sites[random.IntN(len(sites))], siteTroubles[random.IntN(len(siteTroubles))]
		start := time.Now()
		if start.Sub(last[trouble.least]) < trouble.least {
			continue
		}
		err := trouble.cause(ctx, s.operator, random, c)
		last[trouble.least] = time.Now()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("%s: %s: %w", s.part, trouble.name, err)
		}
		s.say("  %s: %s, %v", s.part, trouble.name, time.Since(start).Round(100*time.Millisecond))
	}
}

// judgeAdoptions counts what a site's adoptions came to.
func (s *site) judgeAdoptions(ctx context.Context, r *result) error {
	c := &r.sharding
	c.adoptions += s.adopted
	s.judgeWaits(ctx, r)
	states, writes, err := s.evidence()
	if err != nil {
		return err
	}
	j := audit.Judge(states, writes, s.restarts)
	outside := audit.Outside(states, j.Unknown)
	c.doubleWrites += len(j.Foreign) + len(j.Shared)
	c.outside += len(outside)
	s.complain(j)
	for _, f := range outside[:min(5, len(outside))] {
		s.say("  ! %s", f)
	}
	if len(states) == 0 || len(j.Unknown) == 0 || len(j.Unknown) == len(writes) {
		r.doubt("%s: the audit log has %d states, %d writes, and %d of them from outside the mesh", s.part, len(states), len(writes), len(j.Unknown))
	}
	s.say("  %s: %d adoptions; %d writes, %d of them from outside the mesh, %d in what was another's, %d from outside in what was a shard's",
		s.part, s.adopted, j.Writes, len(j.Unknown), len(j.Foreign), len(outside))
	return nil
}
