package usage

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/usage"
)

// fixture is a controller with pods on the mesh, and what their agents report.
type fixture struct {
	*testing.T
	*Controller
	compiled controllers.Compiled
	reports  map[string]*meshv1.Usage // by uid
	now      time.Time
}

func newFixture(t *testing.T, c client.Client) *fixture {
	f := &fixture{T: t, reports: map[string]*meshv1.Usage{}, now: time.UnixMilli(1_000_000_000)}
	f.compiled = controllers.Compiled{Result: compile.Result{Policies: map[types.UID]compile.Policy{}}, Listed: &controllers.Listed{}}
	f.Controller = &Controller{
		Client: c, State: &controllers.State{}, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return f.now },
		Observe: func(_, uid string) push.Observation { return push.Observation{Usage: f.reports[uid]} },
	}
	return f
}

// add adds a pod of StatefulSet op, and what its agent reports.
func (f *fixture) add(namespace, uid string, sharding *meshv1.Sharding) {
	f.compiled.Pods = append(f.compiled.Pods, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: uid, UID: types.UID(uid),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "op", Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: "n"},
	})
	f.compiled.Policies[types.UID(uid)] = compile.Policy{Node: "n", PodPolicy: &meshv1.PodPolicy{Sharding: sharding}}
	f.reports[uid] = &meshv1.Usage{SinceMs: 1, LastMs: f.now.UnixMilli(), Requests: 1}
}

// record returns the record of a namespace after a run; nil if there is none.
func (f *fixture) record(namespace string) usage.Record {
	f.Helper()
	f.State.Compiled.Store(&f.compiled)
	require.NoError(f, f.Reconcile(f.Context()))
	cm := &corev1.ConfigMap{}
	err := f.Client.Get(f.Context(), client.ObjectKey{Namespace: namespace, Name: usage.ConfigMap}, cm)
	if apierrors.IsNotFound(err) {
		return nil
	}
	require.NoError(f, err)
	require.Equal(f, "true", cm.Labels[usage.Label])
	return usage.Decode(cm.Data)
}

func TestUsageIsRecorded(t *testing.T) {
	f := newFixture(t, fake.NewFakeClient())
	require.NoError(t, f.Reconcile(t.Context()), "before anything is compiled")
	f.add("a", "a-0", nil)
	f.add("a", "a-1", &meshv1.Sharding{DryRun: true})
	f.add("b", "sharded", &meshv1.Sharding{})
	require.Len(t, f.record("a")["statefulset.op"].GetPods(), 2)
	require.Nil(t, f.record("b"))

	f.reports["a-0"] = &meshv1.Usage{SinceMs: 1, LastMs: f.now.UnixMilli(), Requests: 5}
	delete(f.reports, "a-1") // its agent has not reported yet
	pods := f.record("a")["statefulset.op"].GetPods()
	require.Len(t, pods, 2)
	require.EqualValues(t, 5, pods[0].GetUsage().GetRequests())

	// Another leader reads what was recorded.
	next := newFixture(t, f.Client)
	next.add("a", "a-2", nil)
	require.Len(t, next.record("a")["statefulset.op"].GetPods(), 3)
}

// The record ends some time after the operator was divided or removed.
func TestOldRecordsAreDeleted(t *testing.T) {
	f := newFixture(t, fake.NewFakeClient())
	f.add("a", "a-0", nil)
	require.NotNil(t, f.record("a"))
	f.compiled.Pods = nil
	f.now = f.now.Add(usage.Keep)
	require.NotNil(t, f.record("a"))
	f.now = f.now.Add(2 * sweepInterval)
	require.Nil(t, f.record("a"))
}

// What a tenant writes there affects the tenant alone, and a quota of a tenant is no error.
func TestTenantsDisturbNobody(t *testing.T) {
	refuses := func(namespace string) error {
		if namespace == "full" {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, usage.ConfigMap, errors.New("exceeded quota: few"))
		}
		return nil
	}
	broken := errors.New("connection refused")
	var fails error
	c := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Create: func(ctx context.Context, w client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			return errors.Join(refuses(o.GetNamespace()), w.Create(ctx, o, opts...))
		},
		Update: func(ctx context.Context, w client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			if fails != nil {
				return fails
			}
			return w.Update(ctx, o, opts...)
		},
	}).WithObjects(&corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: usage.ConfigMap}, Data: map[string]string{"statefulset.op": "{", "other": `{"pods": [{}]}`},
	}).Build()
	f := newFixture(t, c)
	f.add("full", "full-0", nil)
	f.add("a", "a-0", nil)
	record := f.record("a")
	require.Len(t, record, 1, "what has no time is old")
	require.Len(t, record["statefulset.op"].GetPods(), 1)

	fails = apierrors.NewInvalid(schema.GroupKind{Kind: "ConfigMap"}, usage.ConfigMap, nil) // immutable
	f.reports["a-0"].Requests = 6
	require.NoError(t, f.Reconcile(t.Context()))
	fails = broken
	f.reports["a-0"].Requests = 7
	require.ErrorIs(t, f.Reconcile(t.Context()), broken)
}
