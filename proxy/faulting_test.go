package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// faults puts a policy with these rules in force.
func (m *mesh) faults(rules ...*meshv1.FaultRule) {
	m.t.Helper()
	for i, r := range rules {
		r.Name = fmt.Sprint("r", i)
		r.Key = fmt.Sprintf("key %v", r)
	}
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Traffic: &meshv1.Traffic{
		Injections: []*meshv1.Injection{{Name: "chaos", Rules: rules}},
	}})
}

// injected are the counts of faults by kind.
func (m *mesh) injected() map[string]int {
	m.t.Helper()
	families, err := m.registry.Gather()
	require.NoError(m.t, err)
	out := map[string]int{}
	for _, f := range families {
		if f.GetName() != "ctrlmesh_faults_injected_total" {
			continue
		}
		for _, series := range f.GetMetric() {
			for _, l := range series.GetLabel() {
				if l.GetName() == "kind" {
					out[l.GetValue()] += int(series.GetCounter().GetValue())
				}
			}
		}
	}
	return out
}

// protocols runs a test with clients of both.
func protocols(t *testing.T, run func(t *testing.T, http2 bool)) {
	t.Helper()
	for _, http2 := range []bool{false, true} {
		t.Run(fmt.Sprint("HTTP/", map[bool]string{false: "1.1", true: "2"}[http2]), func(t *testing.T) { run(t, http2) })
	}
}

func asking(t testing.TB, ctx context.Context, method, target string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, "https://kubernetes.default.svc"+target, nil)
	require.NoError(t, err)
	return r
}

const deployment = "/apis/apps/v1/namespaces/ns/deployments/d"

func TestAbortEqualsApiserverError(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	for _, c := range []struct {
		method, target string
		status         uint32
		said           string // by the rule
		is             func(error) bool
		name           string
	}{
		{"PUT", deployment, 409, "", apierrors.IsConflict, "d"},
		{"GET", deployment, 429, "", apierrors.IsTooManyRequests, "d"},
		{"GET", "/apis/apps/v1/deployments?watch=1", 410, "", apierrors.IsResourceExpired, ""},
	} {
		for _, media := range []string{jsonType, protoType} {
			m.faults(&meshv1.FaultRule{Abort: &meshv1.Abort{Status: c.status, Reason: c.said, Percent: 100}})
			protocols(t, func(t *testing.T, http2 bool) {
				a := m.with(m.client(http2), c.method, c.target, "", "Accept", media)
				require.Equal(t, int(c.status), a.StatusCode)
				require.Equal(t, media, a.Header.Get("Content-Type"))
				var s metav1.Status
				_, _, err := codecs.UniversalDeserializer().Decode([]byte(a.body), nil, &s)
				require.NoError(t, err)
				err = &apierrors.StatusError{ErrStatus: s}
				require.True(t, c.is(err), "%+v", s)
				require.ErrorContains(t, err, "ctrlmesh: injected by FaultInjection ns/chaos/r0")
				require.Equal(t, "deployments", s.Details.Kind)
				require.Equal(t, "apps", s.Details.Group)
				require.Equal(t, c.name, s.Details.Name)
				require.Equal(t, map[bool]string{true: "1"}[c.status == 429], a.Header.Get("Retry-After"))
			})
		}
	}
	require.Empty(t, api.requests(), "nothing was sent on")
}

func TestAbortWithoutErrorIsPlainResponse(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	for _, status := range []uint32{200, 204, 302} {
		m.faults(&meshv1.FaultRule{Abort: &meshv1.Abort{Status: status, Percent: 100}})
		a := m.do("PUT", deployment, "{}")
		require.Equal(t, int(status), a.StatusCode)
		require.Empty(t, a.body)
	}
}

func TestEveryFaultIsCountedAndInTheAccessLine(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.faults(
		&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: 1, Percent: 100}},
		&meshv1.FaultRule{Abort: &meshv1.Abort{Status: 500, Percent: 100}},
	)
	m.do("GET", deployment, "")
	m.do("GET", "/version", "") // rules without a match are about it too
	require.Eventually(t, func() bool { return m.injected()["abort"] == 2 }, soon, time.Millisecond)
	require.Contains(t, m.logs.String(), `"faults":["chaos/r0","chaos/r1"]`)
	require.NoError(t, testutil.GatherAndCompare(m.registry, strings.NewReader(`
# HELP ctrlmesh_faults_injected_total Faults injected into requests of captured pods, by the rule of a FaultInjection.
# TYPE ctrlmesh_faults_injected_total counter
ctrlmesh_faults_injected_total{faultinjection="chaos",kind="abort",namespace="ns",rule="r1",shard="",workload="operator"} 2
ctrlmesh_faults_injected_total{faultinjection="chaos",kind="delay",namespace="ns",rule="r0",shard="",workload="operator"} 2
`), "ctrlmesh_faults_injected_total"))

	m.faults()
	require.Empty(t, m.injected(), "series of rules that are gone")
	require.Equal(t, 200, m.do("GET", deployment, "").StatusCode)
}

func TestDelayEndsWithItsRule(t *testing.T) {
	t.Parallel()
	held := func(m *mesh) int64 { return m.pod.budgets.Held.Taken() }
	protocols(t, func(t *testing.T, http2 bool) {
		for _, c := range []struct {
			what string
			end  func(m *mesh, cancel func())
			code int // 0: no answer
		}{
			{"with the client", func(_ *mesh, cancel func()) { cancel() }, 0},
			{"with the rule", func(m *mesh, _ func()) { m.faults() }, 200},
			{"when another proxy takes over", func(m *mesh, _ func()) { m.pod.accepting.conns.Stop() }, 200},
		} {
			t.Run(c.what, func(t *testing.T) {
				m := newMesh(t, &recorder{})
				m.faults(&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				code := make(chan int, 1)
				go func() {
					r := asking(t, ctx, "PUT", deployment)
					r.Body, r.ContentLength = io.NopCloser(strings.NewReader("{}")), 2
					resp, err := m.client(http2).Do(r)
					if err != nil {
						code <- 0
						return
					}
					_ = resp.Body.Close()
					code <- resp.StatusCode
				}()
				require.Eventually(t, func() bool { return held(m) > 0 && m.pod.env.Rules.Faults.States()[0].Injected == 1 }, soon, time.Millisecond)
				// A policy that keeps the rule changes nothing.
				m.faults(&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}})
				require.Never(t, func() bool { return len(code) > 0 }, 20*time.Millisecond, time.Millisecond)
				c.end(m, cancel)
				require.Equal(t, c.code, <-code)
				require.Eventually(t, func() bool { return held(m) == 0 }, soon, time.Millisecond)
			})
		}
	})
}

func TestResetBreaksOneRequest(t *testing.T) {
	t.Parallel()
	protocols(t, func(t *testing.T, http2 bool) {
		for _, after := range []bool{false, true} {
			more := make(chan struct{})
			api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
				if r.Method == "GET" {
					w.(http.Flusher).Flush()
					<-more
				}
				_, _ = io.WriteString(w, "{}")
			}}
			m := newMesh(t, api)
			m.faults(&meshv1.FaultRule{
				Resources: []*meshv1.ResourceMatch{{Verbs: []string{"update"}}},
				Reset_:    &meshv1.Reset{Percent: 100, AfterAnswer: after},
			})
			c := m.client(http2)
			begun := m.hang(c)
			r := asking(t, t.Context(), "PUT", deployment)
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader("{}")), 2
			_, err := c.Do(r)
			require.Error(t, err)
			if http2 {
				require.ErrorContains(t, err, "INTERNAL_ERROR")
			} else {
				require.True(t, errors.Is(err, syscall.ECONNRESET), "%v", err)
			}
			updates := 0
			for _, r := range api.requests() {
				if r.Method == "PUT" {
					updates++
				}
			}
			require.Equal(t, after, updates == 1, "whether it was sent on")
			require.LessOrEqual(t, updates, 1)
			kind := map[bool]string{false: "reset", true: "reset_after_answer"}[after]
			require.Eventually(t, func() bool { return m.injected()[kind] == 1 }, soon, time.Millisecond)
			close(more)
			require.NoError(t, begun(), "another request, on the same HTTP/2 connection")

			// What was reset does not count as under way any more.
			select {
			case <-m.set(&meshv1.PodPolicy{Version: "next"}):
			case <-time.After(soon):
				require.Fail(t, "the policy does not settle")
			}
		}
	})
}

// hang asks for a log that does not end, and returns what reads a byte of it.
func (m *mesh) hang(c *http.Client) (read func() error) {
	m.t.Helper()
	ctx, cancel := context.WithCancel(m.t.Context())
	m.t.Cleanup(cancel)
	resp, err := c.Do(asking(m.t, ctx, "GET", "/api/v1/namespaces/ns/pods/p/log"))
	require.NoError(m.t, err)
	m.t.Cleanup(func() { _ = resp.Body.Close() })
	return func() error {
		_, err := resp.Body.Read(make([]byte, 1))
		return err
	}
}

func TestTruncatedResponseNeverEndsCleanly(t *testing.T) {
	t.Parallel()
	body := strings.Repeat("x", 100<<10)
	for what, answer := range map[string]http.HandlerFunc{
		"with a length": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", strconv.Itoa(len(body)))
			_, _ = io.WriteString(w, body)
		},
		"in chunks": func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
			_, _ = io.WriteString(w, body)
		},
	} {
		protocols(t, func(t *testing.T, http2 bool) {
			for _, after := range []int{0, 1, 5000, 99999, len(body), len(body) + 1} {
				t.Run(fmt.Sprint(what, " after ", after), func(t *testing.T) {
					m := newMesh(t, answer)
					m.faults(&meshv1.FaultRule{Truncate: &meshv1.Truncate{AfterBytes: uint64(after), Percent: 100}})
					resp, err := m.client(http2).Do(asking(t, t.Context(), "GET", deployment))
					require.NoError(t, err)
					defer resp.Body.Close()
					got, err := io.ReadAll(resp.Body)
					require.Len(t, got, min(after, len(body)))
					if after >= len(body) {
						require.NoError(t, err)
						require.Eventually(t, func() bool { return m.pod.budgets.Held.Taken() == 0 }, soon, time.Millisecond)
						require.Zero(t, m.injected()["truncate"], "nothing was left out")
						return
					}
					require.Error(t, err)
					if !http2 {
						require.ErrorIs(t, err, io.ErrUnexpectedEOF)
					}
					require.Eventually(t, func() bool { return m.injected()["truncate"] == 1 }, soon, time.Millisecond)
				})
			}
		})
	}
}

func TestTruncatedHTTP10ResponseNeverEndsCleanly(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.(http.Flusher).Flush()
		_, _ = io.WriteString(w, "twelve bytes")
	}))
	m.faults(&meshv1.FaultRule{Truncate: &meshv1.Truncate{AfterBytes: 3, Percent: 100}})
	c, err := tls.Dial("tcp", m.addr, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // the test's own
	require.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, "GET /version HTTP/1.0\r\nHost: kubernetes.default.svc\r\n\r\n")
	require.NoError(t, err)
	_, err = io.ReadAll(c)
	require.Error(t, err, "an end of the connection would be one of the body")
}

func TestSlowBodyIsSentAtItsRate(t *testing.T) {
	t.Parallel()
	body := strings.Repeat("x", 1000)
	protocols(t, func(t *testing.T, http2 bool) {
		m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) }))
		m.faults(&meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 5000, Percent: 100}})
		start := time.Now()
		a := m.with(m.client(http2), "GET", deployment, "")
		require.Equal(t, body, a.body)
		require.GreaterOrEqual(t, time.Since(start), 100*time.Millisecond)
		require.Eventually(t, func() bool { return m.injected()["slow_body"] == 1 }, soon, time.Millisecond)
	})
}

func TestSlowBodyEndsWithClientOrRule(t *testing.T) {
	t.Parallel()
	protocols(t, func(t *testing.T, http2 bool) {
		for what, target := range map[string]string{"a get": deployment, "a watch": "/api/v1/pods?watch=1"} {
			t.Run(what, func(t *testing.T) {
				m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, strings.Repeat("x", 1000)) }))
				m.faults(&meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 1, Percent: 100}})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				c := m.client(http2)
				gone, err := c.Do(asking(t, ctx, "GET", target))
				require.NoError(t, err)
				defer gone.Body.Close()
				stays, err := c.Do(asking(t, t.Context(), "GET", target))
				require.NoError(t, err)
				defer stays.Body.Close()
				underWay := func() int64 { return m.pod.budgets.Held.Taken() + m.pod.budgets.Long.Taken() }
				two := underWay()
				cancel()
				require.Eventually(t, func() bool { return underWay() < two }, soon, time.Millisecond)
				m.faults()
				b, err := io.ReadAll(bufio.NewReader(stays.Body))
				require.NoError(t, err)
				require.Len(t, b, 1000)
			})
		}
	})
}

// What a rule that is gone would have done to the rest of a long answer is not done, and
// what another does goes on.
func TestFaultsOfLongResponsesEndWithTheirRules(t *testing.T) {
	t.Parallel()
	protocols(t, func(t *testing.T, http2 bool) {
		for what, gone := range map[string]*meshv1.FaultRule{
			"truncated":            {Truncate: &meshv1.Truncate{AfterBytes: 10, Percent: 100}},
			"reset after the head": {Reset_: &meshv1.Reset{Percent: 100, AfterAnswer: true}},
		} {
			t.Run(what, func(t *testing.T) {
				more, asked := make(chan struct{}), make(chan struct{})
				m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					close(asked)
					if gone.Reset_ == nil {
						_, _ = io.WriteString(w, "12345678")
						w.(http.Flusher).Flush()
					}
					<-more
					_, _ = io.WriteString(w, strings.Repeat("x", 100))
				}))
				slow := func() *meshv1.FaultRule {
					return &meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 1000, Percent: 100}}
				}
				m.faults(slow(), gone)
				got := make(chan answer, 1)
				c := m.client(http2)
				go func() { got <- m.with(c, "GET", "/api/v1/namespaces/ns/pods/p/log?follow=true", "") }()
				<-asked
				m.faults(slow())
				start := time.Now()
				close(more)
				a := <-got
				require.Equal(t, 100, strings.Count(a.body, "x"))
				if gone.Reset_ == nil {
					require.GreaterOrEqual(t, time.Since(start), 90*time.Millisecond, "it is slow yet")
				}
			})
		}
	})
}

// What did not happen is not reported, and leaves the rule's count as it was.
func TestExpiredSlowBodyDoesNotSlowTheResponse(t *testing.T) {
	t.Parallel()
	more, asked := make(chan struct{}), make(chan struct{})
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(asked)
		<-more
		_, _ = io.WriteString(w, "done")
	}))
	slow := func() *meshv1.FaultRule {
		return &meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 1, Percent: 100}}
	}
	m.faults(slow())
	got := make(chan answer, 1)
	go func() { got <- m.do("GET", deployment, "") }()
	<-asked
	m.faults()
	close(more)
	require.Equal(t, "done", (<-got).body)
	m.faults(slow())
	require.Eventually(t, func() bool { return m.pod.FaultStates()[0].Injected == 0 }, soon, time.Millisecond)
	require.Zero(t, m.injected()["slow_body"])
}

// Of a delay by two rules, what one of them adds is over with it.
func TestDelayOfOneOfTwoRulesEnds(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	delay := func(d time.Duration) *meshv1.FaultRule {
		return &meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(d), Percent: 100}}
	}
	m.faults(delay(500*time.Millisecond), delay(time.Hour))
	start, done := time.Now(), make(chan answer, 1)
	go func() { done <- m.do("GET", deployment, "") }()
	require.Eventually(t, func() bool { return m.pod.env.Rules.Faults.States()[0].Injected == 1 }, soon, time.Millisecond)
	m.faults(delay(500 * time.Millisecond))
	require.Equal(t, 200, (<-done).StatusCode)
	require.GreaterOrEqual(t, time.Since(start), 500*time.Millisecond)
}

// A count that the next proxy goes on with is not spent twice.
func TestDrainingProxyInjectsNoFaults(t *testing.T) {
	t.Parallel()
	more := make(chan struct{})
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if w.(http.Flusher).Flush(); strings.HasSuffix(r.URL.Path, "/log") {
			<-more
		}
	}))
	m.faults(&meshv1.FaultRule{
		Resources: []*meshv1.ResourceMatch{{Verbs: []string{"get"}, Resources: []string{"deployments"}}},
		Count:     2, Abort: &meshv1.Abort{Status: 409, Percent: 100},
	})
	stop := sync.OnceFunc(func() { close(more) })
	defer stop()
	c := m.client(true)
	m.hang(c) // so that the connection stays
	require.Equal(t, 409, m.with(c, "GET", deployment, "").StatusCode)
	drained := make(chan error, 1)
	go func() { drained <- m.pod.Drain(t.Context()) }()
	<-m.pod.env.Draining.Done()
	require.Equal(t, 200, m.with(c, "GET", deployment, "").StatusCode)
	require.Equal(t, uint64(1), m.pod.env.Rules.Faults.States()[0].Injected)
	stop()
	require.NoError(t, <-drained)
}

func TestClientGoRetriesInjectedConflicts(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", jsonType)
		_, _ = io.WriteString(w, `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a"}}`)
	}})
	m.faults(&meshv1.FaultRule{
		Resources: []*meshv1.ResourceMatch{{Verbs: []string{"update"}, Resources: []string{"configmaps"}}},
		Count:     1, Abort: &meshv1.Abort{Status: 409, Percent: 100},
	})
	client := kubernetes.NewForConfigOrDie(m.config("2"))
	object, err := client.CoreV1().ConfigMaps("ns").Get(t.Context(), "a", metav1.GetOptions{})
	require.NoError(t, err)
	_, err = client.CoreV1().ConfigMaps("ns").Update(t.Context(), object, metav1.UpdateOptions{})
	require.True(t, apierrors.IsConflict(err), "%v", err)
	_, err = client.CoreV1().ConfigMaps("ns").Update(t.Context(), object, metav1.UpdateOptions{})
	require.NoError(t, err)
}
