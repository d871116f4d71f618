package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
)

// metadataOnly is what the proxy accepts when it looks up the uid of an object.
const metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

// owning is a shard that owns some keys of pods and namespaces.
func owning(keys ...string) *meshv1.Sharding {
	return &meshv1.Sharding{Shard: "s1", Method: meshv1.Method_METHOD_LABELS, Limits: []*meshv1.Limit{{
		Scope:     sharding.Keys(keys...).Proto(),
		Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods", "namespaces"}}},
	}}}
}

// byObject is a shard that owns the objects of resources whose uid is "mine".
func byObject(resources ...string) *meshv1.Sharding {
	s := owning("mine")
	s.Key = meshv1.Key_KEY_OBJECT
	s.Limits[0].Resources[0].Resources = resources
	return s
}

func TestFence(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	c := m.client(true)
	own, lockOf := owning("mine"), locked("s1").Locks
	own.Locks = lockOf
	wide := owning("mine")
	wide.FenceNamespaces = true
	for _, q := range []struct {
		method, target, body string
		plain, wide          int
	}{
		{"GET", "/api/v1/namespaces/mine/pods/a", "", 200, 200},
		{"GET", "/api/v1/namespaces/theirs/pods/a", "", 403, 403},
		{"POST", "/api/v1/namespaces/theirs/pods", "{}", 403, 403},
		{"PUT", "/api/v1/namespaces/theirs/pods/a/status", "{}", 403, 403},
		{"PATCH", "/api/v1/namespaces/theirs/pods/a", "{}", 403, 403},
		{"DELETE", "/api/v1/namespaces/theirs/pods/a", "", 403, 403},
		{"POST", "/api/v1/namespaces/theirs/pods/a/exec", "", 403, 403},
		{"POST", "/api/v1/namespaces/theirs/bindings", `{"metadata":{"name":"a"}}`, 403, 403}, // of a pod
		{"GET", "/api/v1/namespaces/theirs/pods/a/proxy/x", "", 403, 403},
		{"GET", "/api/v1/namespaces/theirs", "", 403, 403},
		{"PATCH", "/api/v1/namespaces/mine/status", "{}", 200, 200},
		{"POST", "/api/v1/namespaces", `{"metadata":{"name":"mine"}}`, 200, 200},
		{"POST", "/api/v1/namespaces", `{"metadata":{"name":"theirs"}}`, 403, 403},
		{"POST", "/api/v1/namespaces", `{"metadata":{"generateName":"mine"}}`, 403, 403},
		{"GET", "/api/v1/namespaces/theirs/secrets/a", "", 200, 200},
		{"PUT", "/api/v1/namespaces/theirs/secrets/a", "{}", 200, 403},
		{"GET", "/api/v1/namespaces/theirs/services/a/proxy/x", "", 200, 403},
		{"PUT", "/api/v1/namespaces/ns/secrets/a", "{}", 200, 200}, // the pod's own
		{"PUT", "/api/v1/nodes/a", "{}", 200, 200},
	} {
		m.policy(own)
		a := m.with(c, q.method, q.target, q.body)
		require.Equal(t, q.plain, a.StatusCode, "%s %s: %s", q.method, q.target, a.body)
		if q.plain == 403 {
			require.Equal(t, metav1.StatusReasonForbidden, statusOf(t, a).Reason)
			require.Contains(t, a.body, "ShardingConfig ns/s1")
		}
		m.policy(wide)
		require.Equal(t, q.wide, m.with(c, q.method, q.target, q.body).StatusCode, "fenced namespaces: %s %s", q.method, q.target)
		for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_OBSERVE, meshv1.Isolation_ISOLATION_OFF} {
			loose := owning("mine")
			loose.Isolation = isolation
			m.policy(loose)
			require.Equal(t, 200, m.with(c, q.method, q.target, q.body).StatusCode, "%v %s %s", isolation, q.method, q.target)
			if q.body != "" {
				require.Equal(t, q.body, api.last(t).Body)
			}
		}
	}
	foreign := m.server.metrics.Foreign
	require.EqualValues(t, 2, testutil.ToFloat64(foreign.WithLabelValues("ns", "operator", "s1", "patch", "refused")))
	require.EqualValues(t, 1, testutil.ToFloat64(foreign.WithLabelValues("ns", "operator", "s1", "patch", "observed")))
}

// A deletecollection in a namespace of another shard finds nothing, whatever the
// isolation, as a list would.
func TestDeleteCollectionInForeignNamespaceDeletesNothing(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	nothing := isolation.Nothing.String()
	for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_ENFORCE, meshv1.Isolation_ISOLATION_OBSERVE, meshv1.Isolation_ISOLATION_OFF} {
		for _, q := range []struct{ target, plain, wide string }{
			{"/api/v1/namespaces/mine/pods", "", ""},
			{"/api/v1/namespaces/theirs/pods", nothing, nothing},
			{"/api/v1/namespaces/theirs/pods?labelSelector=a", nothing + ",a", nothing + ",a"},
			{"/api/v1/namespaces/ns/pods", nothing, nothing}, // the pod's own, but they are divided
			{"/api/v1/namespaces/theirs/secrets", "", nothing},
			{"/api/v1/namespaces/ns/secrets", "", ""},
			{"/api/v1/nodes", "", ""},
		} {
			for wide, want := range map[bool]string{false: q.plain, true: q.wide} {
				s := owning("mine")
				s.Isolation, s.FenceNamespaces = isolation, wide
				m.policy(s)
				a := m.do("DELETE", q.target, "")
				require.Equal(t, 200, a.StatusCode, "%v %s: %s", isolation, q.target, a.body)
				sent, err := url.Parse(api.last(t).URI)
				require.NoError(t, err)
				got := sent.Query().Get("labelSelector")
				require.ElementsMatch(t, strings.Split(want, ","), strings.Split(got, ","), "%v, fenced namespaces %t: %s", isolation, wide, q.target)
			}
		}
		m.policy(owning("mine", "theirs"))
		require.Equal(t, 400, m.do("DELETE", "/api/v1/namespaces/ns/pods?labelSelector=((", "").StatusCode)
	}
}

func TestFenceByObject(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		name := strings.Split(r.URL.Path, "/")[4]
		if name == "gone" {
			w.WriteHeader(404)
		}
		fmt.Fprintf(w, `{"metadata":{"name":%q,"uid":%q}}`, name, name)
	}}
	m := newMesh(t, api)
	m.policy(byObject("nodes"))
	for _, q := range []struct {
		method, target, body string
		want, asked          int
	}{
		{"GET", "/api/v1/nodes/mine", "", 200, 1},
		{"GET", "/api/v1/nodes/theirs", "", 403, 1},
		{"HEAD", "/api/v1/nodes/theirs", "", 403, 1},
		{"PUT", "/api/v1/nodes/mine", "{}", 200, 2},
		{"PUT", "/api/v1/nodes/theirs", "{}", 403, 1},
		{"PATCH", "/api/v1/nodes/theirs/status", "{}", 403, 1},
		{"PATCH", "/api/v1/nodes/gone", "{}", 404, 2},
		{"DELETE", "/api/v1/nodes/mine", "", 200, 2},
		{"DELETE", "/api/v1/nodes", "", 403, 0},
	} {
		before := len(api.requests())
		require.Equal(t, q.want, m.do(q.method, q.target, q.body).StatusCode, "%s %s", q.method, q.target)
		got := api.requests()[before:]
		require.Len(t, got, q.asked, "%s %s", q.method, q.target)
		if q.asked == 2 {
			require.Equal(t, metadataOnly, got[0].Header.Get("Accept"))
		}
		if q.method == "DELETE" && q.asked == 2 {
			require.JSONEq(t, `{"kind":"DeleteOptions","apiVersion":"v1","preconditions":{"uid":"mine"}}`, got[1].Body)
		}
	}
}

// Under observe nothing is refused or altered, also what cannot be distinguished.
func TestObserveByObjectPassesUndecidedRequests(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Header.Get("Accept") == metadataOnly { // who may patch need not be one who may get
			w.WriteHeader(403)
			fmt.Fprint(w, `{"kind":"Status","status":"Failure","code":403,"reason":"Forbidden"}`)
		}
	}}
	m := newMesh(t, api)
	s := byObject("nodes")
	s.Isolation = meshv1.Isolation_ISOLATION_OBSERVE
	m.policy(s)
	for _, method := range []string{"GET", "PATCH", "DELETE"} {
		require.Equal(t, 200, m.do(method, "/api/v1/nodes/a?includeObject=None", "", "Accept", "application/cbor").StatusCode, method)
		got := api.last(t)
		require.Equal(t, "application/cbor", got.Header.Get("Accept"))
		require.Equal(t, "/api/v1/nodes/a?includeObject=None", got.URI)
		require.Empty(t, got.Body)
		require.EqualValues(t, 1, testutil.ToFloat64(m.server.metrics.Foreign.WithLabelValues("ns", "operator", "s1", strings.ToLower(method), "unknown")))
	}
	o := owning("mine")
	o.Isolation = meshv1.Isolation_ISOLATION_OBSERVE
	m.policy(o)
	for _, header := range [][]string{{"Content-Type", "application/yaml"}, {"Content-Encoding", "gzip"}} {
		require.Equal(t, 200, m.do("POST", "/api/v1/namespaces", "metadata: {name: x}", header...).StatusCode)
		require.Equal(t, "metadata: {name: x}", api.last(t).Body)
	}
	m.policy(owning("mine"))
	require.Equal(t, 415, m.do("POST", "/api/v1/namespaces", "metadata: {name: x}", "Content-Type", "application/yaml").StatusCode)
}

func TestTableHasTheKeyOfItsRow(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		uid := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
		fmt.Fprintf(w, `{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":{},"rows":[{"cells":["a"],"object":{"metadata":{"uid":%q}}}]}`, uid)
	}}
	m := newMesh(t, api)
	s := byObject("nodes")
	s.Limits[0].Scope = sharding.Keys("mine", "").Proto() // a Table itself has no uid
	m.policy(s)
	for name, want := range map[string]int{"mine": 200, "theirs": 403} {
		a := m.do("GET", "/api/v1/nodes/"+name+"?includeObject=None", "", "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
		require.Equal(t, want, a.StatusCode, "%s: %s", name, a.body)
		require.Equal(t, "/api/v1/nodes/"+name+"?includeObject=Metadata", api.last(t).URI)
	}
}

func TestForeignObjectIsNotProxiedToByPort(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch r.URL.Path {
		case "/api/v1/namespaces/n/services/mine", "/api/v1/namespaces/n/services/theirs":
			fmt.Fprintf(w, `{"metadata":{"uid":%q}}`, r.URL.Path[len("/api/v1/namespaces/n/services/"):])
		default:
			if !strings.Contains(r.URL.Path, "/proxy/") {
				w.WriteHeader(404)
			}
		}
	}}
	m := newMesh(t, api)
	m.policy(byObject("services"))
	for _, name := range []string{"%s", "%s:80", "%s:web", "http:%s:80", "https:%s:", "http%%3A%s%%3A80"} {
		require.Equal(t, 403, m.do("POST", "/api/v1/namespaces/n/services/"+fmt.Sprintf(name, "theirs")+"/proxy/x", "").StatusCode, name)
		require.Equal(t, 200, m.do("POST", "/api/v1/namespaces/n/services/"+fmt.Sprintf(name, "mine")+"/proxy/x", "").StatusCode, name)
	}
}

func TestBindingsAreRefusedIfPodsAreDividedByObject(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(byObject("pods"))
	require.Equal(t, 403, m.do("POST", "/api/v1/namespaces/n/bindings", `{"metadata":{"name":"mine"}}`).StatusCode)
	require.Empty(t, api.requests())
	require.Equal(t, 200, m.do("POST", "/api/v1/namespaces/n/pods", "{}").StatusCode)
}

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
				return m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: version, Sharding: owning(keys...)})
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
	m.policy(owning("a"))
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		m.do("PUT", "/apis/things.example.com/v1/namespaces/a/things/x/proxy", "{}")
	}()
	<-api.arrived
	settled := m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "2", Sharding: owning("b")})
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
	m.policy(owning("a"))
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
		<-m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: fmt.Sprint(i), Sharding: owning(own)})
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
		s := owning(keys...)
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
