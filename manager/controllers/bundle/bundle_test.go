package bundle

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
)

func TestConfigurationNeedsItsBundleBeforeItsPods(t *testing.T) {
	closed := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "closed"}}
	open := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "open"}}
	open.Spec.FailurePolicy = v1alpha1.FailOpen
	require.Equal(t, map[need]bool{
		{"closed", inject.MeshBundle}: true,
		{"open", inject.BothBundle}:   true,
	}, needsOf(nil, []*v1alpha1.ShardingConfig{closed, open}))
}

// The quota of a namespace holds back its own bundle alone. The rotation of the CA waits for it for
// a while, because the apiserver may be to blame.
func TestQuotaOfANamespaceHoldsBackNoOther(t *testing.T) {
	full := apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, inject.MeshBundle, errors.New("exceeded quota: few"))
	c := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Create: func(ctx context.Context, w client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			if o.GetNamespace() == "full" {
				return full
			}
			return w.Create(ctx, o, opts...)
		},
	}).Build()
	config := func(namespace string) *v1alpha1.ShardingConfig {
		return &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: namespace}}
	}
	state := &controllers.State{}
	state.Compiled.Store(&controllers.Compiled{Listed: &controllers.Listed{Configs: []*v1alpha1.ShardingConfig{config("full"), config("next")}}})
	ca := func() []byte { return []byte("ca") }
	r := &Controller{Bundles: &inject.Bundles{Client: c, Mesh: ca, Cluster: ca, Egress: ca}, Mesh: ca, Egress: ca, State: state}

	require.ErrorIs(t, r.Reconcile(t.Context()), full)
	require.NoError(t, c.Get(t.Context(), client.ObjectKey{Namespace: "next", Name: inject.MeshBundle}, &corev1.ConfigMap{}))
	require.Contains(t, state.MissingBundle("full"), "exceeded quota")
	require.Empty(t, state.MissingBundle("next"))
	require.Nil(t, state.MeshBundle.Load(), "it waits")
	require.NotNil(t, state.EgressBundle.Load(), "nobody needs it")

	r.mesh.since = time.Now().Add(-patience)
	require.ErrorIs(t, r.Reconcile(t.Context()), full)
	require.Equal(t, ca(), *state.MeshBundle.Load())
}

func TestRotationWaitsForBundles(t *testing.T) {
	a, b, other := need{"a", inject.MeshBundle}, need{"b", inject.BothBundle}, need{"a", inject.EgressBundle}
	for _, c := range []struct {
		name    string
		needs   []need
		failing map[need]bool
		long    bool
		want    bool
	}{
		{"nobody needs it", nil, nil, false, true},
		{"all have it", []need{a, b}, nil, false, true},
		{"one lacks it", []need{a, b}, map[need]bool{a: true}, false, false},
		{"one lacks it after long", []need{a, b}, map[need]bool{a: true}, true, true},
		{"nobody has it", []need{a, b}, map[need]bool{a: true, b: true}, true, false},
		{"it is another CA's", []need{a, other}, map[need]bool{other: true}, false, true},
	} {
		require.Equal(t, c.want, spread(c.needs, c.failing, c.long, inject.MeshBundle, inject.BothBundle), c.name)
	}
}

// A tenant whose bundles cannot be written needs one, then another, before patience ends.
func TestTenantDoesNotHoldBackRotationByTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "bundle", errors.New("exceeded quota: few"))
		c := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
			Create: func(ctx context.Context, w client.WithWatch, o client.Object, opts ...client.CreateOption) error {
				if o.GetNamespace() == "tenant" {
					return full
				}
				return w.Create(ctx, o, opts...)
			},
		}).Build()
		state := &controllers.State{}
		ca := func() []byte { return []byte("ca") }
		r := &Controller{Bundles: &inject.Bundles{Client: c, Mesh: ca, Cluster: ca, Egress: ca}, Mesh: ca, Egress: ca, State: state}
		other := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "other"}}
		for start := time.Now(); state.MeshBundle.Load() == nil; time.Sleep(patience / 2) {
			require.LessOrEqual(t, time.Since(start), patience)
			tenant := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant"}}
			if time.Since(start)%patience != 0 {
				tenant.Spec.FailurePolicy = v1alpha1.FailOpen
			}
			state.Compiled.Store(&controllers.Compiled{Listed: &controllers.Listed{Configs: []*v1alpha1.ShardingConfig{tenant, other}}})
			require.ErrorIs(t, r.Reconcile(t.Context()), full)
		}
	})
}
