package roots

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// root is one configuration, as far as this leader knows it.
type root struct {
	*Roots
	uid types.UID
	record
	plan
	gate
	restarting
	ended     ended
	leftovers leftovers
	forgotten map[string]bool // members, by uid, that their agents know nothing of
	dropped   []string        // of them, that are members no more once it is written
	unsure    []string        // whom the first keys wait for, for people
	unplanned bool            // the state does not follow the configuration yet
	leading
	reported
}

// record is what is written of a root.
type record struct {
	// object is as it was last read or written here; nil while it must be read.
	object *v1alpha1.ShardingConfig
	state  handover.State
	readAt time.Time // when state was read
	broken error     // why the state cannot be read
	// published is what the rest of the manager knows.
	published compile.Root
}

// reported is what people were told of a root.
type reported struct {
	// blocked: an Event says that a handover is, and rolledBack that the state was.
	blocked, rolledBack bool
	counted             []string // shards with metrics
}

// round is a round of one root. config is as watched; what must not be stale is
// read from the object that was written.
func (rt *root) round(ctx context.Context, config *v1alpha1.ShardingConfig, w World) error {
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

	now := rt.now()
	v := rt.look(config, w)
	rt.survey(ctx, v, now)
	state, effects := rt.step(v, now)
	rt.lead(ctx, v, state, now)
	next := rt.status(v, state, now)
	if err := rt.write(ctx, state, next); err != nil || rt.object == nil {
		return err
	}
	rt.ask(v, state)
	rt.tell(config, effects, now)
	rt.warnRolledBack(config)
	rt.warn(config, now)
	rt.warnLeaderless(config)
	rt.count(config)
	return errors.Join(
		rt.label(ctx, v),
		rt.keepChildren(ctx, v),
		rt.restart(ctx, v, now),
		rt.release(ctx, v),
	)
}

// read reads the object past any cache.
func (rt *root) read(ctx context.Context, config *v1alpha1.ShardingConfig) error {
	object := &v1alpha1.ShardingConfig{}
	err := rt.Client.Get(ctx, client.ObjectKeyFromObject(config), object)
	switch {
	case apierrors.IsNotFound(err) || err == nil && object.UID != rt.uid:
		return nil // what is watched is behind, and will tell
	case err != nil:
		return fmt.Errorf("reading it: %w", err)
	}
	rt.take(object)
	return nil
}

// take goes on from what an object says.
func (rt *root) take(object *v1alpha1.ShardingConfig) {
	rt.object, rt.plan, rt.gate = object, plan{}, gate{demand: rt.demand}
	rt.state, rt.broken = Load(object.Status.Root)
	rt.readAt = rt.now()
	if rt.broken != nil {
		rt.broken = fmt.Errorf("its status does not say who holds what, so that all its pods are refused: %w: mend status.root, or delete all its pods and then status.root", rt.broken)
	}
	rt.store(rt.uid, known{Root: rt.public(object.Status.Locks), err: rt.broken})
	rt.wake()
}

// public is what the rest of the manager is to know from now on.
func (rt *root) public(locks []v1alpha1.LockStatus) compile.Root {
	rt.published = compile.Root{State: rt.state, Locks: locks, Lost: rt.leftovers.members(), Forgotten: maps.Clone(rt.forgotten)}
	return rt.published
}

// finalizer writes the finalizers of the object.
func (rt *root) finalizer(ctx context.Context) error {
	object := rt.object
	rt.object = nil // until it is known how that went
	err := rt.Client.Patch(ctx, object, client.RawPatch(types.MergePatchType, finalizers(object)))
	if err != nil {
		return client.IgnoreNotFound(fmt.Errorf("writing its finalizer: %w", err))
	}
	rt.object = object
	return nil
}

// status is what is to be written.
func (rt *root) status(v view, state handover.State, now time.Time) v1alpha1.ShardingConfigStatus {
	config := v.config.DeepCopy()
	rt.object.Status.DeepCopyInto(&config.Status)
	obstacle := rt.obstacle(v, state, now)
	if rt.unplanned && obstacle == nil {
		config.Generation = config.Status.ObservedGeneration
	}
	out := Save(state)
	rt.weigh(&out, v)
	var stamping *v1alpha1.StampingStatus
	if config.Spec.Root.Method == v1alpha1.MethodLabels {
		stamping = rt.Stamping(config)
	}
	return status.OfRoot(status.RootInput{
		Config: config, State: state, Root: out, Pods: v.pods, Conflicts: v.conflicts, TooLarge: v.tooLarge, Problem: v.problem,
		Restarting: rt.why, Unsure: rt.unsure, Leaders: rt.leaders,
		Common: status.Common{
			Locks: rt.locks, Obstacle: obstacle, Stamping: stamping, Observe: rt.Observe, Now: now, Since: rt.since,
			Wanted: func(uid string) string { return v.world.Compiled.Policies[types.UID(uid)].GetVersion() },
		},
	})
}

// write writes a state, and lets it be known. Somebody else who leads, or led, may
// have written meanwhile: then nothing is, and what they wrote is what is.
func (rt *root) write(ctx context.Context, state handover.State, next v1alpha1.ShardingConfigStatus) error {
	for {
		updated := rt.object.DeepCopy()
		updated.Status = *next.DeepCopy()
		if next.ObservedGeneration > rt.object.Generation {
			forgetGeneration(&updated.Status)
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
			rt.object = nil // what is watched will tell
			return nil
		}
		if !apierrors.IsConflict(err) {
			// It may be written for all that is known: then the next will conflict.
			return fmt.Errorf("writing its status: %w", err)
		}
		fresh := &v1alpha1.ShardingConfig{}
		if err := rt.Client.Get(ctx, client.ObjectKeyFromObject(rt.object), fresh); err != nil {
			return fmt.Errorf("reading it again: %w", err)
		}
		was, locksBefore := durable(rt.object.Status.Root), rt.object.Status.Locks
		if fresh.UID != rt.uid || !equality.Semantic.DeepEqual(durable(fresh.Status.Root), was) || !equality.Semantic.DeepEqual(fresh.Status.Locks, locksBefore) {
			rt.object = nil
			return errors.New("its status was written by somebody else: reading it again")
		}
		rt.object = fresh
	}
	before := rt.published
	rt.state = state
	for _, uid := range rt.dropped {
		delete(rt.forgotten, uid)
	}
	now := rt.public(next.Locks)
	rt.store(rt.uid, known{Root: now})
	if !samePolicies(before, now) {
		rt.wake()
	}
	return nil
}

// forgetGeneration makes a status say that its generation was not observed. After a restore
// of etcd the watch may still show a later generation than the object has.
func forgetGeneration(s *v1alpha1.ShardingConfigStatus) {
	s.ObservedGeneration = 0
	for i := range s.Conditions {
		s.Conditions[i].ObservedGeneration = 0
	}
}

// samePolicies reports whether the same policies follow from a and b.
func samePolicies(a, b compile.Root) bool {
	return reflect.DeepEqual(withoutEvidence(a.State), withoutEvidence(b.State)) && equality.Semantic.DeepEqual(a.Locks, b.Locks) &&
		slices.Equal(a.Lost, b.Lost) && maps.Equal(a.Forgotten, b.Forgotten)
}

func withoutEvidence(s handover.State) handover.State {
	s.Evidence = handover.Evidence{}
	return s
}

// view is a root's part of the world.
type view struct {
	world  World
	config *v1alpha1.ShardingConfig
	// problem says why the plan is not to be changed.
	problem   error
	conflicts []compile.Conflict
	tooLarge  []string // members whose policy exceeds what an agent receives
	// pods of the workload that are on the mesh and have not ended.
	pods []*corev1.Pod
	// removed are pods without a policy that may act under the root.
	removed []push.Removed
	// all labelled pods of the namespace, by uid.
	all map[string]*corev1.Pod
}

func (rt *root) look(config *v1alpha1.ShardingConfig, w World) view {
	v := view{world: w, config: config, all: map[string]*corev1.Pod{}}
	if errs := layout.Validate(config.Spec.Root, field.NewPath("spec", "root")); len(errs) > 0 {
		v.problem = errs.ToAggregate()
	}
	for _, s := range w.Compiled.Shards {
		if s.NamespacedName != client.ObjectKeyFromObject(config) {
			continue
		}
		v.conflicts, v.tooLarge = s.Conflicts, s.TooLarge
		if v.problem == nil && s.Problem != nil && s.Config.Generation == config.Generation {
			v.problem = errors.New(s.Problem.Message)
		}
	}
	for _, p := range w.Pods {
		if p.Namespace != config.Namespace {
			continue
		}
		v.all[string(p.UID)] = p
		if compile.Labelled(p) && !compile.Ended(p) && layout.Selects(config.Spec.Root, p) {
			v.pods = append(v.pods, p)
		}
	}
	return v
}
