package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// stale is a client whose reads return one old version, like a lagging cache.
type stale struct {
	client.Client
	seen *v1.Tally
}

func (s stale) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	*obj.(*v1.Tally) = *s.seen.DeepCopy()
	return nil
}

func TestEveryReconcilingPodIsRecorded(t *testing.T) {
	ctx := t.Context()
	scheme := runtime.NewScheme()
	require.NoError(t, v1.AddToScheme(scheme))
	obj := &v1.Tally{}
	obj.Namespace, obj.Name, obj.Generation = "ns", "one", 1
	c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(obj).WithObjects(obj).Build()
	key := client.ObjectKeyFromObject(obj)
	seen := &v1.Tally{}
	require.NoError(t, c.Get(ctx, key, seen))

	// Two pods write from the same cached version: the second gets a conflict, reads again,
	// and is recorded after the first. A repetition records nothing.
	for _, pod := range []string{"a", "b", "a"} {
		r := &reconciler{Client: stale{c, seen}, live: c, pod: pod, began: func(types.NamespacedName) {}}
		_, err := r.Reconcile(ctx, ctrl.Request{NamespacedName: key})
		require.NoError(t, err)
	}
	got := &v1.Tally{}
	require.NoError(t, c.Get(ctx, key, got))
	require.Equal(t, []string{"a", "b"}, got.Status.ReconciledBy)
	require.Equal(t, map[string]int64{"a": 1, "b": 1}, got.Status.Reconciles)

	// A reconciler with refresh writes again without a change, and requeues the object.
	r := &reconciler{Client: c, live: c, pod: "a", refresh: time.Minute, began: func(types.NamespacedName) {}}
	for range 2 {
		result, err := r.Reconcile(ctx, ctrl.Request{NamespacedName: key})
		require.NoError(t, err)
		require.Equal(t, time.Minute, result.RequeueAfter)
	}
	require.NoError(t, c.Get(ctx, key, got))
	require.NotNil(t, got.Status.Refreshed)
	require.Equal(t, map[string]int64{"a": 1, "b": 1}, got.Status.Reconciles)

	gone := ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "gone"}}
	_, err := (&reconciler{Client: c, live: c, pod: "a", began: func(types.NamespacedName) {}}).Reconcile(ctx, gone)
	require.NoError(t, err)
}
