package weigh

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/weightest"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// weigherOf returns a Weigher that counts the objects of an apiserver.
func weigherOf(a *weightest.APIServer) *Weigher {
	return &Weigher{Metadata: a.Metadata(), Served: a.Served, Limiter: rate.NewLimiter(100, 100), Changed: func() {}, Log: slog.New(slog.DiscardHandler)}
}

func forbidden(string) error { return apierrors.NewForbidden(corev1.Resource("configmaps"), "", nil) }

// dividing is a root that divides some resources of the core group.
func dividing(resources ...string) *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{UID: "root"}}
	c.Spec.Root = &v1alpha1.RootConfig{
		Auto: &v1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
		ResourceSelector: []v1alpha1.ObjectLimiter{{
			RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: resources}},
		}},
	}
	return c
}

// Subsets may divide all resources. Listing each of them would serve no purpose.
func TestSubsetsOfAllResourcesAreNotCounted(t *testing.T) {
	c := dividing("configmaps")
	require.NotEmpty(t, counted(c))
	c.Spec.Root.TargetSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	require.NotEmpty(t, counted(c))
	c.Spec.Root.ResourceSelector[0].RelateResources[0].Resources = []string{"*"}
	require.Empty(t, counted(c))
}

// A new namespace does not wait for the count of thousands of others.
func TestNewNamespacesAreWeighedFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := weightest.New(map[string]int64{})
		for i := range 400 {
			a.Add(fmt.Sprintf("tenant-%04d", i), 3)
		}
		w := weigherOf(a)
		set := func() { w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.Namespaces()) }
		set()
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Second)
		a.Add("new", 50)
		set()
		require.False(t, w.Current("root"), "it is to be counted")
		time.Sleep(time.Second)
		require.EqualValues(t, 50, w.Weights("root")["new"])

		a.Add("new", 50) // soon counted again
		time.Sleep(20 * time.Second)
		require.EqualValues(t, 100, w.Weights("root")["new"])

		time.Sleep(2 * time.Minute)
		require.True(t, w.Current("root"))
		before := a.Lists("tenant-0200")
		time.Sleep(30 * time.Minute)
		require.LessOrEqual(t, a.Lists("tenant-0200")-before, 6, "it was counted more often than weighEvery has it")
		require.GreaterOrEqual(t, a.Lists("tenant-0200")-before, 2)
	})
}

// Once the manager may list what it might not, it counts without a notification.
func TestPermissionIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := weightest.New(map[string]int64{"a": 1, "b": 5})
		a.Fail(forbidden)
		w := weigherOf(a)
		w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.Namespaces())
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Hour)
		require.Contains(t, w.Problem("root"), "namespaces weigh equally: the manager may not list configmaps: kubectl create clusterrole")
		require.Equal(t, layout.Weights{"a": 1, "b": 1}, w.Weights("root"))
		require.Less(t, a.Lists("a")+a.Lists("b"), 260, "it is tried about four times a minute")

		a.Fail(nil)
		time.Sleep(20 * time.Second)
		require.Empty(t, w.Problem("root"))
		require.Equal(t, layout.Weights{"a": 1, "b": 5}, w.Weights("root"))
	})
}

func TestClustersWeighEquallyByName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := weightest.New(map[string]int64{"m1": 1, "m2": 1})
		w := weigherOf(a)
		root := dividing("clusters")
		root.Spec.Root.Key = v1alpha1.KeyCluster
		set := func() { w.Set([]*v1alpha1.ShardingConfig{root}, []string{"default"}) }
		set()
		_, known := w.First("root")
		require.False(t, known)
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Second)
		first, known := w.First("root")
		require.True(t, known)
		require.Equal(t, layout.Weights{"m1": 1, "m2": 1}, first)
		a.Add("m3", 1)
		time.Sleep(time.Minute)
		set()
		require.Equal(t, layout.Weights{"m1": 1, "m2": 1, "m3": 1}, w.Weights("root"))
		require.True(t, w.Current("root"))
	})
}

// One request that failed says nothing of what else there is.
func TestAFailedCountLeavesTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := weightest.New(map[string]int64{"was": 7, "z": 3})
		w := weigherOf(a)
		set := func() { w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.Namespaces()) }
		set()
		_, ok := w.First("root")
		require.False(t, ok, "nothing is counted yet")
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Second)
		first, ok := w.First("root")
		require.True(t, ok)
		require.Equal(t, layout.Weights{"was": 7, "z": 3}, first)

		a.Fail(func(ns string) error {
			if ns == "z" {
				return nil
			}
			return apierrors.NewTimeoutError("the apiserver is being restarted", 1)
		})
		for _, ns := range []string{"was", "new", "z"} {
			a.Add(ns, 7)
		}
		set()
		time.Sleep(time.Minute)
		require.Equal(t, layout.Weights{"was": 7, "z": 10, "new": 8}, w.Weights("root"))
		require.Contains(t, w.Problem("root"), "counting configmaps in namespace new: Timeout: the apiserver is being restarted")
		require.True(t, w.Current("root"), "it is awaited no longer")
	})
}

func TestDiscoveryThatFailsIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := weightest.New(map[string]int64{"a": 7})
		w := weigherOf(a)
		served := w.Served
		var fails atomic.Bool
		fails.Store(true)
		w.Served = func() ([]*metav1.APIResourceList, error) {
			if fails.Load() {
				return nil, context.DeadlineExceeded
			}
			return served()
		}
		w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.Namespaces())
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(20 * time.Second)
		require.Contains(t, w.Problem("root"), "discovering the resources")
		require.Zero(t, a.Lists("a"))
		fails.Store(false)
		time.Sleep(weighAgain)
		require.Empty(t, w.Problem("root"))
		require.Equal(t, layout.Weights{"a": 7}, w.Weights("root"))
	})
}

// A kind may be defined just after the API server was asked for its kinds.
func TestKindThatIsServedLaterIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := weightest.New(map[string]int64{"a": 7})
		a.Fail(forbidden)
		w := weigherOf(a)
		served := w.Served
		var later atomic.Bool
		var asked atomic.Int32
		w.Served = func() ([]*metav1.APIResourceList, error) {
			asked.Add(1)
			if !later.Load() {
				return []*metav1.APIResourceList{{GroupVersion: "apps/v1"}}, nil
			}
			return served()
		}
		w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.Namespaces())
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Second)
		later.Store(true)
		time.Sleep(discoverEvery)
		require.Contains(t, w.Problem("root"), "configmaps")
		time.Sleep(time.Hour)
		require.LessOrEqual(t, asked.Load(), int32(63), "once a minute")
	})
}
