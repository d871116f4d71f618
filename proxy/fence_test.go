package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// held is an apiserver that answers writes when the test says so.
type held struct {
	arrived, answer chan struct{}
}

func (h held) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPut {
		h.arrived <- struct{}{}
		<-h.answer
	}
}

func TestPolicySettlesAfterEarlierWritesEnd(t *testing.T) {
	t.Parallel()
	for _, left := range []bool{false, true} {
		t.Run(fmt.Sprintf("client left %t", left), func(t *testing.T) {
			api := held{make(chan struct{}), make(chan struct{})}
			m := newMesh(t, api)
			policy := func(version string, keys ...string) <-chan struct{} {
				return m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: version, Sharding: policytest.Owning(keys...)})
			}
			<-policy("1", "a", "b")
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			req, err := http.NewRequestWithContext(ctx, "PUT", "https://kubernetes.default.svc/api/v1/namespaces/a/pods/x", strings.NewReader("{}"))
			require.NoError(t, err)
			answered := make(chan error, 1)
			go func() {
				resp, err := m.client(true).Do(req)
				if err == nil {
					_ = resp.Body.Close()
				}
				answered <- err
			}()
			<-api.arrived
			if left {
				leave()
				require.Error(t, <-answered)
			}
			second, third := policy("2", "b"), policy("3", "c")
			require.Equal(t, 403, m.do("PUT", "/api/v1/namespaces/a/pods/x", "{}").StatusCode, "at once")
			select {
			case <-second:
				require.Fail(t, "settled while a write is under way")
			case <-third:
				require.Fail(t, "settled before the policy before it")
			case <-time.After(50 * time.Millisecond):
			}
			require.Equal(t, "1", m.pod.Version())
			close(api.answer)
			<-third
			<-second
			require.Equal(t, "3", m.pod.Version())
			if !left {
				require.NoError(t, <-answered)
			}
		})
	}
}

func TestProxySubresourceOfOtherGroupIsOrdinary(t *testing.T) {
	t.Parallel()
	api := held{make(chan struct{}), make(chan struct{})}
	m := newMesh(t, api)
	m.policy(policytest.Owning("a"))
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		m.do("PUT", "/apis/things.example.com/v1/namespaces/a/things/x/proxy", "{}")
	}()
	<-api.arrived
	settled := m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "2", Sharding: policytest.Owning("b")})
	require.NotEqual(t, "2", m.pod.Version(), "settled while a write is under way")
	close(api.answer)
	<-settled
	<-answered
}

// Whatever writes while policies change: once one settled, nothing of what it took
// away reaches the apiserver.
func TestLostNamespaceIsNotWrittenAfterSettling(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	lost := ""
	var wrong []string
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err != nil {
			return // as the apiserver does
		}
		time.Sleep(time.Millisecond) // of work
		mu.Lock()
		defer mu.Unlock()
		if lost != "" && strings.Contains(r.URL.Path, "/namespaces/"+lost+"/") {
			wrong = append(wrong, r.URL.Path)
		}
	}))
	m.policy(policytest.Owning("a"))
	stop := make(chan struct{})
	var writers sync.WaitGroup
	for i := range 4 {
		c := m.client(i%2 == 0)
		writers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				body := strings.Repeat("x", 1+n%2*100_000)
				req, err := http.NewRequest("PUT", "https://kubernetes.default.svc/api/v1/namespaces/"+string(rune('a'+n/2%2))+"/pods/x", strings.NewReader(body))
				if err != nil {
					return
				}
				if resp, err := c.Do(req); err == nil {
					_ = resp.Body.Close()
				}
			}
		})
	}
	for i := range 100 {
		own, not := "a", "b"
		if i%2 == 0 {
			own, not = not, own
		}
		mu.Lock()
		lost = ""
		mu.Unlock()
		<-m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: fmt.Sprint(i), Sharding: policytest.Owning(own)})
		mu.Lock()
		lost = not
		mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	close(stop)
	writers.Wait()
	require.Empty(t, wrong)
}

func TestKeptCachesResumeAfterPolicyChange(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	c := m.client(true)
	filtered := func(keep bool, keys ...string) *meshv1.Sharding {
		s := policytest.Owning(keys...)
		s.Method, s.KeepCaches = meshv1.Method_METHOD_FILTER, keep
		return s
	}
	keep := func(keep bool, keys ...string) { m.policy(filtered(keep, keys...)) }
	m.restore(filtered(false, "a", "b"), time.Time{})
	m.with(c, "GET", "/api/v1/pods", "")
	const watch = "/api/v1/pods?watch=1&resourceVersion=5"
	began := time.Now()
	end := m.open(c, watch)

	keep(true, "a")
	require.NoError(t, <-end)
	require.Greater(t, time.Since(began), time.Second, "or client-go takes it for broken")
	resumed := m.open(c, watch)

	keep(false, "a")
	require.NoError(t, <-resumed)
	require.Equal(t, 410, m.resume(c, "/api/v1/pods", "5"))
}
