package cost

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// metrics returns those of an agent that has counted n rounds of an operator's requests.
func metrics(n int) string {
	const of = `namespace="op",workload="od",shard="od-1"`
	return fmt.Sprintf(`# TYPE ctrlmesh_requests_total counter
ctrlmesh_requests_total{%[1]s,verb="get",resource="foos",code="200"} %[2]d
ctrlmesh_requests_total{%[1]s,verb="update",resource="foos",code="409"} %[3]d
ctrlmesh_requests_total{%[1]s,verb="patch",resource="pods",code="429"} %[2]d
ctrlmesh_requests_total{namespace="other",workload="x",shard="",verb="get",resource="pods",code="200"} %[2]d
# TYPE ctrlmesh_response_bytes_total counter
ctrlmesh_response_bytes_total{%[1]s,verb="get",resource="foos"} %[4]d
# TYPE ctrlmesh_apiserver_seconds_total counter
ctrlmesh_apiserver_seconds_total{%[1]s,verb="get",resource="foos"} %[2]d
# TYPE ctrlmesh_watches gauge
ctrlmesh_watches{%[1]s,resource="foos"} 2
# TYPE ctrlmesh_added_latency_seconds histogram
ctrlmesh_added_latency_seconds_bucket{%[1]s,verb="get",le="+Inf"} %[2]d
ctrlmesh_added_latency_seconds_sum{%[1]s,verb="get"} %[5]g
ctrlmesh_added_latency_seconds_count{%[1]s,verb="get"} %[2]d
`, of, 10*n, 20*n, 10240*n, 0.002*float64(10*n))
}

func reading(t *testing.T, at time.Duration, rounds map[string]int) Reading {
	t.Helper()
	out := Reading{At: time.Unix(0, 0).Add(at), Agents: map[string]Counts{}}
	for agent, n := range rounds {
		counts, err := Parse(strings.NewReader(metrics(n)))
		require.NoError(t, err)
		out.Agents[agent] = counts
	}
	return out
}

func TestCostsAreOfTheTimeBetween(t *testing.T) {
	is := Between(reading(t, 0, map[string]int{"a": 1, "b": 5}), reading(t, 10*time.Second, map[string]int{"a": 2, "b": 6}), "op")
	require.InDelta(t, 10, is.Seconds, 0)
	shard := Cost{Namespace: "op", Workload: "od", Shard: "od-1", Requests: 8, Writes: 6, Conflicts: 4, Throttled: 2, Bytes: 2048, InFlight: 2, Watches: 4}
	require.Len(t, is.Shards, 1)
	require.InDelta(t, 0.002, *is.Shards[0].AddedSeconds, 1e-9)
	require.Equal(t, "2ms", is.Shards[0].Added())
	is.Shards[0].AddedSeconds = nil
	require.Equal(t, shard, is.Shards[0])
	require.Equal(t, []Cost{
		{Namespace: "op", Workload: "od", Resource: "foos", Requests: 6, Writes: 4, Conflicts: 4, Bytes: 2048, InFlight: 2, Watches: 4},
		{Namespace: "op", Workload: "od", Resource: "pods", Requests: 2, Writes: 2, Throttled: 2},
	}, is.Resources, "the greatest first")
	require.Len(t, Between(reading(t, 0, map[string]int{"a": 1}), reading(t, time.Second, map[string]int{"a": 1}), "").Shards, 2, "of all namespaces, even without requests")
}

func TestCostsOfAgentsThatWereReplaced(t *testing.T) {
	for name, test := range map[string]struct {
		before, after map[string]int
		requests      float64
	}{
		"a new agent":                     {map[string]int{"a": 1}, map[string]int{"a": 2, "b": 9}, 4},
		"an agent that is gone":           {map[string]int{"a": 1, "b": 9}, map[string]int{"a": 2}, 4},
		"a series that began anew":        {map[string]int{"a": 9}, map[string]int{"a": 1}, 4},
		"a series that did not exist yet": {map[string]int{"a": 0}, map[string]int{"a": 1}, 4},
	} {
		is := Between(reading(t, 0, test.before), reading(t, 10*time.Second, test.after), "op")
		require.Len(t, is.Shards, 1, name)
		require.InDelta(t, test.requests, is.Shards[0].Requests, 1e-9, name)
	}
	same := Between(reading(t, 0, map[string]int{"a": 1}), reading(t, 0, map[string]int{"a": 1}), "")
	require.Zero(t, same.Shards[0].Requests, "no time has passed")
}

func TestMetricsThatAreNone(t *testing.T) {
	_, err := Parse(strings.NewReader("{"))
	require.ErrorContains(t, err, "reading the metrics of an agent")
	counts, err := Parse(strings.NewReader(""))
	require.NoError(t, err)
	require.Empty(t, counts)
}

func TestSizes(t *testing.T) {
	require.Equal(t, "0, <0.1, 1.5", strings.Join([]string{Rate(0), Rate(0.01), Rate(1.5)}, ", "))
}
