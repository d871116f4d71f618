package e2e

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// scrape reads a pod's metrics as Prometheus would find them, by the pod's annotations.
func scrape(t *testing.T, pod *corev1.Pod) map[string]*dto.MetricFamily {
	t.Helper()
	require.NotNil(t, pod)
	families, err := cluster.Scrape(t.Context(), pod)
	require.NoError(t, err)
	return families
}

// scrapeAgent reads the metrics of a node's agent, once it is ready: a busy agent may be
// unready for a moment.
func scrapeAgent(t *testing.T, node string) map[string]*dto.MetricFamily {
	t.Helper()
	var agent *corev1.Pod
	until(t, "the agent of "+node, func(context.Context) error {
		agent = agents(t)[node]
		return orElse(agent != nil, "it is not ready")
	})
	return scrape(t, agent)
}

// The agent counts a member's requests, and the managers what they do.
func (m *members) testMetrics(t *testing.T) {
	const shard, requests = 0, 5
	node := m.pods[shard].Spec.NodeName
	series := map[string]string{
		"namespace": m.home, "workload": workload, "shard": m.shard(shard), "verb": "list", "resource": "configmaps", "code": "200",
	}
	before := kube.Total(scrapeAgent(t, node)["ctrlmesh_requests_total"], series)
	for range requests {
		ask(t, m.pods[shard], nil, http.MethodGet, "/api/v1/configmaps?limit=1")
	}
	var after map[string]*dto.MetricFamily
	until(t, "the requests to be counted", func(context.Context) error { // requests are counted when they end
		after = scrapeAgent(t, node)
		n := kube.Total(after["ctrlmesh_requests_total"], series) - before
		return orElse(n >= requests, fmt.Sprint(n, " are"))
	})
	assert.InDelta(t, before+requests, kube.Total(after["ctrlmesh_requests_total"], series), 0)
	owner := map[string]string{"namespace": m.home, "shard": m.shard(shard)}
	for _, name := range []string{"ctrlmesh_added_latency_seconds", "ctrlmesh_response_bytes_total"} {
		assert.Positive(t, kube.Total(after[name], owner), name)
	}
	assert.Zero(t, kube.Total(after["ctrlmesh_panics_total"], nil))
	assert.Positive(t, kube.Total(after["ctrlmesh_captured_pods"], nil)-kube.Total(after["ctrlmesh_captured_pods"], map[string]string{"mode": "none"}))

	// The managers' leader reports agents and policies.
	var pods corev1.PodList
	require.NoError(t, cluster.List(t.Context(), &pods, client.InNamespace(kube.SystemNamespace),
		client.MatchingLabels{"app.kubernetes.io/name": kube.ManagerName}))
	total := map[string]float64{}
	for i := range pods.Items {
		families := scrape(t, &pods.Items[i])
		for _, name := range []string{
			"ctrlmesh_manager_agents_connected", "ctrlmesh_policies", "ctrlmesh_stamped_objects_total", "ctrlmesh_mesh_ca_expiry_timestamp_seconds",
		} {
			total[name] += kube.Total(families[name], nil)
		}
	}
	assert.InDelta(t, len(agents(t)), total["ctrlmesh_manager_agents_connected"], 0)
	assert.GreaterOrEqual(t, total["ctrlmesh_policies"], float64(len(m.pods)))
	assert.Positive(t, total["ctrlmesh_stamped_objects_total"])
	assert.Positive(t, total["ctrlmesh_mesh_ca_expiry_timestamp_seconds"])
}
