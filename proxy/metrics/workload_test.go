package metrics

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// counting counts once in every series of a pod's requests.
func counting(m *Node, w *Workload) {
	meters := m.Meters(w, "watch", w.Resource("pods"))
	meters.Count(200)
	meters.Bytes.Add(1)
	meters.Apiserver.Add(1)
	meters.Added.Observe(1)
	meters.Watches.Inc()
	meters.UpstreamErrors.Inc()
	w.Refused(m, "token")
	w.Bounded(m, "connections")
	w.Egressed(m, "https", "passed")
	w.Reviewed(m, "local")
	w.Action(m.DryRun, "update", "refused").Inc()
	w.Action(m.Foreign, "update", "refused").Inc()
}

func TestCountingInSeriesTakesNoSharedLock(t *testing.T) {
	m, err := NewNode(nil)
	require.NoError(t, err)
	w := m.Workloads.Acquire("ns", "operator", "s1")
	counting(m, w)
	m.Workloads.mu.Lock() // as other pods would
	defer m.Workloads.mu.Unlock()
	w.mu.Lock() // as for the first use of a series
	defer w.mu.Unlock()
	counting(m, w)
}

func TestSeriesOfRemovedWorkloadAreNotReported(t *testing.T) {
	r := prometheus.NewRegistry()
	m, err := NewNode(r)
	require.NoError(t, err)
	w := m.Workloads.Acquire("ns", "operator", "s1")
	counting(m, w)
	m.Workloads.Release(w)
	counting(m, w)
	m.Meters(w, "list", "pods").Count(200)
	families, err := r.Gather()
	require.NoError(t, err)
	for _, f := range families {
		require.Equal(t, "ctrlmesh_panics_total", f.GetName())
	}
}

// A pod chooses the name of the member cluster that it requests.
func TestMemberClustersMayBeAnything(t *testing.T) {
	r := prometheus.NewRegistry()
	m, err := NewNode(r)
	require.NoError(t, err)
	w := m.Workloads.Acquire("ns", "operator", "s1")
	w.InMemberCluster(m, "a\xff", 200)
	w.InMemberCluster(m, strings.Repeat("x", 1000), 200)
	require.InDelta(t, 2, testutil.ToFloat64(m.MemberClusters.WithLabelValues("ns", "operator", "s1", other, "200")), 0)
	_, err = r.Gather()
	require.NoError(t, err)
}
