package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// jobAPI has no pods.
var jobAPI http.HandlerFunc = func(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if !r.URL.Query().Has("watch") {
		_, _ = io.WriteString(w, `{"kind":"PodList","apiVersion":"v1","items":[]}`)
	}
}

// job is a pod whose workload no other has, that has done something of every kind.
func (m *mesh) job(uid, workload string) *Pod {
	m.t.Helper()
	p := m.server.Pod(PodInfo{UID: uid, Namespace: "jobs", Name: uid}, m.dial)
	ask := func(method, target string) {
		w := httptest.NewRecorder()
		p.ServeHTTP(w, httptest.NewRequest(method, target, http.NoBody))
	}
	ask("GET", "/api/v1/pods") // there is no policy
	sharding := policytest.Owning("mine")
	sharding.Method = meshv1.Method_METHOD_FILTER
	_, err := p.Apply(&meshv1.PodPolicy{Uid: uid, Workload: workload, Version: "v", Sharding: sharding})
	require.NoError(m.t, err)
	ask("GET", "/api/v1/namespaces/mine/pods/x")
	ask("GET", "/api/v1/pods")
	ask("GET", "/api/v1/pods?watch=1")
	ask("DELETE", "/api/v1/namespaces/others/pods/x")
	p.bound("requests")
	pol := p.env.Policy.Load()
	pol.Tally.Metrics.Counter(m.server.metrics.Tunnels).Inc()
	pol.Tally.Metrics.Counter(m.server.metrics.TunnelBytes, "up").Inc()
	return p
}

func (m *mesh) series() map[string]int {
	m.t.Helper()
	families, err := m.registry.Gather()
	require.NoError(m.t, err)
	out := map[string]int{}
	for _, f := range families {
		out[f.GetName()] = len(f.GetMetric())
	}
	return out
}

// Jobs and bare pods have ever new names.
func TestSeriesEndWithLastPodOfWorkload(t *testing.T) {
	t.Parallel()
	m := newMesh(t, jobAPI)
	before := m.series()
	gone, cancel := context.WithCancel(t.Context())
	cancel()

	stays := m.job("stays", "deployment")
	one := m.series()
	for _, name := range []string{"requests", "response_bytes", "refusals", "bounds_reached", "foreign_requests", "filtered_objects", "passthrough_connections"} {
		require.Positive(t, one["ctrlmesh_"+name+"_total"], name)
	}
	for i := range 20 {
		p := m.job(fmt.Sprint("uid-", i), fmt.Sprint("job-", i))
		_ = p.Shutdown(gone)
	}
	require.Equal(t, one, m.series(), "of those that are gone nothing stays")

	other := m.job("other", "deployment")
	_ = stays.Shutdown(gone)
	require.Equal(t, one, m.series(), "its workload has a pod yet")
	other.env.Policy.Load().Plan(&pipeline.Request{Info: &pipeline.RequestInfo{IsResourceRequest: true, Verb: "get", Resource: "pods"}}).Meters.Count(200)
	sum, _ := m.tally("ctrlmesh_requests_total", "workload", "deployment", "verb", "get", "code", "200")
	require.Equal(t, 3.0, sum, "of both pods, and the last")
	late := other.env.Policy.Load()
	_ = other.Shutdown(gone)
	require.Equal(t, before, m.series())

	// What goes on all the same shows nowhere.
	plan := late.Plan(&pipeline.Request{Info: &pipeline.RequestInfo{IsResourceRequest: true, Verb: "watch", Resource: "pods"}})
	plan.Meters.Count(418)
	plan.Meters.Watches.Inc()
	late.Plan(&pipeline.Request{Info: &pipeline.RequestInfo{IsResourceRequest: true, Verb: "watch", Resource: "nodes"}}).Meters.Bytes.Add(1)
	other.bound("connections")
	_ = other.Quiet(t.Context())
	require.NotSame(t, late, other.env.Policy.Load())
	require.Equal(t, before, m.series())
	require.Equal(t, 1, m.server.metrics.Workloads.Len(), "that of the pod there is")
	m.policy(nil)
	require.Equal(t, 2, m.server.metrics.Workloads.Len())
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "another", Version: "v"})
	require.Equal(t, 2, m.server.metrics.Workloads.Len())
}

func TestCountingRequestAllocatesNothing(t *testing.T) {
	m := newMesh(t, jobAPI)
	p := m.job("uid", "job")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		p.env.Policy.Load().Plan(&pipeline.Request{Info: &pipeline.RequestInfo{IsResourceRequest: true, Verb: "get", Resource: "pods"}}).Meters.Count(200)
	}))
}
