package failover

import (
	"context"
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
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

const holder = "op-0_1"

type world struct {
	*testing.T
	*Controller
	compile.Result
	client.Client
	dead   []push.Holder
	get    error // of the next
	update error // of the next
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
		Update: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			if err := w.update; err != nil {
				w.update = nil
				return err
			}
			return c.Update(ctx, o, opts...)
		},
	}).WithObjects(&coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lock---s1", Labels: map[string]string{"keep": "me"}},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: new(holder), LeaseDurationSeconds: new(int32(15)), LeaseTransitions: new(int32(3)), AcquireTime: &before, RenewTime: &before,
		},
	}).Build()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op-0", UID: "uid"}}
	root := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op"}}
	w.Result = compile.Result{
		Policies: map[types.UID]compile.Policy{"uid": {Node: "n1", PodPolicy: &meshv1.PodPolicy{Sharding: &meshv1.Sharding{
			Shard: "s1",
			Locks: []*meshv1.Lock{
				{Namespace: "kube-system", Name: "second", UpstreamName: "second---s1"},
				{Namespace: "ns", Name: "lock", UpstreamName: "lock---s1"},
			},
		}}}},
		Shards: []compile.Shard{
			{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "op"}, Config: root, Members: []*corev1.Pod{pod}}, // a root has no lock of its own
			{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "s1"}, Root: root, Members: []*corev1.Pod{pod}},
		},
	}
	w.Controller = &Controller{State: &controllers.State{},
		Client: w.Client, Recorder: w.events, Log: slog.New(slog.DiscardHandler),
		Observe: func(node, uid string) push.Observation {
			require.Equal(t, "n1 uid", node+" "+uid)
			return push.Observation{LockReport: push.LockReport{Dead: w.dead}}
		},
	}
	w.dead = []push.Holder{{Namespace: "ns", Name: "lock", Identity: holder, Version: w.lease().ResourceVersion}}
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
	w.dead = append(w.dead, push.Holder{Namespace: "kube-system", Name: "second", Identity: holder, Version: second.ResourceVersion})
	require.NoError(t, w.round())
	require.True(t, w.free())
	require.NoError(t, w.Get(t.Context(), client.ObjectKeyFromObject(second), second))
	require.Empty(t, *second.Spec.HolderIdentity)
}

func TestWhoMayBeAliveKeepsTheLock(t *testing.T) {
	for name, change := range map[string]func(*world){
		"nobody has died":  func(w *world) { w.dead = nil },
		"another identity": func(w *world) { w.dead[0].Identity = "op-1_1" },
		"no identity":      func(w *world) { w.dead[0].Identity = "" },
		"no version":       func(w *world) { w.dead[0].Version = "" },
		"a write since":    func(w *world) { v, _ := strconv.Atoi(w.dead[0].Version); w.dead[0].Version = strconv.Itoa(v - 1) },
		"a write meanwhile": func(w *world) {
			w.update = apierrors.NewConflict(coordinationv1.Resource("leases"), "lock---s1", errors.New("written"))
		},
		"no lock":                         func(w *world) { w.Policies["uid"].Sharding.Locks = nil },
		"another shard's policy":          func(w *world) { w.Policies["uid"].Sharding.Shard = "s2" },
		"a lock that is not the policy's": func(w *world) { w.dead[0].Name = "other" },
		"standby":                         func(w *world) { w.Policies["uid"].Sharding.Standby = true },
		"a dry run":                       func(w *world) { w.Policies["uid"].Sharding.DryRun = true },
		"a lock that is no Lease": func(w *world) {
			w.get = apierrors.NewNotFound(coordinationv1.Resource("leases"), "lock---s1")
		},
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
		"writing": func(w *world) { w.update = errors.New("no answer") },
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
