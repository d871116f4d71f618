package trial

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Phases, by which the time of changes is reported.
const (
	phaseAdvice   = "advice"
	phaseAdoption = "adoption"
	phaseRemoval  = "removal"
	phaseKill     = "kill"
)

// steps takes the operator through adoption, rescaling, the loss of a leader, and removal.
func (t *trial) steps(ctx context.Context, c *churn, result *Result) error {
	_ = kube.Sleep(ctx, t.plan.Churn)
	c.enter(phaseAdvice)
	t.say("  on the mesh without a root")
	if err := t.observed(ctx, c, result); err != nil {
		return fmt.Errorf("observation: %w", err)
	}
	c.enter(phaseAdoption)
	t.say("  adopted into %d shards", t.plan.Sizes[0])
	if err := t.adopt(ctx, c); err != nil {
		return fmt.Errorf("adoption: %w", err)
	}
	result.Divided = true
	for _, size := range t.plan.Sizes[1:] {
		c.enter(fmt.Sprintf("rescaled to %d", size))
		t.say("  rescaled to %d shards", size)
		if err := t.rescale(ctx, c, size); err != nil {
			return fmt.Errorf("rescaling to %d: %w", size, err)
		}
	}
	if t.plan.Kill && !t.Lockless {
		c.enter(phaseKill)
		if err := t.killLeader(ctx, c); err != nil {
			return fmt.Errorf("after a leader was killed: %w", err)
		}
	}
	if err := t.reviewed(ctx, result); err != nil {
		return err
	}
	if err := t.describe(ctx, result); err != nil {
		return err
	}
	c.enter(phaseRemoval)
	t.say("  removed from the mesh")
	return failure.Wrap(t.unadopt(ctx, c), "removal")
}

// describe adds to the result by which method lists are narrowed, which agents report with some
// delay, and which locks the mesh permitted the operator to use.
func (t *trial) describe(ctx context.Context, result *Result) error {
	root, err := t.root(ctx)
	if err != nil {
		return err
	}
	result.Method = root.Status.Method
	result.GrantedLocks, err = t.grantedLocks(ctx)
	return err
}

// adopt applies the root, labels the pod template and waits until the shards work.
func (t *trial) adopt(ctx context.Context, c *churn) error {
	root := t.newRoot(t.plan.Sizes[0])
	if err := t.Create(ctx, root); err != nil {
		return fmt.Errorf("creating the root: %w", err)
	}
	if err := t.label(ctx, true); err != nil {
		return err
	}
	if err := t.scale(ctx, t.plan.Sizes[0]); err != nil {
		return err
	}
	if err := kube.InOrder(ctx, t.settled, c.reconciled); err != nil {
		return err
	}
	root, err := t.root(ctx)
	if err != nil {
		return err
	}
	t.say("  method %s, %s", root.Status.Method, describeShards(root))
	_ = kube.Sleep(ctx, t.plan.Churn)
	return nil
}

// newRoot returns the configuration of one pod per shard.
func (t *trial) newRoot(size int32) *meshv1alpha1.ShardingConfig {
	spec := meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		Prefix:           t.Name,
		TargetRef:        &meshv1alpha1.TargetRef{Kind: t.Kind, Name: t.target.GetName()},
		Auto:             &meshv1alpha1.AutoConfig{ShardingSize: size, EveryShardReplicas: 1},
		ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: t.Divided}},
	}, Webhook: t.Webhook}
	switch {
	case t.Lock == nil:
	case t.Lock.Namespace == "":
		spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: t.Lock.Name}
	default:
		spec.Controller = &meshv1alpha1.ControllerConfig{Locks: []meshv1alpha1.LockReference{{Namespace: t.Lock.Namespace, Name: t.Lock.Name}}}
	}
	return &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: t.Home, Name: rootName}, Spec: spec}
}

func (t *trial) root(ctx context.Context) (*meshv1alpha1.ShardingConfig, error) {
	root := &meshv1alpha1.ShardingConfig{}
	return root, failure.Wrap(t.Get(ctx, client.ObjectKey{Namespace: t.Home, Name: rootName}, root), "reading the root")
}

func (t *trial) changeRoot(ctx context.Context, edit func(*meshv1alpha1.RootConfig)) error {
	return kube.UntilWithin(ctx, time.Minute, "the root to be changed", func(ctx context.Context) error { // conflicts, and a busy webhook
		root, err := t.root(ctx)
		if err != nil {
			return err
		}
		edit(root.Spec.Root)
		return t.Update(ctx, root)
	})
}

// rescale changes the number of shards and of pods, and waits until the shards work.
func (t *trial) rescale(ctx context.Context, c *churn, size int32) error {
	if err := t.changeRoot(ctx, func(r *meshv1alpha1.RootConfig) { r.Auto.ShardingSize = size }); err != nil {
		return err
	}
	if err := t.scale(ctx, size); err != nil {
		return err
	}
	if err := kube.InOrder(ctx, t.settled, c.reconciled); err != nil {
		return err
	}
	_ = kube.Sleep(ctx, t.plan.Churn)
	return nil
}

// settled waits until there is no handover and every shard has a working member.
func (t *trial) settled(ctx context.Context) error {
	return t.until(ctx, "the shards to settle", func(ctx context.Context) error {
		root, err := t.root(ctx)
		if err != nil {
			return err
		}
		if err := kube.Settled(root, int(root.Spec.Root.Auto.ShardingSize)); err != nil {
			return err
		}
		return t.rolledOut(ctx)
	})
}

// killLeader kills the pod that leads the first shard, and waits until changes are reconciled again.
func (t *trial) killLeader(ctx context.Context, c *churn) error {
	var leader string
	err := t.until(ctx, "the shards' leaders", func(ctx context.Context) error {
		var list meshv1alpha1.ShardingConfigList
		if err := t.List(ctx, &list, client.InNamespace(t.Home)); err != nil {
			return err
		}
		for _, shard := range list.Items {
			for _, pod := range shard.Status.Pods {
				if pod.LockHolder {
					leader = pod.Name
					return nil
				}
			}
		}
		return errors.New("no pod holds a lock")
	})
	if err != nil {
		return err
	}
	t.say("  leader %s is killed", leader)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: t.Home, Name: leader}}
	if err := t.Delete(ctx, pod, client.GracePeriodSeconds(0)); err != nil {
		return fmt.Errorf("killing the leader: %w", err)
	}
	if err := t.settled(ctx); err != nil {
		return err
	}
	_ = kube.Sleep(ctx, t.plan.Churn)
	return c.reconciled(ctx)
}

// unadopt disables the root, removes the label by a rolling update, and deletes the root.
func (t *trial) unadopt(ctx context.Context, c *churn) error {
	if t.outside() == 1 { // without a lock, several pods would all act once the shards are deleted
		if err := t.rescale(ctx, c, t.outside()); err != nil {
			return err
		}
	}
	if err := t.changeRoot(ctx, func(r *meshv1alpha1.RootConfig) { r.Disable = new(true) }); err != nil {
		return err
	}
	err := t.until(ctx, "the shards to be withdrawn", func(ctx context.Context) error {
		root, err := t.root(ctx)
		if err != nil {
			return err
		}
		if root.Status.ObservedGeneration < root.Generation {
			return errors.New("the manager has not seen it")
		}
		if s := root.Status.Root; s != nil {
			for _, shard := range s.Shards {
				if len(shard.Held) > 0 {
					return fmt.Errorf("%s holds %v: %s", shard.Name, shard.Held, kube.ReadyMessage(root))
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := t.label(ctx, false); err != nil {
		return err
	}
	if err := kube.InOrder(ctx, t.removeRoot, c.reconciled); err != nil {
		return err
	}
	_ = kube.Sleep(ctx, t.plan.Churn)
	return nil
}

// removeRoot deletes the root, if there is one, and waits until it is deleted.
func (t *trial) removeRoot(ctx context.Context) error {
	root := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: t.Home, Name: rootName}}
	if err := client.IgnoreNotFound(t.Delete(ctx, root)); err != nil {
		return fmt.Errorf("deleting the root: %w", err)
	}
	return t.until(ctx, "the end of the root", func(ctx context.Context) error {
		err := t.Get(ctx, client.ObjectKeyFromObject(root), root)
		if err == nil {
			return fmt.Errorf("it is left: %s", kube.ReadyMessage(root))
		}
		return client.IgnoreNotFound(err)
	})
}

// reportsReady reports whether the status has been Ready for the given time, and no leader was
// missing meanwhile.
func reportsReady(root *meshv1alpha1.ShardingConfig, since time.Duration) bool {
	ready := meta.FindStatusCondition(root.Status.Conditions, meshv1alpha1.ConditionReady)
	missing := meta.FindStatusCondition(root.Status.Conditions, meshv1alpha1.ConditionLeaderMissing)
	return ready != nil && ready.Status == metav1.ConditionTrue && time.Since(ready.LastTransitionTime.Time) >= since &&
		(missing == nil || missing.Status != metav1.ConditionTrue && time.Since(missing.LastTransitionTime.Time) >= since)
}

func describeShards(root *meshv1alpha1.ShardingConfig) string {
	var out []string
	for _, shard := range root.Status.Root.Shards {
		out = append(out, fmt.Sprintf("%s: %d namespaces, %d objects", shard.Name, shard.Namespaces, shard.Weight))
	}
	return strings.Join(out, "; ")
}
