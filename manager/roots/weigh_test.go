package roots

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// apiserver has objects of one kind in namespaces, and counts the lists of each.
type apiserver struct {
	mu      sync.Mutex
	objects map[string]int64
	lists   map[string]int
	fail    func(namespace string) error
}

func (a *apiserver) add(namespace string, objects int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.objects[namespace] += objects
}

func (a *apiserver) names() (out []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for ns := range a.objects {
		out = append(out, ns)
	}
	slices.Sort(out)
	return out
}

func (a *apiserver) list(action clienttesting.Action) (bool, runtime.Object, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ns := action.GetNamespace()
	a.lists[ns]++
	if a.fail != nil {
		if err := a.fail(ns); err != nil {
			return true, nil, err
		}
	}
	n := a.objects[ns]
	if n == 0 {
		return true, &metav1.List{}, nil
	}
	more := n - 1
	return true, &metav1.List{
		ListMeta: metav1.ListMeta{RemainingItemCount: &more},
		Items:    []runtime.RawExtension{{Object: &metav1.PartialObjectMetadata{}}},
	}, nil
}

// listed is how often the objects of a namespace were listed.
func (a *apiserver) listed(namespace string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists[namespace]
}

// weigher counts what an apiserver has, at most a hundred times a second.
func (a *apiserver) weigher(changed func()) *Weigher {
	client := fake.NewSimpleMetadataClient(fake.NewTestScheme())
	client.PrependReactor("list", "*", a.list)
	return &Weigher{
		Metadata: client, Limiter: rate.NewLimiter(100, 100), Log: slog.New(slog.DiscardHandler), Changed: changed,
		Served: func() ([]*metav1.APIResourceList, error) {
			return []*metav1.APIResourceList{{GroupVersion: "v1", APIResources: []metav1.APIResource{
				{Name: "configmaps", Kind: "ConfigMap", Namespaced: true, Verbs: []string{"list", "patch"}},
			}}}, nil
		},
	}
}

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

// A new namespace does not wait for the count of thousands of others.
func TestNewNamespacesAreWeighedFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &apiserver{objects: map[string]int64{}, lists: map[string]int{}}
		for i := range 400 {
			a.add(fmt.Sprintf("tenant-%04d", i), 3)
		}
		w := a.weigher(nil)
		set := func() { w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.names()) }
		set()
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Second)
		a.add("new", 50)
		set()
		require.False(t, w.Current("root"), "it is to be counted")
		time.Sleep(time.Second)
		require.EqualValues(t, 50, w.Weights("root")["new"])

		a.add("new", 50) // soon counted again
		time.Sleep(20 * time.Second)
		require.EqualValues(t, 100, w.Weights("root")["new"])

		time.Sleep(2 * time.Minute)
		require.True(t, w.Current("root"))
		before := a.listed("tenant-0200")
		time.Sleep(30 * time.Minute)
		require.LessOrEqual(t, a.listed("tenant-0200")-before, 6, "it was counted more often than weighEvery has it")
		require.GreaterOrEqual(t, a.listed("tenant-0200")-before, 2)
	})
}

// Once the manager may list what it might not, it counts without being told.
func TestPermissionIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &apiserver{objects: map[string]int64{"a": 1, "b": 5}, lists: map[string]int{}}
		a.fail = func(string) error { return apierrors.NewForbidden(corev1.Resource("configmaps"), "", nil) }
		w := a.weigher(nil)
		w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.names())
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Hour)
		require.Contains(t, w.Problem("root"), "namespaces weigh equally: the manager may not list configmaps: kubectl create clusterrole")
		require.Equal(t, layout.Weights{"a": 1, "b": 1}, w.Weights("root"))
		require.Less(t, a.listed("a")+a.listed("b"), 260, "it is tried about four times a minute")

		a.mu.Lock()
		a.fail = nil
		a.mu.Unlock()
		time.Sleep(20 * time.Second)
		require.Empty(t, w.Problem("root"))
		require.Equal(t, layout.Weights{"a": 1, "b": 5}, w.Weights("root"))
	})
}

// One request that failed says nothing of what else there is.
func TestAFailedCountLeavesTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &apiserver{objects: map[string]int64{"was": 7, "z": 3}, lists: map[string]int{}}
		w := a.weigher(nil)
		set := func() { w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.names()) }
		set()
		_, ok := w.First("root")
		require.False(t, ok, "nothing is counted yet")
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Second)
		first, ok := w.First("root")
		require.True(t, ok)
		require.Equal(t, layout.Weights{"was": 7, "z": 3}, first)

		a.mu.Lock()
		a.fail = func(ns string) error {
			if ns == "z" {
				return nil
			}
			return apierrors.NewTimeoutError("the apiserver is being restarted", 1)
		}
		a.mu.Unlock()
		for _, ns := range []string{"was", "new", "z"} {
			a.add(ns, 7)
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
		a := &apiserver{objects: map[string]int64{"a": 7}, lists: map[string]int{}}
		w := a.weigher(nil)
		served := w.Served
		var fails atomic.Bool
		fails.Store(true)
		w.Served = func() ([]*metav1.APIResourceList, error) {
			if fails.Load() {
				return nil, context.DeadlineExceeded
			}
			return served()
		}
		w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.names())
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(20 * time.Second)
		require.Contains(t, w.Problem("root"), "discovering the resources")
		require.Zero(t, a.listed("a"))
		fails.Store(false)
		time.Sleep(weighAgain)
		require.Empty(t, w.Problem("root"))
		require.Equal(t, layout.Weights{"a": 7}, w.Weights("root"))
	})
}

// A kind may be defined just after the API server was asked for its kinds.
func TestKindThatIsServedLaterIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &apiserver{objects: map[string]int64{"a": 7}, lists: map[string]int{}}
		a.fail = func(string) error { return apierrors.NewForbidden(corev1.Resource("configmaps"), "", nil) }
		w := a.weigher(nil)
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
		w.Set([]*v1alpha1.ShardingConfig{dividing("configmaps")}, a.names())
		go func() { _ = w.Run(t.Context()) }()
		time.Sleep(time.Second)
		later.Store(true)
		time.Sleep(discoverEvery)
		require.Contains(t, w.Problem("root"), "configmaps")
		time.Sleep(time.Hour)
		require.LessOrEqual(t, asked.Load(), int32(63), "once a minute")
	})
}

// What may not be counted is a note: shards work without.
func TestAMissingPermissionIsANote(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		forbidden := func(string) error { return apierrors.NewForbidden(corev1.Resource("configmaps"), "", nil) }
		g := grow(t, func(*v1alpha1.RootConfig) {}, forbidden)
		c := g.get()
		require.Contains(t, c.Status.Root.Weighing, "kubectl create clusterrole ctrlmesh-stamp-configmaps --verb=list --resource=configmaps")
		require.True(t, apimeta.IsStatusConditionFalse(c.Status.Conditions, v1alpha1.ConditionDegraded))
		for _, s := range c.Status.Root.Shards {
			require.EqualValues(t, 2, s.Namespaces, "they weigh equally")
		}
	})
}
