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

// scrapeAgent reads the metrics of a node's agent, once it is ready.
func scrapeAgent(t *testing.T, node string) map[string]*dto.MetricFamily {
	t.Helper()
	return scrape(t, agentOn(t, node))
}

// agentOn returns the agent of a node, once it is ready: a busy one may be unready for a moment.
func agentOn(t *testing.T, node string) (agent *corev1.Pod) {
	t.Helper()
	until(t, "the agent of "+node, func(context.Context) error {
		agent = agents(t)[node]
		return orElse(agent != nil, "it is not ready")
	})
	return agent
}

// counted waits until the series of a node's agent that have the labels add up to at least
// want, and returns their sum: agents may count a moment after the client has its answer.
func counted(t *testing.T, node, metric string, labels map[string]string, want float64) (sum float64) {
	t.Helper()
	until(t, metric, func(context.Context) error {
		sum = kube.Total(scrapeAgent(t, node)[metric], labels)
		return orElse(sum >= want, fmt.Sprintf("%v: %v, not %v", labels, sum, want))
	})
	return sum
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
	assert.InDelta(t, before+requests, counted(t, node, "ctrlmesh_requests_total", series, before+requests), 0)
	owner := map[string]string{"namespace": m.home, "shard": m.shard(shard)}
	counted(t, node, "ctrlmesh_added_latency_seconds", owner, 1)
	counted(t, node, "ctrlmesh_response_bytes_total", owner, 1)
	after := scrapeAgent(t, node)
	assert.Zero(t, kube.Total(after["ctrlmesh_panics_total"], nil))
	assert.Positive(t, kube.Total(after["ctrlmesh_captured_pods"], nil)-kube.Total(after["ctrlmesh_captured_pods"], map[string]string{"mode": "none"}))

	// The managers' leader reports agents and policies. A manager that does not lead reports none.
	until(t, "the managers' metrics", func(ctx context.Context) error {
		total, err := managersTotal(ctx)
		if err != nil {
			return err
		}
		right := total["ctrlmesh_manager_agents_connected"] == float64(len(agents(t))) &&
			total["ctrlmesh_policies"] >= float64(len(m.pods)) &&
			total["ctrlmesh_stamped_objects_total"] > 0 && total["ctrlmesh_mesh_ca_expiry_timestamp_seconds"] > 0
		return orElse(right, fmt.Sprint(total))
	})
}

// managersTotal returns the sums of metrics over all managers.
func managersTotal(ctx context.Context) (map[string]float64, error) {
	pods, err := cluster.MeshPods(ctx, kube.ManagerName)
	if err != nil {
		return nil, err
	}
	total := map[string]float64{}
	for i := range pods {
		families, err := cluster.Scrape(ctx, &pods[i])
		if err != nil {
			return nil, err
		}
		for _, name := range []string{
			"ctrlmesh_manager_agents_connected", "ctrlmesh_policies", "ctrlmesh_stamped_objects_total", "ctrlmesh_mesh_ca_expiry_timestamp_seconds",
		} {
			total[name] += kube.Total(families[name], nil)
		}
	}
	return total, nil
}
