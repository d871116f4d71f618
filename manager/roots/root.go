package roots

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/idle"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
	"github.com/ctrlmesh/ctrlmesh/manager/undivided"
)

// root is one configuration, as far as this leader knows it.
type root struct {
	*Roots
	uid types.UID
	record
	plan
	gate
	workload
	evictions
	leading
	reporter
	exited exited
	lost   lost
	beyond undivided.Tracker
	quiet  idle.Tracker
	// forgotten are the members, by uid, of which their agents have no record. dropped are
	// those of them that are no members any more once the state is written.
	forgotten   map[string]bool
	dropped     []string
	unconfirmed []string // descriptions of the pods that the first grant waits for
	// divided are the scopes before a change of what shards act by. The next division
	// begins with them.
	divided   map[string]sharding.Scope
	unplanned bool // the state does not follow the configuration yet
}

// record is the recorded state of a root.
type record struct {
	// object is as it was last read or written here; nil if it must be read.
	object *v1alpha1.ShardingConfig
	state  handover.State
	acting *v1alpha1.ActingSpec // what shards act by; nil if it is not on record
	readAt time.Time            // when state was read
	broken error                // why the state cannot be read
	// published is what the rest of the manager knows.
	published compile.Root
}

// round runs a round of one root. config may be outdated: state is read from the object
// that was last read or written here.
func (rt *root) round(ctx context.Context, config *v1alpha1.ShardingConfig, w World) (err error) {
	if rt.object == nil || rt.broken != nil {
		if err := rt.read(ctx, config); err != nil || rt.object == nil {
			return err
		}
	}
	if rt.broken != nil {
		return rt.broken
	}
	if config.DeletionTimestamp == nil && controllerutil.AddFinalizer(rt.object, v1alpha1.HandoverFinalizer) {
		if err := rt.finalizer(ctx); err != nil || rt.object == nil {
			return err
		}
	}

	if !rt.current(w) {
		return nil // the policies that follow from what was read start a round
	}

	now := rt.Now()
	v := rt.look(config, w)
	if v.first, err = rt.ordinals(ctx, config, now); err != nil {
		return err
	}
	rt.survey(ctx, v, now)
	state, effects := rt.step(v, now)
	rt.lead(ctx, v, state, now)
	rt.compare(v, state, now)
	next := rt.status(v, state, now)
	if err := rt.write(ctx, state, next); err != nil || rt.object == nil {
		return err
	}
	rt.setDemand(v, state)
	rt.report(config, rt.object.Status.Root, rt.state, effects, now)
	rt.warnLeaderless(config, rt.leaders)
	return errors.Join(
		labelMembers(ctx, rt.Client, v, rt.state.Members),
		keepChildren(ctx, rt.Client, v, rt.state),
		rt.restart(ctx, v, rt.state, rt.locks, now),
		rt.release(ctx, v),
	)
}

// read reads the object past any cache.
func (rt *root) read(ctx context.Context, config *v1alpha1.ShardingConfig) error {
	object := &v1alpha1.ShardingConfig{TypeMeta: config.TypeMeta}
	err := rt.Client.Get(ctx, client.ObjectKeyFromObject(config), object)
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
func (rt *root) take(object *v1alpha1.ShardingConfig) {
	rt.object, rt.plan, rt.gate = object, plan{}, gate{demand: rt.demand}
	rt.state, rt.broken = decide.Load(object.Status.Root)
	rt.acting = nil
	if object.Status.Root != nil {
		rt.acting = object.Status.Root.Acting
	}
	rt.readAt = rt.Now()
	if rt.broken != nil {
		rt.broken = fmt.Errorf("its status is invalid, so that all its pods are refused: %w: fix status.root, or delete all its pods and then status.root", rt.broken)
	}
	rt.store(rt.uid, known{Root: rt.public(object.Status.Locks), err: rt.broken})
	rt.Written()
}

// public returns the state that the rest of the manager uses from now on.
func (rt *root) public(locks []v1alpha1.LockStatus) compile.Root {
	rt.published = compile.Root{State: rt.state, Locks: locks, Acting: rt.acting, FirstOrdinal: rt.first, Lost: rt.lost.members(), Forgotten: maps.Clone(rt.forgotten)}
	return rt.published
}

// finalizer writes the finalizers of the object.
func (rt *root) finalizer(ctx context.Context) error {
	object := rt.object
	patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{ // strings always marshal
		"uid": object.UID, "resourceVersion": object.ResourceVersion, "finalizers": object.Finalizers,
	}})
	rt.object = nil // until the patch has succeeded
	err := rt.Client.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch))
	if err != nil {
		return client.IgnoreNotFound(fmt.Errorf("writing its finalizer: %w", err))
	}
	rt.object = object
	return nil
}

// status returns the status to write.
func (rt *root) status(v view, state handover.State, now time.Time) v1alpha1.ShardingConfigStatus {
	config := v.config.DeepCopy()
	rt.object.Status.DeepCopyInto(&config.Status)
	obstacle := rt.obstacle(v, state, now)
	if v.changes() || rt.unplanned && obstacle == nil {
		config.Generation = config.Status.ObservedGeneration
	}
	out := decide.Save(state)
	out.Acting = rt.actsBy(v, state)
	rt.addWeights(&out, v)
	rt.markIdle(&out, v, state, now)
	var stamping *v1alpha1.StampingStatus
	if config.Spec.Root.Method == v1alpha1.MethodLabels {
		stamping = rt.Stamping(config)
	}
	return status.OfRoot(status.RootInput{
		Config: config, State: state, Root: out, Pods: v.pods, Conflicts: v.conflicts, TooLarge: v.tooLarge, Problem: v.problem,
		Restarting: rt.why, Unconfirmed: rt.unconfirmed, Leaders: rt.leaders, Undivided: rt.beyond.Result,
		Common: status.Common{
			Locks: rt.locks, Obstacle: obstacle, Stamping: stamping, Observe: rt.Observe, Now: now, Since: rt.since,
			Wanted: func(uid string) string { return v.policy(uid).GetVersion() },
		},
	})
}

// write writes a state and publishes it. If another manager has written a state meanwhile,
// it writes nothing, and the next round continues from that state.
func (rt *root) write(ctx context.Context, state handover.State, next v1alpha1.ShardingConfigStatus) error {
	for {
		updated := rt.object.DeepCopy()
		updated.Status = *next.DeepCopy()
		if next.ObservedGeneration > rt.object.Generation {
			// After a restore of etcd the watch may still show a later generation than the
			// object has.
			updated.Status.ObservedGeneration = 0
			for i := range updated.Status.Conditions {
				updated.Status.Conditions[i].ObservedGeneration = 0
			}
		}
		if equality.Semantic.DeepEqual(rt.object.Status, updated.Status) {
			break
		}
		err := rt.Client.Status().Update(ctx, updated)
		if err == nil {
			rt.object = updated
			break
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
		if err := rt.Client.Get(ctx, client.ObjectKeyFromObject(rt.object), fresh); err != nil {
			return fmt.Errorf("reading it again: %w", err)
		}
		was, locksBefore := decide.Durable(rt.object.Status.Root), rt.object.Status.Locks
		if fresh.UID != rt.uid || !equality.Semantic.DeepEqual(decide.Durable(fresh.Status.Root), was) || !equality.Semantic.DeepEqual(fresh.Status.Locks, locksBefore) {
			rt.object = nil
			return errors.New("another manager has written its status: reading it again")
		}
		rt.object = fresh
	}
	before := rt.published
	rt.state, rt.acting = state, next.Root.Acting
	for _, uid := range rt.dropped {
		delete(rt.forgotten, uid)
	}
	now := rt.public(next.Locks)
	rt.store(rt.uid, known{Root: now})
	if !samePolicies(before, now) {
		rt.Written()
	}
	return nil
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
