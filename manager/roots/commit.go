package roots

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// record is the recorded state of a root.
type record struct {
	// object is as it was last read or written here; nil if it must be read.
	object *v1alpha1.ShardingConfig
	stored decide.Stored
	broken error // why the state cannot be read
	// published is what the rest of the manager knows.
	published compile.Root
}

// read reads the object past any cache.
func (rt *runner) read(ctx context.Context, config *v1alpha1.ShardingConfig) error {
	object := &v1alpha1.ShardingConfig{TypeMeta: config.TypeMeta}
	err := rt.of.Client.Get(ctx, client.ObjectKeyFromObject(config), object)
	switch {
	case apierrors.IsNotFound(err) || err == nil && object.UID != rt.uid:
		return nil // the cache is outdated, and its next event starts a round
	case err != nil:
		return fmt.Errorf("reading it: %w", err)
	}
	rt.take(object)
	return nil
}

// take continues from the state of an object.
func (rt *runner) take(object *v1alpha1.ShardingConfig) {
	rt.object, rt.memory, rt.lookups.outside = object, rt.memory.Reread(), decide.Outside{}
	if rt.demand.Config.Name == "" {
		rt.demand = FirstDemand(object)
	}
	rt.stored = decide.Stored{Status: object.Status, ReadAt: rt.of.Now()}
	rt.stored.State, rt.broken = decide.Load(object.Status.Root)
	if object.Status.Root != nil {
		rt.stored.Acting = object.Status.Root.Acting
	}
	if rt.broken != nil {
		rt.broken = fmt.Errorf("its status is invalid, so that all its pods are refused: %w: fix status.root, or delete all its pods and then status.root", rt.broken)
	}
	rt.publish()
	rt.of.Written()
}

// publish publishes the state to the rest of the manager.
func (rt *runner) publish() {
	rt.published = rt.memory.Published(rt.stored, rt.lookups.firstOrdinal)
	rt.of.store(rt.uid, known{Root: rt.published, err: rt.broken})
}

// finalizer writes the finalizers of the object.
func (rt *runner) finalizer(ctx context.Context) error {
	object := rt.object
	patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{ // strings always marshal
		"uid": object.UID, "resourceVersion": object.ResourceVersion, "finalizers": object.Finalizers,
	}})
	rt.object = nil // until the patch has succeeded
	err := rt.of.Client.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch))
	if err != nil {
		return client.IgnoreNotFound(fmt.Errorf("writing its finalizer: %w", err))
	}
	rt.object = object
	return nil
}

// commit writes a decision and publishes its state. If another manager has written a state
// meanwhile, it writes nothing, and the next round continues from that state. next is what this
// leader remembers once the decision is written.
func (rt *runner) commit(ctx context.Context, next decide.Memory, d decide.Decision) error {
	if err := rt.write(ctx, d.Status); err != nil || rt.object == nil {
		return err
	}
	rt.memory = next
	rt.stored.Status, rt.stored.State, rt.stored.Acting = rt.object.Status, d.State, d.Status.Root.Acting
	before := rt.published
	rt.publish()
	if !samePolicies(before, rt.published) {
		rt.of.Written()
	}
	return nil
}

// write writes a status by compare and swap.
func (rt *runner) write(ctx context.Context, next v1alpha1.ShardingConfigStatus) error {
	for {
		updated := withStatus(rt.object, next)
		if equality.Semantic.DeepEqual(rt.object.Status, updated.Status) {
			return nil
		}
		err := rt.of.Client.Status().Update(ctx, updated)
		if err == nil {
			rt.object = updated
			return nil
		}
		if apierrors.IsNotFound(err) {
			rt.object = nil // its deletion starts a round
			return nil
		}
		if !apierrors.IsConflict(err) {
			// The write may have succeeded: then the next one conflicts.
			return fmt.Errorf("writing its status: %w", err)
		}
		fresh := &v1alpha1.ShardingConfig{TypeMeta: rt.object.TypeMeta}
		if err := rt.of.Client.Get(ctx, client.ObjectKeyFromObject(rt.object), fresh); err != nil {
			return fmt.Errorf("reading it again: %w", err)
		}
		was, locksBefore := decide.Durable(rt.object.Status.Root), rt.object.Status.Locks
		if fresh.UID != rt.uid || !equality.Semantic.DeepEqual(decide.Durable(fresh.Status.Root), was) || !equality.Semantic.DeepEqual(fresh.Status.Locks, locksBefore) {
			rt.object = nil
			return errors.New("another manager has written its status: reading it again")
		}
		rt.object, rt.stored.Status = fresh, fresh.Status
	}
}

// withStatus returns an object with another status.
func withStatus(object *v1alpha1.ShardingConfig, next v1alpha1.ShardingConfigStatus) *v1alpha1.ShardingConfig {
	updated := object.DeepCopy()
	updated.Status = *next.DeepCopy()
	if next.ObservedGeneration > object.Generation {
		// After a restore of etcd the watch may still show a later generation than the
		// object has.
		updated.Status.ObservedGeneration = 0
		for i := range updated.Status.Conditions {
			updated.Status.Conditions[i].ObservedGeneration = 0
		}
	}
	return updated
}

// samePolicies reports whether the same policies follow from a and b.
func samePolicies(a, b compile.Root) bool {
	return reflect.DeepEqual(withoutEvidence(a.State), withoutEvidence(b.State)) && equality.Semantic.DeepEqual(a.Locks, b.Locks) &&
		equality.Semantic.DeepEqual(a.Acting, b.Acting) && a.FirstOrdinal == b.FirstOrdinal &&
		slices.Equal(a.Lost, b.Lost) && maps.Equal(a.Forgotten, b.Forgotten)
}

func withoutEvidence(s handover.State) handover.State {
	s.Evidence = handover.Evidence{}
	return s
}
