package roots

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// keepChildren keeps an object for each shard. These objects are read-only: edits are
// reverted, and have no other effect.
func keepChildren(ctx context.Context, c client.Client, v view, state handover.State) error {
	have := map[string]*v1alpha1.ShardingConfig{}
	for _, o := range v.world.Configs {
		if o.Namespace == v.config.Namespace && origin.IsNative(o) && metav1.IsControlledBy(o, v.config) {
			have[o.Name] = o
		}
	}
	wanted := state.Shards
	deleting := v.config.DeletionTimestamp != nil
	if deleting && !state.Holds() {
		wanted = nil // the garbage collector may be slow, or off
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		want := child(v.config, name)
		switch is := have[name]; {
		case is == nil && deleting:
			// The garbage collector has deleted it, and would delete another one too.
		case is == nil:
			if err := c.Create(ctx, want); err != nil && !isChild(ctx, c, v.config, name, err) {
				errs = append(errs, fmt.Errorf("creating its ShardingConfig %s: %w", name, err))
			}
		default:
			errs = append(errs, updateChild(ctx, c, is, want))
		}
	}
	for name, is := range have {
		if _, ok := wanted[name]; !ok {
			errs = append(errs, deleteChild(ctx, c, is))
		}
	}
	return errors.Join(errs...)
}

// updateChild reverts edits of a child.
func updateChild(ctx context.Context, c client.Client, is, want *v1alpha1.ShardingConfig) error {
	if equality.Semantic.DeepEqual(is.Spec, want.Spec) && is.Labels[v1alpha1.RootLabel] == want.Labels[v1alpha1.RootLabel] {
		return nil
	}
	updated := is.DeepCopy()
	updated.Spec = want.Spec
	metav1.SetMetaDataLabel(&updated.ObjectMeta, v1alpha1.RootLabel, want.Labels[v1alpha1.RootLabel])
	if err := c.Update(ctx, updated); err != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("updating its ShardingConfig %s: %w", want.Name, err)
	}
	return nil
}

// isChild reports whether a child could not be created because it exists already, and the
// cache is outdated.
func isChild(ctx context.Context, c client.Client, config *v1alpha1.ShardingConfig, name string, err error) bool {
	is := &v1alpha1.ShardingConfig{}
	return apierrors.IsAlreadyExists(err) &&
		c.Get(ctx, types.NamespacedName{Namespace: config.Namespace, Name: name}, is) == nil &&
		metav1.IsControlledBy(is, config)
}

func deleteChild(ctx context.Context, c client.Client, o *v1alpha1.ShardingConfig) error {
	if o.DeletionTimestamp != nil {
		return nil
	}
	err := c.Delete(ctx, o, client.Preconditions{UID: &o.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting its ShardingConfig %s: %w", o.Name, err)
	}
	return nil
}

// child returns the object of a shard.
func child(root *v1alpha1.ShardingConfig, shard string) *v1alpha1.ShardingConfig {
	spec := root.Spec.DeepCopy()
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       root.Namespace,
			Name:            shard,
			Labels:          map[string]string{v1alpha1.RootLabel: root.Name},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(root, origin.KindOf(root))},
		},
		Spec: v1alpha1.ShardingConfigSpec{
			Selector:           &metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.ShardLabel: shard}},
			Controller:         spec.Controller,
			Webhook:            spec.Webhook,
			Limits:             collect.Map(slices.Concat(spec.Root.ResourceSelector, spec.Limits), layout.Written),
			FailurePolicy:      spec.FailurePolicy,
			TokenBinding:       spec.TokenBinding,
			ClientCertificates: spec.ClientCertificates,
			Isolation:          spec.Isolation,
			Reads:              spec.Reads,
			Fence:              spec.Fence,
		},
	}
}

// labelMembers keeps the label of members that names their shard.
func labelMembers(ctx context.Context, c client.Client, v view, members map[string]handover.Member) error {
	var errs []error
	for uid, m := range members {
		pod := v.all[uid]
		if pod == nil || pod.Labels[v1alpha1.ShardLabel] == m.Shard {
			continue
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": uid, "labels": map[string]string{v1alpha1.ShardLabel: m.Shard}}})
		if err != nil {
			return err
		}
		object := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}
		err = c.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch))
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("labelling pod %s: %w", pod.Name, err))
		}
	}
	return errors.Join(errs...)
}

// release removes the finalizer of a root that is being deleted, once no pod acts on its
// shards or leads under their locks, and all pods that cannot run unsharded are replaced.
func (rt *root) release(ctx context.Context, v view) error {
	if v.config.DeletionTimestamp == nil || rt.state.Holds() || !slices.Contains(rt.object.Finalizers, v1alpha1.HandoverFinalizer) ||
		!v.quiet(rt.state.Members) || v.unreleased(rt.locks) || len(v.misfits(rt.state.Members)) > 0 {
		return nil
	}
	if collect.Any(rt.state.Members, func(_ string, m handover.Member) bool { return v.exists(m) }) {
		return nil
	}
	rt.object.Finalizers = slices.DeleteFunc(rt.object.Finalizers, func(f string) bool { return f == v1alpha1.HandoverFinalizer })
	return rt.finalizer(ctx)
}
