package metrics

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/docs"
)

// docs/metrics.md lists the metrics of the manager with their labels, and no others.
func TestMetricsAreDocumented(t *testing.T) {
	registry, ok := metrics.Registry.(prometheus.Collector)
	require.True(t, ok)
	docs.RequireMetrics(t, "../../docs/metrics.md", "## Manager", registry)
}

func TestPodsOfDeletedObjectsAreRemoved(t *testing.T) {
	p := byName[int32](prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "x"}, []string{"namespace", "name"}))
	a, b := types.NamespacedName{Namespace: "ns", Name: "a"}, types.NamespacedName{Namespace: "ns", Name: "b"}
	p.Set(map[types.NamespacedName]int32{a: 1, b: 2})
	require.Equal(t, 2, testutil.CollectAndCount(p))
	p.Set(map[types.NamespacedName]int32{b: 3})
	require.Equal(t, 1, testutil.CollectAndCount(p))
	require.Equal(t, 3.0, testutil.ToFloat64(p.WithLabelValues("ns", "b")))
}

func TestRolloutsAreCounted(t *testing.T) {
	series := func() int { return testutil.CollectAndCount(OutdatedPods) + testutil.CollectAndCount(RolloutHalted) }
	CountRollout("ns", "op", &v1alpha1.RolloutStatus{
		Phase:  v1alpha1.RolloutHalted,
		Shards: []v1alpha1.RolloutShard{{Name: "a", Pods: 2, Updated: 1}, {Name: "b", Pods: 3}},
	})
	require.Equal(t, []float64{1, 1, 3}, []float64{
		testutil.ToFloat64(RolloutHalted.WithLabelValues("ns", "op")),
		testutil.ToFloat64(OutdatedPods.WithLabelValues("ns", "op", "a")), testutil.ToFloat64(OutdatedPods.WithLabelValues("ns", "op", "b")),
	})
	Shard{"ns", "op", "b"}.Forget()
	require.Equal(t, 2, series())
	CountRollout("ns", "op", nil)
	require.Zero(t, series())
}

func TestWritesOfShardsAreCounted(t *testing.T) {
	root := &v1alpha1.RootStatus{
		Undivided:     []v1alpha1.UndividedResource{{Resource: "secrets", Common: 3}, {Resource: "services", Common: 1}, {Resource: "pods"}},
		ForeignWrites: []v1alpha1.ForeignWrites{{Resource: "a", Writes: 2}, {Resource: "b", Writes: 3}},
		Shards:        []v1alpha1.ShardStatus{{Name: "a", Idle: true}, {Name: "b"}, {Name: "c", Idle: true}},
	}
	value := func(evidence string) float64 {
		return testutil.ToFloat64(UndividedResources.WithLabelValues("ns", "op", evidence))
	}
	CountWrites("ns", "op", root)
	require.Equal(t, []float64{2, 1, 5, 2}, []float64{
		value("writes"), value("watches"), testutil.ToFloat64(ForeignWrites.WithLabelValues("ns", "op")), testutil.ToFloat64(IdleShards.WithLabelValues("ns", "op")),
	})
	CountWrites("ns", "op", &v1alpha1.RootStatus{})
	require.Equal(t, []float64{0, 0}, []float64{value("writes"), value("watches")})
	ForgetRoot("ns", "op")
	require.Zero(t, testutil.CollectAndCount(UndividedResources)+testutil.CollectAndCount(ForeignWrites)+testutil.CollectAndCount(IdleShards))
}
