package proxy

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// delayed puts a policy in force that delays and limits requests, asks, and waits until
// the request is delayed.
func (m *mesh) delayed(s *meshv1.Sharding, r *http.Request) (code <-chan int) {
	m.t.Helper()
	rule := &meshv1.FaultRule{Name: "r", Key: "k", Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}}
	if strings.Contains(r.URL.Path, "/leases/") {
		rule.Resources = []*meshv1.ResourceMatch{{Names: []string{"leader"}}}
	}
	m.set(&meshv1.PodPolicy{Version: "before", Sharding: s, Traffic: &meshv1.Traffic{
		Breakers:   []*meshv1.Breaker{{Name: "cap", Rules: named([]*meshv1.LimitRule{{MaxInFlight: 100}})}},
		Injections: []*meshv1.Injection{{Name: "chaos", Rules: []*meshv1.FaultRule{rule}}},
	}})
	out := make(chan int, 1)
	go func() {
		resp, err := m.client(true).Do(r)
		if err != nil {
			out <- 0
			return
		}
		_ = resp.Body.Close()
		out <- resp.StatusCode
	}()
	require.Eventually(m.t, func() bool { return m.pod.env.Rules.Faults.States()[0].Injected == 1 }, soon, time.Millisecond)
	return out
}

func TestDelayedRequestIsRefusedByLaterPolicy(t *testing.T) {
	t.Parallel()
	for _, target := range []string{deployment, "/api/v1/pods?watch=1", "/version"} {
		api := &recorder{}
		m := newMesh(t, api)
		code := m.delayed(nil, asking(t, t.Context(), "GET", target))
		m.set(&meshv1.PodPolicy{Version: "after", Refuse: "no more"})
		require.Equal(t, 503, <-code)
		require.Empty(t, api.requests())
	}
}

func TestDelayedRenewalUsesLockOfNewShard(t *testing.T) {
	t.Parallel()
	of := func(shard string) *meshv1.Sharding {
		return &meshv1.Sharding{Shard: shard, Locks: []*meshv1.Lock{{Namespace: "ns", Name: "leader", UpstreamName: "leader---" + shard}}}
	}
	const leases = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/"
	api := &recorder{}
	m := newMesh(t, api)
	r := asking(t, t.Context(), "PUT", leases+"leader")
	body := `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"namespace":"ns","name":"leader"}}`
	r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
	r.Header.Set("Content-Type", "application/json")
	code := m.delayed(of("s1"), r)
	settled := m.set(&meshv1.PodPolicy{Version: "after", Sharding: of("s2")})
	<-settled
	<-code
	require.Len(t, api.requests(), 1)
	require.Equal(t, leases+"leader---s2", api.last(t).URI)
	require.Contains(t, api.last(t).Body, `"leader---s2"`)
}

func TestDelayedWatchIsNarrowedByNewPolicy(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	code := m.delayed(policytest.LimitTo("a=1"), asking(t, ctx, "GET", "/api/v1/pods?watch=1"))
	m.policy(policytest.LimitTo("a=2"))
	require.Equal(t, 200, <-code)
	require.Equal(t, "/api/v1/pods?watch=1&labelSelector=a%3D2", api.last(t).URI)
	require.Eventually(t, func() bool { return m.pod.env.Ledger.Watches() == 0 }, soon, time.Millisecond)
}

// An injection that expires, or whose time of day is over, ends what it has under way.
func TestFaultsEndWhenTheirInjectionExpires(t *testing.T) {
	t.Parallel()
	body := strings.Repeat("x", 1000)
	for what, rule := range map[string]*meshv1.FaultRule{
		"delay":     {Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}},
		"slow body": {SlowBody: &meshv1.SlowBody{BytesPerSecond: 1, Percent: 100}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) }))
			rule.Name, rule.Key = "r", "k"
			injected := uint64(0)
			for life := int64(2); injected == 0 && life < 100; life *= 2 { // until it had begun
				m.set(&meshv1.PodPolicy{Version: "v", Traffic: &meshv1.Traffic{Injections: []*meshv1.Injection{{
					Name: "chaos", Expires: time.Now().Unix() + life, Rules: []*meshv1.FaultRule{rule},
				}}}})
				require.Equal(t, body, m.do("GET", deployment, "").body)
				injected = m.pod.env.Rules.Faults.States()[0].Injected
			}
			require.EqualValues(t, 1, injected)
		})
	}
}

// What a rule has in store beside a delay still comes under a policy that has the rule.
func TestFaultsAfterDelaySurvivePolicyChange(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	rule := func() *meshv1.Traffic {
		return &meshv1.Traffic{Injections: []*meshv1.Injection{{Name: "chaos", Rules: []*meshv1.FaultRule{{
			Name: "r", Key: "k", Count: 1,
			Delay: &meshv1.Delay{FixedNs: int64(200 * time.Millisecond), Percent: 100},
			Abort: &meshv1.Abort{Status: 500, Percent: 100},
		}}}}}
	}
	m.set(&meshv1.PodPolicy{Version: "1", Traffic: rule()})
	code := make(chan int, 1)
	go func() { code <- m.do("GET", deployment, "").StatusCode }()
	require.Eventually(t, func() bool { return m.pod.env.Rules.Faults.States()[0].Injected == 1 }, soon, time.Millisecond)
	m.set(&meshv1.PodPolicy{Version: "2", Traffic: rule()})
	require.Equal(t, 500, <-code)
	require.Equal(t, 200, m.do("GET", deployment, "").StatusCode)
}

func TestDelayedUpgradeSurvivesPolicyChange(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{then: echo})
	m.faults(&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}})
	go func() {
		for len(m.pod.env.Rules.Faults.States()) == 0 || m.pod.env.Rules.Faults.States()[0].Injected == 0 {
			time.Sleep(time.Millisecond)
		}
		_, _ = m.pod.Apply(&meshv1.PodPolicy{Version: "after"})
	}()
	u := m.upgrade("/api/v1/namespaces/a/pods/b/exec?command=ls", "SPDY/3.1", "")
	require.Equal(t, 101, u.resp.StatusCode)
}

func TestRestartedRequestIsSentAsItCame(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	r := asking(t, t.Context(), "GET", "/api/v1/pods?limit=5")
	r.Header.Set("Accept", "application/json;q=0.5, application/yaml")
	r.Header.Set("Accept-Encoding", "gzip")
	code := m.delayed(policytest.Divided(sharding.Keys("ns-0"), meshv1.Method_METHOD_SERVER_SIDE), r)
	m.policy(nil)
	require.Equal(t, 200, <-code)
	got := api.last(t)
	require.Equal(t, "/api/v1/pods?limit=5", got.URI)
	require.Equal(t, r.Header.Values("Accept"), got.Header.Values("Accept"))
	require.Equal(t, "gzip", got.Header.Get("Accept-Encoding"))
}

func TestRestartedRequestIsCountedOnce(t *testing.T) {
	t.Parallel()
	observe := policytest.Owning("mine")
	observe.Isolation = meshv1.Isolation_ISOLATION_OBSERVE
	dry := policytest.Owning("mine")
	dry.Method, dry.DryRun = meshv1.Method_METHOD_AUTO, true
	dryByObject := policytest.ByObject("pods") // a selector narrows as well
	dryByObject.Method, dryByObject.DryRun = meshv1.Method_METHOD_AUTO, true
	for name, test := range map[string]struct {
		sharding                     *meshv1.Sharding
		method, target, verb, action string
		of                           func(*mesh) *prometheus.CounterVec
	}{
		"dry run":           {dry, "PUT", "/api/v1/namespaces/theirs/pods/a", "update", "refused", dryRuns},
		"dry run, narrowed": {dry, "GET", "/api/v1/pods", "list", "narrowed", dryRuns},
		"dry run, both":     {dryByObject, "DELETE", "/api/v1/namespaces/theirs/pods", "deletecollection", "refused", dryRuns},
		"observe":           {observe, "PUT", "/api/v1/namespaces/theirs/pods/a", "update", "observed", foreignRequests},
		"observe, unknown":  {observe, "POST", "/api/v1/namespaces", "create", "unknown", foreignRequests},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, &recorder{})
			code := m.delayed(test.sharding, asking(t, t.Context(), test.method, test.target))
			m.set(&meshv1.PodPolicy{Version: "after", Sharding: test.sharding})
			require.Equal(t, 200, <-code)
			counts := test.of(m)
			require.EqualValues(t, 1, testutil.ToFloat64(counts.WithLabelValues("ns", "", "s1", test.verb, test.action)))
			total := 0.
			for _, action := range []string{"narrowed", "refused", "renamed", "observed", "unknown"} {
				total += testutil.ToFloat64(counts.WithLabelValues("ns", "", "s1", test.verb, action))
			}
			require.EqualValues(t, 1, total, "one action of one request")
		})
	}
}

func dryRuns(m *mesh) *prometheus.CounterVec { return m.server.metrics.DryRun }

func foreignRequests(m *mesh) *prometheus.CounterVec { return m.server.metrics.Foreign }
