package sharding

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// site is an operator that is adopted and removed again and again.
type site struct {
	*shardedOperator
	adopted int
}

// prepare creates namespaces for an operator, which it does not start, and for its own objects.
func (s *suite) prepare(ctx context.Context, part string, tenants int) (*shardedOperator, error) {
	of := &operator.Tenants{Testbed: s.Testbed, Class: part}
	if err := of.Add(ctx, "chaos-"+part+"-%02d", tenants); err != nil {
		return nil, err
	}
	operators := &operator.Operators{Testbed: s.Testbed, Result: s.Result, Tenants: of, Counts: s.Counts}
	o, err := operators.Prepare(ctx, part)
	if err != nil {
		return nil, err
	}
	return &shardedOperator{o, &s.counts}, nil
}

// newSite starts an operator outside the mesh, with its own objects.
func (s *suite) newSite(ctx context.Context, n int) (*site, error) {
	o, err := s.prepare(ctx, fmt.Sprintf("site-%d", n), adoptionTenants)
	if err != nil {
		return nil, err
	}
	err = o.CreateStatefulSet(ctx, 2, func(set *appsv1.StatefulSet) {
		delete(set.Spec.Template.Labels, meshv1alpha1.EnableProxyLabel)
	})
	if err != nil {
		return nil, err
	}
	created := &site{shardedOperator: o}
	if err := created.leadsOutside(ctx); err != nil {
		return nil, err
	}
	o.StartWriter()
	return created, nil
}

// removeTenants deletes the namespaces of the operator's objects.
func (o *shardedOperator) removeTenants(ctx context.Context) error {
	var errs []error
	for _, t := range o.Tenants.Names {
		err := o.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: t}})
		errs = append(errs, client.IgnoreNotFound(err))
	}
	return errors.Join(errs...)
}

// rounds adopts and removes the operator adoptionRounds times.
func (s *site) rounds(ctx context.Context) error {
	for i := range adoptionRounds {
		start := time.Now()
		if err := s.adopt(ctx, i); err != nil {
			return fmt.Errorf("%s: adoption %d: %w", s.Part, i+1, err)
		}
		adopted := time.Since(start)
		if err := s.remove(ctx, i); err != nil {
			return fmt.Errorf("%s: removal %d: %w", s.Part, i+1, err)
		}
		s.adopted++
		s.Logf("  %s: adoption %d took %v, removal %v", s.Part, i+1,
			adopted.Round(100*time.Millisecond), (time.Since(start) - adopted).Round(100*time.Millisecond))
	}
	return nil
}

// adopt creates a root and labels the pod template, in either order. Every fifth time the
// rollout is paused for a while, and every seventh time all shards must lead, too.
func (s *site) adopt(ctx context.Context, round int) error {
	root := s.NewRoot(operator.NewSpec(2, meshv1alpha1.OnChangeRelist))
	create := func(ctx context.Context) error {
		return s.Until(ctx, "the root to be made", func(ctx context.Context) error {
			root.ResourceVersion = ""
			err := s.Create(ctx, root)
			if !apierrors.IsAlreadyExists(err) {
				return err
			}
			if there, err := s.ShardingConfig(ctx); err != nil || there.DeletionTimestamp != nil {
				return errors.Join(err, errors.New("the root before it is still there"))
			}
			return nil
		})
	}
	steps := []func(context.Context) error{create, func(ctx context.Context) error { return s.roll(ctx, true, round%5 == 4) }}
	if round%2 == 1 {
		slices.Reverse(steps)
	}
	if err := kube.InOrder(ctx, steps...); err != nil {
		return err
	}
	return kube.UntilWithin(ctx, adoptionSettles, "the operator to be adopted", func(ctx context.Context) error {
		root, err := s.ShardingConfig(ctx)
		if err != nil {
			return err
		}
		if c := meta.FindStatusCondition(root.Status.Conditions, meshv1alpha1.ConditionReady); c != nil && c.Status != metav1.ConditionTrue {
			return errors.New(kube.ReadyMessage(root))
		}
		if round%7 == 6 && !ledByAll(root) {
			return errors.New("not every shard leads")
		}
		return s.Settled(ctx)
	})
}

// ledByAll reports whether every shard of the root has a leader.
func ledByAll(root *meshv1alpha1.ShardingConfig) bool {
	without := func(shard meshv1alpha1.ShardStatus) bool { return shard.Leader == "" }
	status := root.Status.Root
	return status != nil && len(status.Shards) > 0 && !slices.ContainsFunc(status.Shards, without)
}

// roll adds the label to the pod template or removes it. A partitioned rollout pauses after
// the last pod.
func (s *site) roll(ctx context.Context, labelled, partitioned bool) error {
	if partitioned {
		if err := s.template(ctx, labelled, 1); err != nil {
			return err
		}
		if err := kube.Sleep(ctx, pause); err != nil { // the pause is part of the test
			return err
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
	return s.Until(ctx, "the pod template to be changed", func(ctx context.Context) error {
		return s.Patch(ctx, s.StatefulSet(), client.RawPatch(types.StrategicMergePatchType, patch))
	})
}

// remove disables the root, removes the label, and waits until the operator works outside the
// mesh. Every third time it deletes the root at once.
func (s *site) remove(ctx context.Context, round int) error {
	if round%3 == 2 {
		unlabel := func(ctx context.Context) error { return s.template(ctx, false, 0) }
		return kube.InOrder(ctx, s.deleteRoot, unlabel, s.leadsOutside)
	}
	disable := func(ctx context.Context) error {
		return s.Change(ctx, func(c *meshv1alpha1.ShardingConfigSpec) { c.Root.Disable = new(true) })
	}
	unlabel := func(ctx context.Context) error { return s.roll(ctx, false, round%5 == 3) }
	return kube.InOrder(ctx, disable, unlabel, s.leadsOutside, s.deleteRoot)
}

func (s *site) deleteRoot(ctx context.Context) error {
	return s.Until(ctx, "the root to be deleted", func(ctx context.Context) error {
		root := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: s.Home, Name: operator.Name}}
		return client.IgnoreNotFound(s.Delete(ctx, root))
	})
}

// leadsOutside waits until the rollout is complete, no root is being deleted, and a pod of the
// operator holds the operator lock.
func (s *site) leadsOutside(ctx context.Context) error {
	return kube.UntilWithin(ctx, adoptionSettles, "the operator to work outside the mesh", func(ctx context.Context) error {
		if err := s.RolledOut(ctx, s.StatefulSet()); err != nil {
			return err
		}
		root, err := s.ShardingConfig(ctx)
		switch {
		case client.IgnoreNotFound(err) != nil:
			return err
		case err == nil && root.DeletionTimestamp != nil:
			return errors.New("its root is still there")
		}
		var lease coordinationv1.Lease
		if err := s.Get(ctx, client.ObjectKey{Namespace: s.Home, Name: operator.Lock}, &lease); err != nil {
			return err
		}
		if holder := lease.Spec.HolderIdentity; holder == nil || !strings.HasPrefix(*holder, operator.Name+"-") {
			return errors.New("no pod of the operator holds the lock")
		}
		return nil
	})
}
