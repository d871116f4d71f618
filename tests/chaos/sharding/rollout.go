package sharding

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	rolloutSeed = 15
	// rolloutSoak is shorter than the analysis takes, which therefore decides.
	rolloutSoak = "30s"
	// rolloutTimeout bounds a rollout until it has halted, or is complete, while managers are killed.
	rolloutTimeout = 10 * time.Minute
)

// badVersions must not get beyond the canary.
var badVersions = []struct {
	name string
	edit func(*corev1.Container)
}{
	{"an image that does not exist", func(c *corev1.Container) { c.Image = "localhost/ctrlmesh/missing:dev" }},
	{"a crash loop", func(c *corev1.Container) { c.Args = append(c.Args, "-no-such-flag") }},
	{"a hot loop", func(c *corev1.Container) { c.Args = append(c.Args, "-refresh=10ms") }},
}

// disruptRolloutEvery is longer than an analysis takes, which begins anew after each disruption.
const disruptRolloutEvery = 100 * time.Second

// meshDisruptions disrupt the mesh, and delete no pods of an operator: their successors would have its
// new version.
func meshDisruptions(agents, managers time.Duration) []siteDisruption {
	return []siteDisruption{{"an agent killed", killAgent, agents}, {"the manager killed", killManager, managers}}
}

// rollout rolls out bad versions, which the manager rolls back, and then a good one, while the manager
// and agents are killed.
func (s *suite) rollout(ctx context.Context) error {
	spec := operator.NewSpec(2, meshv1alpha1.OnChangeRelist, operator.FirstTenant)
	spec.Root.Rollout = &meshv1alpha1.Rollout{Soak: rolloutSoak, AutoRollback: true, Analysis: &meshv1alpha1.RolloutAnalysis{MaxWritesRatio: new(int32(3))}}
	return s.run(ctx, "rollout", spec, func(ctx context.Context, o *shardedOperator) error {
		o.Trial = operator.FirstTenant
		if err := o.CreateAll(ctx, kube.AllowRollback(o.Home)); err != nil {
			return err
		}
		if err := o.revise(ctx, func(set *appsv1.StatefulSet) {
			metav1.SetMetaDataAnnotation(&set.ObjectMeta, meshv1alpha1.AllowRollbackAnnotation, "true")
			set.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType}
		}); err != nil {
			return err
		}
		breaking, stop := context.WithCancel(ctx)
		broken := make(chan error, 1)
		go func() {
			broken <- disruptAll(breaking, rolloutSeed, 20*time.Second, meshDisruptions(disruptRolloutEvery, disruptRolloutEvery), []*shardedOperator{o})
		}()
		err := o.rollOut(ctx)
		stop()
		return errors.Join(err, <-broken, o.WaitSettled(ctx))
	})
}

// rollOut rolls out the bad versions, and a good one.
func (o *shardedOperator) rollOut(ctx context.Context) error {
	for _, v := range badVersions {
		if err := o.revise(ctx, func(set *appsv1.StatefulSet) { v.edit(&set.Spec.Template.Spec.Containers[0]) }); err != nil {
			return err
		}
		begun := time.Now()
		if err := o.rollsBack(ctx); err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		o.counts.stopped++
		o.counts.rolledBack++
		o.Logf("  %s was stopped and rolled back after %v", v.name, time.Since(begun).Round(time.Second))
	}
	if err := o.revise(ctx, func(set *appsv1.StatefulSet) {
		set.Spec.Template.Annotations = map[string]string{operator.VersionLabel: "v2"}
	}); err != nil {
		return err
	}
	if err := o.rollsOut(ctx); err != nil {
		return err
	}
	o.counts.rollouts++
	return nil
}

// revise edits the StatefulSet, and waits until its controller has made the revision.
func (o *shardedOperator) revise(ctx context.Context, edit func(*appsv1.StatefulSet)) error {
	set := o.StatefulSet()
	if err := o.Until(ctx, "the StatefulSet to be changed", func(ctx context.Context) error {
		if err := o.Get(ctx, client.ObjectKeyFromObject(set), set); err != nil {
			return err
		}
		edit(set)
		return o.Update(ctx, set)
	}); err != nil {
		return err
	}
	return o.Until(ctx, "the revision", func(ctx context.Context) error { return o.Observed(ctx, set) })
}

// rollsBack waits until the manager has rolled back the StatefulSet's revision. Pods other than the
// canary's that get the revision are counted.
func (o *shardedOperator) rollsBack(ctx context.Context) error {
	revision, err := o.revision(ctx)
	if err != nil {
		return err
	}
	return kube.UntilWithin(ctx, rolloutTimeout, "the rollout to be rolled back", func(ctx context.Context) error {
		pods, err := o.Pods(ctx)
		if err != nil {
			return err
		}
		for _, p := range pods {
			if p.Name != operator.Name+"-0" && p.Labels[appsv1.ControllerRevisionHashLabelKey] == revision {
				o.counts.escaped++
			}
		}
		return o.rolloutIs(ctx, func(r *meshv1alpha1.RolloutStatus) bool {
			return r.Phase == meshv1alpha1.RolloutComplete && r.Revision != revision &&
				slices.ContainsFunc(r.RolledBack, func(b meshv1alpha1.RolledBackRevision) bool { return b.Revision == revision && b.To == r.Revision })
		})
	})
}

// rollsOut waits until all pods have the StatefulSet's revision.
func (o *shardedOperator) rollsOut(ctx context.Context) error {
	revision, err := o.revision(ctx)
	if err != nil {
		return err
	}
	return kube.UntilWithin(ctx, rolloutTimeout, "the rollout to be complete", func(ctx context.Context) error {
		return o.rolloutIs(ctx, func(r *meshv1alpha1.RolloutStatus) bool {
			return r.Phase == meshv1alpha1.RolloutComplete && r.Revision == revision
		})
	})
}

// revision returns the revision that new pods of the StatefulSet get.
func (o *shardedOperator) revision(ctx context.Context) (string, error) {
	set := o.StatefulSet()
	err := o.Until(ctx, "the StatefulSet", func(ctx context.Context) error { return o.Get(ctx, client.ObjectKeyFromObject(set), set) })
	return set.Status.UpdateRevision, err
}

// rolloutIs returns an error unless the status of the rollout is as wanted.
func (o *shardedOperator) rolloutIs(ctx context.Context, wanted func(*meshv1alpha1.RolloutStatus) bool) error {
	root, err := o.ShardingConfig(ctx)
	if err != nil {
		return err
	}
	if r := root.Status.Root; r == nil || r.Rollout == nil || !wanted(r.Rollout) {
		return fmt.Errorf("root: %+v", root.Status.Root)
	}
	return nil
}
