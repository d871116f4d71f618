package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
)

// limits puts a policy with these rules in force.
func (m *mesh) limits(rules ...*meshv1.LimitRule) {
	m.t.Helper()
	m.traffic(&meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cap", Rules: named(rules)}}})
}

func (m *mesh) traffic(of *meshv1.Traffic) {
	m.t.Helper()
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Traffic: of})
}

func named(rules []*meshv1.LimitRule) []*meshv1.LimitRule {
	for i, r := range rules {
		if r.Name == "" {
			r.Name = fmt.Sprint("r", i)
		}
		if r.Resources == nil && r.Paths == nil {
			r.Resources = []*meshv1.ResourceMatch{{}}
		}
		if r.Key == "" {
			r.Key = fmt.Sprintf("key %v", r)
		}
	}
	return rules
}

// never fills again.
func bucket(burst uint32) *meshv1.Bucket {
	return &meshv1.Bucket{Burst: burst, IntervalNs: int64(time.Hour)}
}

func onlyLimits() meshv1.Trigger { return meshv1.Trigger_TRIGGER_LIMITER_ONLY }

func statusIn(t testing.TB, a answer) *metav1.Status {
	t.Helper()
	s := &metav1.Status{}
	require.NoError(t, json.Unmarshal([]byte(a.body), s), a.body)
	require.Equal(t, "Status", s.Kind)
	return s
}

// tally is the sum of a metric's series that have the label values.
func (m *mesh) tally(name string, labels ...string) (sum float64, series int) {
	m.t.Helper()
	families, err := m.registry.Gather()
	require.NoError(m.t, err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	next:
		for _, s := range f.GetMetric() {
			has := map[string]string{}
			for _, l := range s.GetLabel() {
				has[l.GetName()] = l.GetValue()
			}
			for i := 0; i < len(labels); i += 2 {
				if has[labels[i]] != labels[i+1] {
					continue next
				}
			}
			series++
			sum += s.GetCounter().GetValue() + s.GetGauge().GetValue()
		}
	}
	return sum, series
}

func TestLimitedRequestGetsRetryAfter(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.limits(&meshv1.LimitRule{Bucket: &meshv1.Bucket{Burst: 2, Limit: 1, IntervalNs: int64(90 * time.Second)}, Trigger: onlyLimits()})
	for range 2 {
		require.Equal(t, 200, m.do("GET", deployment, "").StatusCode)
	}
	a := m.do("GET", deployment, "")
	require.Equal(t, 429, a.StatusCode)
	require.Equal(t, "90", a.Header.Get("Retry-After"))
	s := statusIn(t, a)
	require.Equal(t, metav1.StatusReasonTooManyRequests, s.Reason)
	require.EqualValues(t, 90, s.Details.RetryAfterSeconds)
	require.Contains(t, s.Message, `rule "r0" of CircuitBreaker ns/cap`)
	require.Len(t, api.requests(), 2)
	require.Contains(t, m.logs.String(), `"limited_by":"cap/r0"`)
	sum, _ := m.tally("ctrlmesh_limited_requests_total", "circuitbreaker", "cap", "rule", "r0", "reason", "bucket", "workload", "operator")
	require.Equal(t, 1.0, sum)
	sum, _ = m.tally("ctrlmesh_refusals_total", "reason", "limited")
	require.Equal(t, 1.0, sum)
	require.EqualValues(t, 1, m.pod.RuleStates()[0].GetRefused())

	m.limits()
	require.Equal(t, 200, m.do("GET", deployment, "").StatusCode)
	_, series := m.tally("ctrlmesh_limited_requests_total")
	require.Zero(t, series, "of rules that are gone")
}

func TestOpenBreakerRefusesUntilProbeSucceeds(t *testing.T) {
	t.Parallel()
	var code atomic.Int32
	code.Store(500)
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(int(code.Load())) }}
	m := newMesh(t, api)
	const window = 300 * time.Millisecond
	m.limits(&meshv1.LimitRule{
		Trip:     &meshv1.Trip{WindowNs: int64(time.Minute), MinRequests: 3, ErrorPercent: 100},
		Recovery: &meshv1.Recovery{SleepingWindowNs: int64(window)},
	})
	get := func() answer { return m.do("GET", deployment, "") }
	for range 3 {
		require.Equal(t, 500, get().StatusCode)
	}
	sum, _ := m.tally("ctrlmesh_circuitbreaker_rule_open_pods", "circuitbreaker", "cap", "rule", "r0")
	require.Equal(t, 1.0, sum)
	a := get()
	if a.StatusCode != 500 { // unless the machine is so busy that the window is over
		require.Equal(t, 503, a.StatusCode)
		require.Equal(t, "1", a.Header.Get("Retry-After"))
		require.Equal(t, metav1.StatusReasonServiceUnavailable, statusIn(t, a).Reason)
		require.Contains(t, a.body, "CircuitBreaker ns/cap has opened")
	}
	code.Store(200)
	require.Eventually(t, func() bool { return get().StatusCode == 200 }, soon, window/3)
	require.Equal(t, meshv1.BreakerState_BREAKER_CLOSED, m.pod.RuleStates()[0].GetState())
	_, series := m.tally("ctrlmesh_circuitbreaker_rule_open_pods")
	require.Zero(t, series)
}

// abandon sends a GET, cancels it when arrived returns true, and waits until the proxy has
// counted it as the first request without a client.
func (m *mesh) abandon(c *http.Client, path string, arrived func() bool) {
	m.t.Helper()
	ctx, cancel := context.WithCancel(m.t.Context())
	done := make(chan error, 1)
	go func() {
		resp, err := c.Do(asking(m.t, ctx, "GET", path))
		if err == nil {
			_ = resp.Body.Close()
		}
		done <- err
	}()
	require.Eventually(m.t, arrived, soon, time.Millisecond)
	cancel()
	require.Error(m.t, <-done)
	require.Eventually(m.t, func() bool {
		gone, _ := m.tally("ctrlmesh_requests_total", "code", "499")
		return gone == 1
	}, soon, time.Millisecond)
}

// What says nothing of the apiserver's health opens nothing.
func TestRefusalsAndAbandonedRequestsAreNoFailures(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	defer close(hang)
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.Contains(r.URL.Path, "hang"):
			select {
			case <-hang:
			case <-r.Context().Done():
			}
		case r.URL.Query().Get("watch") != "":
			w.(http.Flusher).Flush()
			time.Sleep(20 * time.Millisecond)
		default:
			var code int
			_, _ = fmt.Sscanf(r.URL.Query().Get("code"), "%d", &code)
			w.WriteHeader(code)
		}
	}}
	m := newMesh(t, api)
	trip := func(requests uint32) *meshv1.LimitRule {
		return &meshv1.LimitRule{
			Trip: &meshv1.Trip{WindowNs: int64(time.Minute), MinRequests: requests, ErrorPercent: 1, SlowPercent: 1, SlowNs: int64(10 * time.Second)},
		}
	}
	m.limits(trip(1))
	c := m.client(true)
	state := func() meshv1.BreakerState { return m.pod.RuleStates()[0].GetState() }
	for _, code := range []int{200, 201, 400, 401, 403, 404, 409, 410, 422} {
		require.Equal(t, code, m.with(c, "GET", fmt.Sprintf("%s?code=%d", deployment, code), "").StatusCode)
		require.Equal(t, meshv1.BreakerState_BREAKER_CLOSED, state(), code)
	}
	require.Equal(t, 200, m.with(c, "GET", "/apis/apps/v1/deployments?watch=1", "").StatusCode)

	sent := len(api.requests())
	m.abandon(c, "/apis/apps/v1/namespaces/ns/deployments/hang", func() bool { return len(api.requests()) > sent })
	require.Equal(t, meshv1.BreakerState_BREAKER_CLOSED, state())

	for _, code := range []int{429, 500, 503} {
		m.limits(trip(1))
		next := trip(1)
		next.Key = fmt.Sprint("for ", code)
		m.limits(next)
		require.Equal(t, code, m.with(c, "GET", fmt.Sprintf("%s?code=%d", deployment, code), "").StatusCode)
		require.Equal(t, meshv1.BreakerState_BREAKER_OPENED, state(), code)
	}
}

func TestClientThatLeavesADelayedRequestIsNoFailure(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.traffic(&meshv1.Traffic{
		Breakers: []*meshv1.Breaker{{Name: "cap", Rules: named([]*meshv1.LimitRule{{
			Trip: &meshv1.Trip{WindowNs: int64(time.Minute), MinRequests: 1, ErrorPercent: 1},
		}})}},
		Injections: []*meshv1.Injection{{Name: "i", Rules: []*meshv1.FaultRule{{
			Name: "f", Key: "f", Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}, Abort: &meshv1.Abort{Status: 500, Percent: 100},
		}}}},
	})
	m.abandon(m.client(true), deployment, func() bool { return m.pod.env.Rules.Faults.States()[0].Injected == 1 })
	require.Equal(t, meshv1.BreakerState_BREAKER_CLOSED, m.pod.RuleStates()[0].GetState())
}

func TestSlowResponsesOpenBreaker(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) { time.Sleep(5 * time.Millisecond) }}
	m := newMesh(t, api)
	m.limits(&meshv1.LimitRule{Trip: &meshv1.Trip{WindowNs: int64(time.Minute), MinRequests: 2, SlowPercent: 50, SlowNs: int64(time.Millisecond)}})
	for _, want := range []int{200, 200, 503} {
		require.Equal(t, want, m.do("GET", deployment, "").StatusCode)
	}
}

// The head of a followed log comes with its first line, and what is proxied to is not
// the apiserver.
func TestWatchesAreNeverSlow(t *testing.T) {
	t.Parallel()
	for _, path := range []string{
		"/api/v1/namespaces/ns/pods?watch=true",
		"/api/v1/namespaces/ns/pods/x/log?follow=true",
		"/api/v1/namespaces/ns/services/x/proxy/",
	} {
		api := &recorder{then: func(http.ResponseWriter, *http.Request) { time.Sleep(5 * time.Millisecond) }}
		m := newMesh(t, api)
		m.limits(&meshv1.LimitRule{Trip: &meshv1.Trip{WindowNs: int64(time.Minute), MinRequests: 1, SlowPercent: 1, SlowNs: int64(time.Millisecond)}})
		for range 3 {
			require.Equal(t, 200, m.do("GET", path, "").StatusCode, path)
		}
		require.Equal(t, 200, m.do("GET", deployment, "").StatusCode)
		require.Equal(t, 503, m.do("GET", path, "").StatusCode, "that was slow")
	}
}

func TestMissingApiserverAndFaultsCountAsFailures(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]*meshv1.FaultRule{
		"gone":  nil,
		"abort": {Name: "f", Key: "f", Abort: &meshv1.Abort{Status: 500, Percent: 100}},
		"reset": {Name: "f", Key: "f", Reset_: &meshv1.Reset{Percent: 100}},
		"lost":  {Name: "f", Key: "f", Reset_: &meshv1.Reset{Percent: 100, AfterAnswer: true}},
	} {
		t.Run(name, func(t *testing.T) {
			protocols(t, func(t *testing.T, http2 bool) {
				m := newMesh(t, &recorder{})
				of := &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cap", Rules: named([]*meshv1.LimitRule{{
					Trip: &meshv1.Trip{WindowNs: int64(time.Minute), MinRequests: 1, ErrorPercent: 100},
				}})}}}
				if fault == nil {
					m.api.Close()
				} else {
					of.Injections = []*meshv1.Injection{{Name: "i", Rules: []*meshv1.FaultRule{fault}}}
				}
				m.traffic(of)
				resp, err := m.client(http2).Do(asking(t, t.Context(), "POST", "/api/v1/namespaces/ns/pods")) // which no client repeats
				if err == nil {
					_ = resp.Body.Close()
				}
				require.Eventually(t, func() bool {
					return m.pod.RuleStates()[0].GetState() == meshv1.BreakerState_BREAKER_OPENED
				}, soon, time.Millisecond)
			})
		})
	}
}

func TestRequestsInFlight(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) { <-hang }}
	m := newMesh(t, api)
	m.limits(&meshv1.LimitRule{MaxInFlight: 1})
	c := m.client(true)
	done := make(chan int, 1)
	go func() {
		resp, err := c.Do(asking(t, t.Context(), "GET", deployment))
		if err != nil {
			done <- 0
			return
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		done <- resp.StatusCode
	}()
	require.Eventually(t, func() bool { return len(api.requests()) == 1 }, soon, time.Millisecond)
	a := m.with(c, "GET", deployment, "")
	require.Equal(t, 429, a.StatusCode)
	require.Equal(t, "1", a.Header.Get("Retry-After"))
	close(hang)
	require.Equal(t, 200, <-done)
	require.Eventually(t, func() bool { return m.with(c, "GET", deployment, "").StatusCode == 200 }, soon, time.Millisecond)
}

// What lasts after its answer began is in flight until it ends.
func TestStreamsInFlight(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/exec") {
			echo(w, r)
			return
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}}
	m := newMesh(t, api)
	m.limits(&meshv1.LimitRule{MaxInFlight: 1, Resources: []*meshv1.ResourceMatch{{Resources: []string{"pods/*"}}}})
	const pod = "/api/v1/namespaces/ns/pods/p"
	c := m.client(true)
	free := func() bool {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		resp, err := c.Do(asking(t, ctx, "GET", pod+"/log?follow=true"))
		require.NoError(t, err)
		defer resp.Body.Close()
		return resp.StatusCode == 200
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := c.Do(asking(t, ctx, "GET", pod+"/log?follow=true"))
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 200, resp.StatusCode)
	require.False(t, free())
	cancel()
	require.Eventually(t, free, soon, 10*time.Millisecond)

	var u upgraded
	require.Eventually(t, func() bool {
		u = m.upgrade(pod+"/exec", "websocket", "")
		return u.resp.StatusCode == 101
	}, soon, 10*time.Millisecond)
	require.False(t, free())
	_ = u.conn.Close()
	require.Eventually(t, free, soon, 10*time.Millisecond)
}

func TestHangingApiserverOpensBreaker(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }}
	m := newMesh(t, api)
	m.limits(&meshv1.LimitRule{Trip: &meshv1.Trip{WindowNs: int64(time.Minute), MinRequests: 1, SlowPercent: 100, SlowNs: int64(20 * time.Millisecond)}})
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		resp, err := m.client(true).Do(asking(t, ctx, "GET", deployment))
		if err == nil {
			_ = resp.Body.Close()
		}
		left <- err
	}()
	require.Eventually(t, func() bool { return len(api.requests()) == 1 }, soon, time.Millisecond)
	time.Sleep(20 * time.Millisecond) // so that it is slow
	cancel()
	require.Error(t, <-left)
	require.Eventually(t, func() bool {
		return m.pod.RuleStates()[0].GetState() == meshv1.BreakerState_BREAKER_OPENED
	}, soon, time.Millisecond)
}

func TestBackoffAfterConsecutiveFailures(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }}
	m := newMesh(t, api)
	m.limits(&meshv1.LimitRule{Backoff: &meshv1.Backoff{Failures: 2, BaseNs: int64(time.Hour), MaxNs: int64(time.Hour)}})
	for _, want := range []int{500, 500, 429} {
		require.Equal(t, want, m.do("GET", deployment, "").StatusCode)
	}
}

func TestCountsOfRulesMoveToAnotherProxy(t *testing.T) {
	t.Parallel()
	rules := func() []*meshv1.LimitRule { return []*meshv1.LimitRule{{Bucket: bucket(2), Trigger: onlyLimits()}} }
	old, next := newMesh(t, &recorder{}), newMesh(t, &recorder{})
	old.limits(rules()...)
	require.Equal(t, 200, old.do("GET", deployment, "").StatusCode)
	data, err := old.pod.ExportTraffic()
	require.NoError(t, err)
	require.NoError(t, next.pod.ImportTraffic(data))
	next.limits(rules()...)
	require.Equal(t, 200, next.do("GET", deployment, "").StatusCode)
	require.Equal(t, 429, next.do("GET", deployment, "").StatusCode)
	for _, bad := range []string{"", "{", `{"limits":{"version":99,"oldest":99}}`, `{"limits":"x"}`} {
		require.Error(t, next.pod.ImportTraffic([]byte(bad)), bad)
	}
	require.Equal(t, 429, next.do("GET", deployment, "").StatusCode)
}

func TestMetricsOfRulesEndWithTheirPod(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.limits(&meshv1.LimitRule{Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED})
	require.Equal(t, 503, m.do("GET", deployment, "").StatusCode)
	require.Equal(t, 1, testutil.CollectAndCount(metrics.Breakers(m.server.openBreakers)))
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	require.NoError(t, m.pod.Shutdown(ctx))
	_, series := m.tally("ctrlmesh_limited_requests_total")
	require.Zero(t, series)
	require.Zero(t, testutil.CollectAndCount(metrics.Breakers(m.server.openBreakers)))
}
