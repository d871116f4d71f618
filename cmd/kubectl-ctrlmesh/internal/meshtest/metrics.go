package meshtest

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Counts lets agents count requests of the operator. Whenever the metrics of all have been read, ten seconds pass,
// and each agent counts a hundred requests more.
func (c *Cluster) Counts() {
	var lock sync.Mutex
	rounds := map[string]int{}
	passed := func() (most int) {
		for _, n := range rounds {
			most = max(most, n)
		}
		return most
	}
	c.Clock = func() time.Time {
		lock.Lock()
		defer lock.Unlock()
		return Now.Add(time.Duration(passed()) * 10 * time.Second)
	}
	c.Metrics = func(_ context.Context, agent *corev1.Pod) (io.ReadCloser, error) {
		lock.Lock()
		defer lock.Unlock()
		rounds[agent.Name]++
		n := rounds[agent.Name]
		of := func(resource, verb string) string {
			return fmt.Sprintf(`namespace=%q,workload="statefulset/od",shard="operator-demo-%s-normal",verb=%q,resource=%q`, Operator, agent.Name[len(agent.Name)-1:], verb, resource)
		}
		return io.NopCloser(strings.NewReader(fmt.Sprintf(`# TYPE ctrlmesh_requests_total counter
ctrlmesh_requests_total{%s,code="200"} %d
ctrlmesh_requests_total{%s,code="409"} %d
ctrlmesh_requests_total{%s,code="200"} %d
# TYPE ctrlmesh_response_bytes_total counter
ctrlmesh_response_bytes_total{%s} %d
# TYPE ctrlmesh_apiserver_seconds_total counter
ctrlmesh_apiserver_seconds_total{%s} %g
# TYPE ctrlmesh_watches gauge
ctrlmesh_watches{%s} 3
# TYPE ctrlmesh_added_latency_seconds histogram
ctrlmesh_added_latency_seconds_sum{%s} %g
ctrlmesh_added_latency_seconds_count{%s} %d
`, of("foos", "get"), 70*n, of("foos", "update"), 10*n, of("leases", "update"), 20*n, of("foos", "get"), 10240*n, of("foos", "get"), 5*float64(n),
			of("foos", "watch"), of("", "get"), 0.01*float64(n), of("", "get"), 100*n))), nil
	}
}
