package roots

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/weightest"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/weigh"
)

// growing is a mesh with a root of two shards, whose clock is that of the bubble.
type growing struct {
	*mesh
	*weightest.APIServer
	evicted int
}

func grow(t *testing.T, change func(*v1alpha1.RootConfig), fail func(namespace string) error) *growing {
	g := &growing{mesh: newMesh(t), APIServer: weightest.New(map[string]int64{"default": 1, "kube-node-lease": 1, "kube-public": 2, "kube-system": 12})}
	g.Fail(fail)
	g.now = time.Now()
	g.Weigher = &weigh.Weigher{Metadata: g.Metadata(), Served: g.Served, Limiter: rate.NewLimiter(100, 100), Changed: func() {}, Log: slog.New(slog.DiscardHandler)}
	g.funcs.SubResourceCreate = func(ctx context.Context, c client.Client, sub string, o, s client.Object, opts ...client.SubResourceCreateOption) error {
		g.evicted++
		if err := c.SubResource(sub).Create(ctx, o, s, opts...); err != nil {
			return err
		}
		var n int
		_, err := fmt.Sscanf(o.GetName(), "op-%d", &n)
		g.pod(n)
		return err
	}
	g.root(2, 1)
	g.change(func(c *v1alpha1.ShardingConfig) { change(c.Spec.Root) })
	g.pod(0)
	g.pod(1)
	go func() { _ = g.Weigher.Run(t.Context()) }()
	g.pass(2 * time.Minute)
	require.Empty(t, g.get().Status.Root.Handovers)
	return g
}

// pass lets time pass, with a round every five seconds.
func (g *growing) pass(long time.Duration) {
	g.rounds(long, 5*time.Second, func() bool { return false })
}

// until is how long it takes until something holds, at most, with a round every second.
func (g *growing) until(most time.Duration, holds func() bool) time.Duration {
	return g.rounds(most, time.Second, holds)
}

func (g *growing) rounds(most, every time.Duration, holds func() bool) time.Duration {
	begin := time.Now()
	for time.Since(begin) < most && !holds() {
		g.now = time.Now()
		w := g.world()
		w.Namespaces = g.Namespaces()
		require.NoError(g, g.Round(g.Context(), w))
		g.keepLocks()
		g.push()
		time.Sleep(every)
		synctest.Wait()
	}
	return time.Since(begin)
}

// neighbours makes eight namespaces that are next to each other in the key space, and
// fills them a few seconds later.
func (g *growing) neighbours(prefix string) {
	for i := range 8 {
		g.Add(fmt.Sprintf("%s%d", prefix, i), 0)
	}
	g.pass(5 * time.Second)
	for i := range 8 {
		g.Add(fmt.Sprintf("%s%d", prefix, i), 20)
	}
}

func (g *growing) skew() float64 {
	return layout.Skew(g.owned(), g.get().Spec.Root, g.Objects())
}

func automatic(root *v1alpha1.RootConfig) { root.Auto.Rebalance = v1alpha1.RebalanceAutomatic }

func TestNewNamespacesAreDivided(t *testing.T) {
	t.Parallel()
	for method, onChange := range map[string]v1alpha1.OnChange{"restarts": v1alpha1.OnChangeRestart, "lists anew": v1alpha1.OnChangeRelist} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := grow(t, func(root *v1alpha1.RootConfig) {
					automatic(root)
					root.OnChange = onChange
				}, nil)
				g.neighbours("kcm-s")
				require.InDelta(t, 2, g.skew(), 0.2, "all are one shard's")
				begins := g.until(2*time.Minute, func() bool { return g.skew() < 1.7 })
				require.LessOrEqual(t, begins, time.Minute)
				require.True(t, g.Correcting(), "the next step is awaited")
				ends := begins + g.until(2*time.Minute, func() bool { return g.skew() <= layout.Threshold && len(g.get().Status.Root.Handovers) == 0 })
				t.Logf("keys move after %s, and the skew is %.2f after %s; %d pods were restarted", begins, g.skew(), ends, g.evicted)
				require.LessOrEqual(t, ends-begins, 20*time.Second, "its steps follow each other")
				g.pass(10 * time.Minute)
				require.LessOrEqual(t, g.skew(), layout.Threshold)
				require.False(t, g.Correcting())
				require.LessOrEqual(t, g.evicted, 2, "each pod restarts once at most")
			})
		})
	}
}

func TestSkewIsSuggested(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := grow(t, func(root *v1alpha1.RootConfig) { root.Auto.Rebalance = v1alpha1.RebalanceSuggest }, nil)
		before := g.owned()
		g.neighbours("kcm-s")
		took := g.until(2*time.Minute, func() bool { return g.get().Status.Root.Suggestion != "" })
		require.LessOrEqual(t, took, time.Minute)
		require.Equal(t, before, g.owned())
	})
}

// A pod that waits for the lock of a killed leader is not restarted for balance: its
// successor would wait anew for as long as the lease runs.
func TestNoRestartForBalanceWithoutLeader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := grow(t, automatic, nil)
		waits := string(get(g.mesh, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op-1"}}).UID)
		g.idle[waits] = true
		g.pass(10 * time.Second)
		before := g.owned()
		g.neighbours("kcm-s")
		g.pass(5 * time.Minute)
		require.Zero(t, g.evicted)
		require.Equal(t, before, g.owned())

		delete(g.idle, waits)
		g.until(2*time.Minute, func() bool { return g.skew() <= layout.Threshold })
		require.LessOrEqual(t, g.skew(), layout.Threshold)
	})
}

// Where weights never stay, pods are not restarted for each change.
func TestRestartsForBalanceBecomeRare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := grow(t, automatic, nil)
		g.neighbours("kcm-s")
		perHour := func() float64 {
			before := g.evicted
			for i := range 20 {
				for j := range 8 {
					g.Add(fmt.Sprintf("kcm-s%d", j), []int64{400, -400}[(i+j/4)%2]*int64(min(1, i+j/4)))
				}
				g.pass(90 * time.Second)
			}
			return float64(g.evicted-before) * 2
		}
		first, second := perHour(), perHour()
		t.Logf("%.0f restarts an hour, then %.0f", first, second)
		require.LessOrEqual(t, second, 4.0)
	})
}

// What may not be counted is a note: shards work without.
func TestMissingPermissionIsANote(t *testing.T) {
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
