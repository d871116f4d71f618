package traffic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	minDuration = 3 * time.Second // of each fault
	faultsEnd   = "10m"           // unless this program ends them before
)

// faultTest is an operator under faults.
type faultTest struct {
	*operator.Operator
	suite *suite
}

// faults runs the operator under each fault, then under all together, with limits, a breaker
// that opens, new agents and a manager that is killed. After both, the agents use as much as
// before, and every object is reconciled.
func (s *suite) faults(ctx context.Context) error {
	return s.Run(ctx, "faults", operator.NewSpec(2, meshv1alpha1.OnChangeRelist), func(ctx context.Context, operator *operator.Operator) error {
		o := &faultTest{operator, s}
		if err := o.warmUp(ctx); err != nil {
			return fmt.Errorf("warming up: %w", err)
		}
		start, err := s.waitAtRest(ctx)
		if err != nil {
			return err
		}
		asAtStart := func(ctx context.Context) error { return s.checkUsage(ctx, start) }
		err = kube.InOrder(ctx,
			o.injectEach, o.waitRecovered, asAtStart,
			o.allTogether, o.waitConverged, o.waitRecovered) // the writer has ended, and is no client of the agents
		if err != nil {
			return err
		}
		return errors.Join(s.checkUsage(ctx, start), s.countPanics(ctx))
	})
}

// warmUp makes the agents allocate what the first fault of each kind needs. It counts in their
// usage at the start.
func (o *faultTest) warmUp(ctx context.Context) error {
	if err := o.inject(ctx, together); err != nil {
		return err
	}
	return o.waitRecovered(ctx)
}

// injectEach injects one fault after the other.
func (o *faultTest) injectEach(ctx context.Context) error {
	if err := o.loseLocks(ctx); err != nil {
		return fmt.Errorf("%s: %w", lockLost.name, err)
	}
	for _, sc := range scenarios {
		if err := o.inject(ctx, sc); err != nil {
			return fmt.Errorf("%s: %w", sc.name, err)
		}
	}
	return nil
}

// inject injects the faults of a scenario for a while, and until each of its kinds was
// injected.
func (o *faultTest) inject(ctx context.Context, sc scenario) error {
	begun := time.Now()
	end, err := o.apply(ctx, sc)
	if err != nil {
		return err
	}
	err = o.closeConnections(ctx)
	if err == nil {
		err = o.waitInjected(ctx, sc, begun)
	}
	return errors.Join(err, end(&o.suite.counts))
}

// closeConnections closes the operator's connections to its agents: faults of watches apply
// only to new watches. The agents' connections to the apiserver stay open: whether a request
// on a broken one takes effect is unknown for a minute.
func (o *faultTest) closeConnections(ctx context.Context) error {
	pods, err := o.Pods(ctx)
	if err != nil {
		return err
	}
	for i := range pods {
		broken, err := o.NetnsExec(ctx, &pods[i], "ss", "-K", "-tnH", "state", "established", "dst", "127.0.0.0/8")
		if err != nil {
			return fmt.Errorf("breaking connections off: %w", err)
		}
		if broken == "" {
			return fmt.Errorf("%s has no connection to an agent", pods[i].Name)
		}
	}
	return nil
}

// waitInjected waits for a while, and until each kind of a scenario was injected.
func (o *faultTest) waitInjected(ctx context.Context, sc scenario, begun time.Time) error {
	if err := kube.Sleep(ctx, minDuration); err != nil { // the duration is part of the test
		return err
	}
	var by map[string]int
	err := o.Until(ctx, "faults", func(ctx context.Context) (err error) {
		if by, err = o.injected(ctx, sc.name); err != nil {
			return err
		}
		for _, kind := range sc.kinds {
			if by[kind] == 0 {
				return fmt.Errorf("no %s was injected", kind)
			}
		}
		return nil
	})
	o.Logf("  %s for %v: %v", sc.name, time.Since(begun).Round(100*time.Millisecond), format(by))
	return err
}

// loseLocks fails the operator's lock renewals until each of its processes has exited.
func (o *faultTest) loseLocks(ctx context.Context) error {
	before, err := o.Pods(ctx)
	if err != nil {
		return err
	}
	begun := time.Now()
	end, err := o.apply(ctx, lockLost)
	if err != nil {
		return err
	}
	ended := 0
	err = o.Until(ctx, "the operator to give up", func(ctx context.Context) error {
		now, err := o.Pods(ctx)
		if err != nil {
			return err
		}
		ended = 0
		for _, p := range now {
			i := slices.IndexFunc(before, func(b corev1.Pod) bool { return b.UID == p.UID })
			if i >= 0 && kube.Restarts(&p) > kube.Restarts(&before[i]) {
				ended++
			}
		}
		if ended < len(before) {
			return fmt.Errorf("%d of %d did", ended, len(before))
		}
		return nil
	})
	o.suite.counts.restarts += ended
	if err := errors.Join(err, end(&o.suite.counts)); err != nil {
		return err
	}
	o.Logf("  %s for %v: %d of %d gave up", lockLost.name, time.Since(begun).Round(100*time.Millisecond), ended, len(before))
	return o.waitRecovered(ctx)
}

// waitRecovered waits until the operator watches its objects again and has reconciled the
// generations that they have at first.
func (o *faultTest) waitRecovered(ctx context.Context) error {
	var wanted map[types.NamespacedName]int64
	return o.Until(ctx, "the operator to catch up", func(ctx context.Context) error {
		var list tallyv1.TallyList
		if err := o.List(ctx, &list); err != nil {
			return err
		}
		if wanted == nil {
			wanted = map[types.NamespacedName]int64{}
			for _, t := range list.Items {
				wanted[client.ObjectKeyFromObject(&t)] = t.Generation
			}
		}
		for _, t := range list.Items {
			if t.Status.ObservedGeneration < wanted[client.ObjectKeyFromObject(&t)] {
				return fmt.Errorf("%s/%s was not reconciled since generation %d", t.Namespace, t.Name, t.Status.ObservedGeneration)
			}
		}
		pods, err := o.Pods(ctx)
		if err != nil {
			return err
		}
		watches := 0.0
		for _, node := range o.Nodes {
			families, err := o.Scrape(ctx, node)
			if err != nil {
				return err
			}
			watches += kube.Total(families["ctrlmesh_watches"], map[string]string{"namespace": o.Home, "resource": "tallies"})
		}
		if int(watches) != len(pods) {
			return fmt.Errorf("%d pods have %.0f watches", len(pods), watches)
		}
		return nil
	})
}

// allTogether injects all faults and limits at once, while the agents are replaced and the
// manager is killed.
func (o *faultTest) allTogether(ctx context.Context) (err error) {
	free, err := o.limit(ctx)
	if free != nil {
		defer func() { err = errors.Join(err, free()) }()
	}
	if err != nil {
		return err
	}
	end, err := o.apply(ctx, together)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end(&o.suite.counts)) }()
	if err := errors.Join(o.waitInjected(ctx, scenario{together.name, []string{"delay", "abort"}, nil}, time.Now()), o.waitRefusals(ctx, len(breakers))); err != nil {
		return err
	}
	// Metrics are lost with the process that counts.
	by, err := o.injected(ctx, together.name)
	if err != nil {
		return err
	}
	o.suite.counts.addInjected(by)
	if err := o.suite.replaceAgents(ctx); err != nil {
		return err
	}
	manager, err := o.LeadingManager(ctx)
	if err != nil {
		return err
	}
	if _, err := o.KillProcess(ctx, manager, kube.ManagerName); err != nil {
		return err
	}
	o.Logf("  new agents, and the manager was killed")
	// All faults apply in the new agents, where all watches are new.
	return errors.Join(o.waitInjected(ctx, together, time.Now()), o.waitRefusals(ctx, 1))
}

// waitConverged waits until all objects are reconciled, without faults and without changes.
func (o *faultTest) waitConverged(ctx context.Context) error {
	begun := time.Now()
	lost, _, _, err := o.Writer.Finish(ctx)
	if err != nil {
		return err
	}
	o.suite.counts.took = time.Since(begun)
	var list tallyv1.TallyList
	if err := o.List(ctx, &list); err != nil {
		return fmt.Errorf("listing objects: %w", err)
	}
	o.suite.counts.objects = len(list.Items)
	o.suite.counts.converged = o.suite.counts.objects - len(lost)
	o.Logf("  %d of %d objects are reconciled, after %v", o.suite.counts.converged, o.suite.counts.objects, o.suite.counts.took.Round(time.Millisecond))
	return nil
}
