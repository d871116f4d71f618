package roots

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// act carries out a decision that was written. It may do so again after a crash.
func (rt *runner) act(ctx context.Context, w Input, f decide.Facts, d decide.Decision, now time.Time) error {
	config, c := f.Spec.Config, rt.of.Client
	asked := rt.demand.Asked
	rt.demand = d.Demand
	rt.demand.Asked = asked // publishDemands ends it
	if d.Balanced != "" {
		rt.of.Log.Info("moving keys for balance", "namespace", config.Namespace, "shardingConfig", config.Name, "move", d.Balanced)
	}
	rt.metrics.set(config, d, now)
	rt.queries = d.Queries
	for _, e := range d.Events {
		rt.of.Recorder.Eventf(config, nil, e.Type, e.Reason, e.Action, "%s", e.Note)
	}
	errs := []error{
		labelMembers(ctx, c, f.Pods.ByUID, d.State.Members),
		keepChildren(ctx, c, config, w.Configs, d.Children),
	}
	if f.Scale != nil {
		errs = append(errs, f.Scale.Err)
	}
	if d.Evict != nil {
		errs = append(errs, rt.evict(ctx, config, d.Evict, now))
	}
	if d.Rollback != nil {
		errs = append(errs, rt.rollBack(ctx, config, d.Rollback, now))
	}
	if d.Release && controllerutil.RemoveFinalizer(rt.object, v1alpha1.HandoverFinalizer) {
		errs = append(errs, rt.finalizer(ctx))
	}
	return errors.Join(errs...)
}

// evict evicts a pod that must be replaced, if its disruption budget permits it.
func (rt *runner) evict(ctx context.Context, config *v1alpha1.ShardingConfig, e *decide.Eviction, now time.Time) error {
	pod := e.Pod
	meta := metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}
	err := rt.of.Client.SubResource("eviction").Create(ctx, &corev1.Pod{ObjectMeta: meta}, &policyv1.Eviction{
		ObjectMeta:    meta,
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil // it was deleted
	case apierrors.IsTooManyRequests(err):
		rt.memory = rt.memory.EvictionRefused(e, err, now)
		return nil
	case err != nil:
		return fmt.Errorf("evicting pod %s: %w", pod.Name, err)
	}
	rt.memory = rt.memory.Evicted(e)
	rt.of.Recorder.Eventf(config, pod, corev1.EventTypeNormal, "Restarting", "Evict", "pod %s is restarted: %s", pod.Name, e.Why)
	return nil
}

// labelMembers keeps the label of members that names their shard.
func labelMembers(ctx context.Context, c client.Client, pods map[string]*corev1.Pod, members map[string]handover.Member) error {
	var errs []error
	for uid, m := range members {
		pod := pods[uid]
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

// keepChildren keeps an object for each shard, and deletes others. These objects are read-only:
// edits are reverted, and have no other effect.
func keepChildren(ctx context.Context, c client.Client, root *v1alpha1.ShardingConfig, configs, wanted []*v1alpha1.ShardingConfig) error {
	have := map[string]*v1alpha1.ShardingConfig{}
	for _, o := range configs {
		if o.Namespace == root.Namespace && origin.IsNative(o) && metav1.IsControlledBy(o, root) {
			have[o.Name] = o
		}
	}
	var errs []error
	for _, want := range wanted {
		is := have[want.Name]
		delete(have, want.Name)
		switch {
		case is == nil && root.DeletionTimestamp != nil:
			// The garbage collector has deleted it, and would delete another one too.
		case is == nil:
			if err := c.Create(ctx, want); err != nil && !isChild(ctx, c, root, want.Name, err) {
				errs = append(errs, fmt.Errorf("creating its ShardingConfig %s: %w", want.Name, err))
			}
		default:
			errs = append(errs, updateChild(ctx, c, is, want))
		}
	}
	for _, is := range have {
		errs = append(errs, deleteChild(ctx, c, is))
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
