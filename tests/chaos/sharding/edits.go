package sharding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	editsSeed = 17 // makes runs repeatable
	// editsAtOnce is the number of edits in a row, each at any time of what the ones before it
	// cause. Then the root is corrected, and must settle.
	editsAtOnce = 10
	editEvery   = 4 * time.Second // at most
	// editDisruptEvery is the mean time between two tries of a disruption.
	editDisruptEvery = 6 * time.Second
	// actFor is how long shards act before the next edits.
	actFor = 15 * time.Second
	// editsSettle bounds the time until a corrected root settles: it may be deleted and made
	// anew, and its pods replaced.
	editsSettle = 5 * time.Minute
)

// edit changes a spec as a user might, by mistake or not.
type edit struct {
	what  string
	apply func(*meshv1alpha1.ShardingConfigSpec, *rand.Rand)
}

var specEdits = []edit{
	{"another number of shards", func(s *meshv1alpha1.ShardingConfigSpec, random *rand.Rand) {
		s.Root.Auto.ShardingSize = 2 + random.Int32N(3)
	}},
	{"another canary", func(s *meshv1alpha1.ShardingConfigSpec, random *rand.Rand) {
		s.Root.Canary.InShardHash = []string{fmt.Sprint(random.IntN(32))}
	}},
	{"another lock", func(s *meshv1alpha1.ShardingConfigSpec, random *rand.Rand) {
		s.Controller = []*meshv1alpha1.ControllerConfig{nil, {LeaderElectionName: "misspelt"}, {LeaderElectionName: operator.Lock}}[random.IntN(3)]
	}},
	{"a dry run, or none", func(s *meshv1alpha1.ShardingConfigSpec, _ *rand.Rand) { s.DryRun = !s.DryRun }},
	{"other resources", func(s *meshv1alpha1.ShardingConfigSpec, random *rand.Rand) {
		s.Root.ResourceSelector[0].RelateResources[0].Resources = [][]string{{"tally"}, {"tallies"}, {"tallies", "talies"}}[random.IntN(3)]
	}},
	{"another method", func(s *meshv1alpha1.ShardingConfigSpec, random *rand.Rand) {
		s.Root.Method = []meshv1alpha1.Method{meshv1alpha1.MethodAuto, meshv1alpha1.MethodFilter}[random.IntN(2)]
	}},
	{"disabled, or enabled", func(s *meshv1alpha1.ShardingConfigSpec, _ *rand.Rand) {
		s.Root.Disable = new(s.Root.Disable == nil || !*s.Root.Disable)
	}},
	{"another workload", func(s *meshv1alpha1.ShardingConfigSpec, random *rand.Rand) {
		s.Root.TargetRef.Name = []string{"misspelt", operator.Name}[random.IntN(2)]
	}},
}

// edits edits a root in all ways, one edit into the effects of the others, while its objects
// change and pods, agents and the manager are killed or cut off.
func (s *suite) edits(ctx context.Context) error {
	o, err := s.start(ctx, "edits", operator.NewSpec(3, meshv1alpha1.OnChangeRelist, operator.FirstTenant))
	if o == nil {
		return err
	}
	if err == nil {
		o.Writer.MaxWait = time.Hour // nothing is reconciled while the root is wrong
		breaking, stop := context.WithCancel(ctx)
		broken := make(chan error, 1)
		go func() {
			broken <- disruptAll(breaking, editsSeed+1, editDisruptEvery, siteDisruptions, []*shardedOperator{o})
		}()
		err = o.editAll(ctx)
		stop()
		err = errors.Join(err, <-broken)
	}
	return errors.Join(err, o.judgeEdits(ctx), o.Remove(ctx))
}

// editAll edits the root minEdits times. Every editsAtOnce edits it must settle.
func (o *shardedOperator) editAll(ctx context.Context) error {
	random := rand.New(rand.NewPCG(editsSeed, 0))
	root, err := o.ShardingConfig(ctx)
	if err != nil {
		return err
	}
	correct := root.Spec
	for o.counts.edits < minEdits {
		for range editsAtOnce - 1 {
			if err := o.editOnce(ctx, random); err != nil {
				return err
			}
			if err := kube.Sleep(ctx, time.Duration(random.Int64N(int64(editEvery)))); err != nil { // at any time of the last edit's effects
				return err
			}
		}
		if err := o.correct(ctx, correct); err != nil {
			return err
		}
		if err := kube.Sleep(ctx, actFor); err != nil { // the duration is part of the test
			return err
		}
	}
	return nil
}

// editOnce makes a random edit: of the spec, or the deletion of the root.
func (o *shardedOperator) editOnce(ctx context.Context, random *rand.Rand) error {
	n := random.IntN(len(specEdits) + 1)
	if n == len(specEdits) {
		return o.recreate(ctx, random)
	}
	return o.editSpec(ctx, random, specEdits[n])
}

func (o *shardedOperator) editSpec(ctx context.Context, random *rand.Rand, e edit) error {
	if err := o.Change(ctx, func(s *meshv1alpha1.ShardingConfigSpec) { e.apply(s, random) }); err != nil {
		return fmt.Errorf("%s: %w", e.what, err)
	}
	o.counts.edits++
	o.Logf("  edit %d: %s", o.counts.edits, e.what)
	return nil
}

// recreate deletes the root, edits it meanwhile, and creates it again.
func (o *shardedOperator) recreate(ctx context.Context, random *rand.Rand) error {
	root, err := o.ShardingConfig(ctx)
	if err != nil {
		return err
	}
	if err := o.Until(ctx, "the root to be deleted", func(ctx context.Context) error { return client.IgnoreNotFound(o.Delete(ctx, root)) }); err != nil {
		return fmt.Errorf("deleting the root: %w", err)
	}
	again := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: root.Namespace, Name: root.Name}, Spec: *root.Spec.DeepCopy()}
	if deleted, err := o.ShardingConfig(ctx); err == nil {
		e := specEdits[random.IntN(len(specEdits))]
		e.apply(&deleted.Spec, random)
		if err := o.Update(ctx, deleted); err == nil {
			o.counts.edits++
			o.Logf("  edit %d: %s, while it is being deleted", o.counts.edits, e.what)
		} // else the root is gone, or the manager is away
	}
	err = kube.UntilWithin(ctx, editsSettle, "the root to be created anew", func(ctx context.Context) error {
		again.ResourceVersion = ""
		return o.Create(ctx, again)
	})
	o.counts.edits++
	o.Logf("  edit %d: deleted and created anew", o.counts.edits)
	return err
}

// correct gives the root a correct spec, by which it must settle.
func (o *shardedOperator) correct(ctx context.Context, spec meshv1alpha1.ShardingConfigSpec) error {
	start := time.Now()
	if err := o.Change(ctx, func(s *meshv1alpha1.ShardingConfigSpec) { *s = *spec.DeepCopy() }); err != nil {
		return fmt.Errorf("correcting the root: %w", err)
	}
	o.counts.edits++
	err := kube.UntilWithin(ctx, editsSettle, "the corrected root to settle", func(ctx context.Context) error {
		root, err := o.ShardingConfig(ctx)
		if err == nil && !meta.IsStatusConditionTrue(root.Status.Conditions, meshv1alpha1.ConditionReady) {
			err = errors.New(kube.ReadyMessage(root))
		}
		return errors.Join(err, o.Settled(ctx))
	})
	o.Logf("  edit %d: corrected, settled after %v", o.counts.edits, time.Since(start).Round(100*time.Millisecond))
	return err
}

// judgeEdits stops the writer and counts the outcome. Pods that are in no shard any more may
// write what no shard owns: under a dry run, and while the root has another workload.
func (o *shardedOperator) judgeEdits(ctx context.Context) error {
	o.CheckWaits(ctx)
	states, writes, err := o.Evidence()
	if err != nil {
		return err
	}
	o.RequireEvidence(states, writes)
	j := audit.Check(states, writes, o.APIServerRestarts)
	beside := append(audit.Beside(states, j.Foreign), audit.Outside(states, j.Unknown)...)
	o.Counts.DoubleWrites += len(beside) + len(j.Shared)
	harness.LogSome(o.Testbed, 5, "  ! %s", beside)
	harness.LogSome(o.Testbed, 3, "  ! %s", j.Shared)
	o.Logf("  %d edits; %d writes, %d by pods while they owned nothing, %d of them beside another owner", o.counts.edits, j.Writes, len(j.Foreign)+len(j.Unknown), len(beside))
	return nil
}
