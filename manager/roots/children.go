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
)

// keepChildren keeps an object for each shard, for people to see. Nothing follows
// from what is written there.
func (rt *root) keepChildren(ctx context.Context, v view) error {
	have := map[string]*v1alpha1.ShardingConfig{}
	for _, c := range v.world.Configs {
		if c.Namespace == v.config.Namespace && metav1.IsControlledBy(c, v.config) {
			have[c.Name] = c
		}
	}
	wanted := rt.state.Shards
	deleting := v.config.DeletionTimestamp != nil
	if deleting && !rt.state.Holds() {
		wanted = nil // the garbage collector may be slow, or off
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		want := child(v.config, name)
		switch is := have[name]; {
		case is == nil && deleting:
			// The garbage collector was faster. It would delete another one too.
		case is == nil:
			if err := rt.Client.Create(ctx, want); err != nil && !rt.mine(ctx, v.config, name, err) {
				errs = append(errs, fmt.Errorf("creating its ShardingConfig %s: %w", name, err))
			}
		default:
			errs = append(errs, rt.updateChild(ctx, is, want))
		}
	}
	for name, is := range have {
		if _, ok := wanted[name]; !ok {
			errs = append(errs, rt.deleteChild(ctx, is))
		}
	}
	return errors.Join(errs...)
}

// updateChild reverts what is written into a child.
func (rt *root) updateChild(ctx context.Context, is, want *v1alpha1.ShardingConfig) error {
	if equality.Semantic.DeepEqual(is.Spec, want.Spec) && is.Labels[v1alpha1.RootLabel] == want.Labels[v1alpha1.RootLabel] {
		return nil
	}
	updated := is.DeepCopy()
	updated.Spec = want.Spec
	metav1.SetMetaDataLabel(&updated.ObjectMeta, v1alpha1.RootLabel, want.Labels[v1alpha1.RootLabel])
	if err := rt.Client.Update(ctx, updated); err != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("updating its ShardingConfig %s: %w", want.Name, err)
	}
	return nil
}

// mine reports whether a child could not be created because it is there already, and
// only what is watched is behind.
func (rt *root) mine(ctx context.Context, config *v1alpha1.ShardingConfig, name string, err error) bool {
	is := &v1alpha1.ShardingConfig{}
	return apierrors.IsAlreadyExists(err) &&
		rt.Client.Get(ctx, types.NamespacedName{Namespace: config.Namespace, Name: name}, is) == nil &&
		metav1.IsControlledBy(is, config)
}

func (rt *root) deleteChild(ctx context.Context, c *v1alpha1.ShardingConfig) error {
	if c.DeletionTimestamp != nil {
		return nil
	}
	err := rt.Client.Delete(ctx, c, client.Preconditions{UID: &c.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting its ShardingConfig %s: %w", c.Name, err)
	}
	return nil
}

// child is the object of a shard.
func child(root *v1alpha1.ShardingConfig, shard string) *v1alpha1.ShardingConfig {
	spec := root.Spec.DeepCopy()
	yes := true
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: root.Namespace,
			Name:      shard,
			Labels:    map[string]string{v1alpha1.RootLabel: root.Name},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: v1alpha1.GroupVersion.String(), Kind: "ShardingConfig",
				Name: root.Name, UID: root.UID, Controller: &yes, BlockOwnerDeletion: &yes,
			}},
		},
		Spec: v1alpha1.ShardingConfigSpec{
			Selector:           &metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.ShardLabel: shard}},
			Controller:         spec.Controller,
			Webhook:            spec.Webhook,
			Limits:             slices.Concat(spec.Root.ResourceSelector, spec.Limits),
			FailurePolicy:      spec.FailurePolicy,
			TokenBinding:       spec.TokenBinding,
			ClientCertificates: spec.ClientCertificates,
			Isolation:          spec.Isolation,
			Reads:              spec.Reads,
			Fence:              spec.Fence,
		},
	}
}

// label keeps the label of assigned pods that tells people their shard.
func (rt *root) label(ctx context.Context, v view) error {
	var errs []error
	for uid, m := range rt.state.Members {
		pod := v.all[uid]
		if pod == nil || pod.Labels[v1alpha1.ShardLabel] == m.Shard {
			continue
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": uid, "labels": map[string]string{v1alpha1.ShardLabel: m.Shard}}})
		if err != nil {
			return err
		}
		object := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}
		err = rt.Client.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch))
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("labelling pod %s: %w", pod.Name, err))
		}
	}
	return errors.Join(errs...)
}

// finalizers is the patch that writes the finalizers of an object as it was read.
func finalizers(c *v1alpha1.ShardingConfig) []byte {
	patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{ // strings always marshal
		"uid": c.UID, "resourceVersion": c.ResourceVersion, "finalizers": c.Finalizers,
	}})
	return patch
}

// release lets go of a root that is being deleted, once no pod acts on its shards or
// leads under their locks, and all that cannot run unsharded are replaced.
func (rt *root) release(ctx context.Context, v view) error {
	if v.config.DeletionTimestamp == nil || rt.state.Holds() || !slices.Contains(rt.object.Finalizers, v1alpha1.HandoverFinalizer) ||
		!rt.quiet(v, rt.state) || rt.unreleased(v) || len(misfits(v, rt.state.Members)) > 0 {
		return nil
	}
	for _, m := range rt.state.Members {
		if isThere(v, m) {
			return nil
		}
	}
	rt.object.Finalizers = slices.DeleteFunc(rt.object.Finalizers, func(f string) bool { return f == v1alpha1.HandoverFinalizer })
	return rt.finalizer(ctx)
}
