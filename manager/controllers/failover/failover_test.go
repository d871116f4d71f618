package failover

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

const holder = "op-0_1"

type world struct {
	*testing.T
	*Controller
	compile.Result
	client.Client
	dead   []push.Holder
	other  push.LockReport // of the other member
	get    error           // of the next
	patch  error           // of the next
	gets   int
	events *events.FakeRecorder
}

// round frees what can be freed under the policies as they are.
func (w *world) round() error {
	w.State.Compiled.Store(&controllers.Compiled{Result: w.Result})
	return w.Reconcile(w.Context())
}

func newWorld(t *testing.T) *world {
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	w := &world{T: t, events: events.NewFakeRecorder(10)}
	before := metav1.NewMicroTime(time.Now().Add(-time.Second))
	w.Client = fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			w.gets++
			if err := w.get; err != nil {
				w.get = nil
				return err
			}
			return c.Get(ctx, key, o, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if err := w.patch; err != nil {
				w.patch = nil
				return err
			}
			return c.Patch(ctx, o, patch, opts...)
		},
	}).WithObjects(&coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lock---s1", Labels: map[string]string{"keep": "me"}},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: new(holder), LeaseDurationSeconds: new(int32(15)), LeaseTransitions: new(int32(3)), AcquireTime: &before, RenewTime: &before,
		},
	}).Build()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op-0", UID: "uid"}}
	another := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op-1", UID: "other"}}
	root := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op"}}
	w.Result = compile.Result{
		Policies: map[types.UID]compile.Policy{"other": {Node: "n2", PodPolicy: &meshv1.PodPolicy{}}, "uid": {Node: "n1", PodPolicy: &meshv1.PodPolicy{Sharding: &meshv1.Sharding{
			Shard: "s1",
			Locks: []*meshv1.Lock{
				{Namespace: "kube-system", Name: "second", UpstreamName: "second---s1"},
				{Namespace: "ns", Name: "lock", UpstreamName: "lock---s1"},
			},
		}}}},
		Shards: []compile.Shard{
			{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "op"}, Config: root, Members: []*corev1.Pod{pod}}, // a root has no lock of its own
			{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "s1"}, Root: root, Members: []*corev1.Pod{pod, another}},
		},
	}
	w.Controller = &Controller{State: &controllers.State{},
		Client: w.Client, Recorder: w.events, Log: slog.New(slog.DiscardHandler),
		Exits: func() map[string]bool { return map[string]bool{"uid": len(w.dead) > 0} },
		Observe: func(node, uid string) push.Observation {
			if uid == "other" {
				require.Equal(t, "n2", node)
				return push.Observation{LockReport: w.other}
			}
			require.Equal(t, "n1 uid", node+" "+uid)
			return push.Observation{LockReport: push.LockReport{Dead: w.dead}}
		},
	}
	w.dead = []push.Holder{{Namespace: "ns", Name: "lock", Resource: locks.Leases, Identity: holder, Version: w.lease().ResourceVersion}}
	return w
}

func (w *world) lease() *coordinationv1.Lease {
	l := &coordinationv1.Lease{}
	require.NoError(w, w.Get(w.Context(), client.ObjectKey{Namespace: "ns", Name: "lock---s1"}, l))
	w.gets = 0
	return l
}

func (w *world) free() bool { return *w.lease().Spec.HolderIdentity == "" }

func TestTheDeadHoldersLockIsFree(t *testing.T) {
	w := newWorld(t)
	before := time.Now().Truncate(time.Microsecond)
	require.NoError(t, w.round())
	require.Equal(t, 1, w.gets)
	l := w.lease()
	require.Empty(t, *l.Spec.HolderIdentity)
	require.EqualValues(t, 1, *l.Spec.LeaseDurationSeconds)
	require.False(t, l.Spec.RenewTime.Time.Before(before))
	require.False(t, l.Spec.AcquireTime.Time.Before(before))
	require.EqualValues(t, 3, *l.Spec.LeaseTransitions)
	require.Equal(t, "me", l.Labels["keep"])
	require.Contains(t, <-w.events.Events, "op-0")

	// He is dead for good, and not looked at again.
	require.NoError(t, w.round())
	require.Zero(t, w.gets)
	require.Empty(t, w.events.Events)
}

func TestEachLockOfADeadHolderIsFree(t *testing.T) {
	w := newWorld(t)
	second := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "second---s1"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: new(holder)}}
	require.NoError(t, w.Create(t.Context(), second))
	w.dead = append(w.dead, push.Holder{Namespace: "kube-system", Name: "second", Resource: locks.Leases, Identity: holder, Version: second.ResourceVersion})
	require.NoError(t, w.round())
	require.True(t, w.free())
	require.NoError(t, w.Get(t.Context(), client.ObjectKeyFromObject(second), second))
	require.Empty(t, *second.Spec.HolderIdentity)
}

func TestConfigMapOfAnotherMemberIsNotFreed(t *testing.T) {
	w := newWorld(t)
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lock---s1", Annotations: map[string]string{
		resourcelock.LeaderElectionRecordAnnotationKey: `{"holderIdentity":"` + holder + `"}`,
	}}}
	require.NoError(t, w.Create(t.Context(), o))
	w.dead = []push.Holder{{Namespace: "ns", Name: "lock", Resource: locks.ConfigMaps, Identity: holder, Version: o.ResourceVersion}}
	w.other.HeldLocks = []string{"ns/lock"}
	require.NoError(t, w.round())
	require.Empty(t, w.events.Events)
	w.other.Dead = []push.Holder{{Namespace: "ns", Name: "lock", Resource: locks.ConfigMaps, Identity: "op-1_1", Version: "1"}}
	require.NoError(t, w.round())
	require.NotEmpty(t, w.events.Events)
}

func TestAnotherMemberThatHasExitedKeepsNoLock(t *testing.T) {
	w := newWorld(t)
	w.other = push.LockReport{HeldLocks: []string{"ns/lock"}, Dead: []push.Holder{{Namespace: "ns", Name: "lock", Resource: locks.Leases, Identity: "op-1_1", Version: "1"}}}
	require.NoError(t, w.round())
	require.True(t, w.free())
}

func TestConfigMapAndEndpointsAreFreed(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "ns", Name: "lock---s1", Annotations: map[string]string{
		"keep": "me", resourcelock.LeaderElectionRecordAnnotationKey: `{"holderIdentity":"` + holder + `","leaseDurationSeconds":15,"leaderTransitions":3,"strategy":"S"}`,
	}}
	for resource, o := range map[string]client.Object{
		locks.ConfigMaps: &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"a": "b"}},
		locks.Endpoints:  &corev1.Endpoints{ObjectMeta: meta}, //nolint:staticcheck // old clients elect by them
	} {
		t.Run(resource, func(t *testing.T) {
			w := newWorld(t)
			require.NoError(t, w.Create(t.Context(), o))
			w.dead = append(w.dead, push.Holder{Namespace: "ns", Name: "lock", Resource: resource, Identity: holder, Version: o.GetResourceVersion()})
			require.NoError(t, w.round())
			require.True(t, w.free(), "the Lease of the same lock")
			require.NoError(t, w.Get(t.Context(), client.ObjectKeyFromObject(o), o))
			var record map[string]any
			require.NoError(t, json.Unmarshal([]byte(o.GetAnnotations()[resourcelock.LeaderElectionRecordAnnotationKey]), &record))
			require.Equal(t, "", record["holderIdentity"])
			require.EqualValues(t, 1, record["leaseDurationSeconds"])
			require.EqualValues(t, 3, record["leaderTransitions"])
			require.Equal(t, "S", record["strategy"])
			require.Equal(t, "me", o.GetAnnotations()["keep"])
		})
	}
}

func TestWhoMayBeAliveKeepsTheLock(t *testing.T) {
	for name, change := range map[string]func(*world){
		"nobody has died":  func(w *world) { w.dead = nil },
		"another identity": func(w *world) { w.dead[0].Identity = "op-1_1" },
		"no identity":      func(w *world) { w.dead[0].Identity = "" },
		"no version":       func(w *world) { w.dead[0].Version = "" },
		"a write since":    func(w *world) { v, _ := strconv.Atoi(w.dead[0].Version); w.dead[0].Version = strconv.Itoa(v - 1) },
		"a write meanwhile": func(w *world) {
			w.patch = apierrors.NewConflict(coordinationv1.Resource("leases"), "lock---s1", errors.New("written"))
		},
		"no lock":                         func(w *world) { w.Policies["uid"].Sharding.Locks = nil },
		"another shard's policy":          func(w *world) { w.Policies["uid"].Sharding.Shard = "s2" },
		"a lock that is not the policy's": func(w *world) { w.dead[0].Name = "other" },
		"standby":                         func(w *world) { w.Policies["uid"].Sharding.Standby = true },
		"a dry run":                       func(w *world) { w.Policies["uid"].Sharding.DryRun = true },
		"a lock that was deleted": func(w *world) {
			w.get = apierrors.NewNotFound(coordinationv1.Resource("leases"), "lock---s1")
		},
		"a lock of another resource": func(w *world) { w.dead[0].Resource = locks.ConfigMaps },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			change(w)
			require.NoError(t, w.round())
			require.LessOrEqual(t, w.gets, 1)
			require.False(t, w.free())
			require.Empty(t, w.events.Events)
		})
	}
}

func TestWhatFailsIsTriedAgain(t *testing.T) {
	for name, fail := range map[string]func(*world){
		"reading": func(w *world) { w.get = errors.New("no answer") },
		"writing": func(w *world) { w.patch = errors.New("no answer") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			fail(w)
			require.ErrorContains(t, w.round(), "lock---s1")
			require.False(t, w.free())
			require.NoError(t, w.round())
			require.True(t, w.free())
		})
	}
}
