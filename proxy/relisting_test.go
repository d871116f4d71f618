package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
)

// restore puts a policy in force that an earlier proxy had.
func (m *mesh) restore(s *meshv1.Sharding, since time.Time) {
	m.t.Helper()
	require.NoError(m.t, m.pod.Restore(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Sharding: s}, since))
}

// settle lets the time go by in which caches resume.
func (m *mesh) settle() { m.pod.env.Ledger.Age(relist.ResumeWithin) }

// resume asks for a watch from where a cache is, and returns the answer's code.
func (m *mesh) resume(c *http.Client, path, version string, header ...string) int {
	m.t.Helper()
	join := "?"
	if strings.Contains(path, "?") {
		join = "&"
	}
	return m.with(c, "GET", path+join+"watch=true&resourceVersion="+version, "", header...).StatusCode
}

// Caches outlive the agent: what it did not see them filled with counts.
func TestCachesOfEarlierProxyAreJudgedByItsPolicy(t *testing.T) {
	t.Parallel()
	const pods, services, leases = "/api/v1/pods", "/api/v1/services", "/apis/coordination.k8s.io/v1/leases"
	only := func(selector string) *meshv1.Sharding {
		return &meshv1.Sharding{Shard: "s", Limits: []*meshv1.Limit{{
			Selector: selector, Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods"}}},
		}}}
	}
	for _, c := range []struct {
		name                   string
		begin                  func(m *mesh)
		pods, services, leases int
	}{
		{"nothing changed", func(m *mesh) {
			m.restore(only("a=1"), time.Time{})
			m.policy(only("a=1"))
		}, 200, 200, 200},
		{"changed before a watch came", func(m *mesh) {
			m.restore(only("a=1"), time.Time{})
			m.policy(only("a=2"))
		}, 410, 200, 200},
		{"changed, and said again", func(m *mesh) {
			m.restore(only("a=1"), time.Time{})
			m.policy(only("a=2"))
			m.policy(only("a=2"))
		}, 410, 200, 200},
		{"the lock changed before a watch came", func(m *mesh) {
			m.restore(only("a=1"), time.Time{})
			next := only("a=1")
			next.Locks = policytest.Locked("s").Locks
			m.policy(next)
		}, 200, 200, 410},
		{"changed to and fro", func(m *mesh) {
			m.restore(only("a=1"), time.Time{})
			m.policy(only("a=2"))
			m.policy(only("a=1"))
		}, 200, 200, 200},
		{"nothing was restored", func(m *mesh) {
			m.policy(only("a=1"))
		}, 410, 410, 410},
		{"nothing was restored, then it changed", func(m *mesh) {
			m.policy(only("a=1"))
			m.policy(only("a=2"))
		}, 410, 410, 410},
		{"the earlier proxy ended just after a change", func(m *mesh) {
			m.restore(only("a=1"), time.Now().Add(-time.Minute))
		}, 410, 410, 410},
		{"the clock was set back", func(m *mesh) {
			m.restore(only("a=1"), time.Now().Add(24*time.Hour))
			m.settle()
		}, 200, 200, 200},
		{"restored after a policy came", func(m *mesh) {
			m.restore(only("a=1"), time.Time{})
			m.restore(only("a=2"), time.Time{})
		}, 410, 200, 200},
		{"they had their time", func(m *mesh) {
			m.policy(only("a=1"))
			m.settle()
		}, 200, 200, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMesh(t, &recorder{})
			c.begin(m)
			client := m.client(true)
			for path, want := range map[string]int{pods: c.pods, services: c.services, leases: c.leases} {
				require.Equal(t, want, m.resume(client, path, "5"), path)
				require.Equal(t, 200, m.do("GET", path, "").StatusCode)
				require.Equal(t, 200, m.resume(client, path, "5"), "%s was listed", path)
			}
		})
	}
}

// Who learned a version by a get or a create has no cache to fill anew.
func TestVersionLearnedAfterChangeResumes(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(policytest.LimitTo("a=1"))
	c := m.client(true)
	const path = "/api/v1/pods?fieldSelector=metadata.name%3Dx"
	require.Equal(t, 410, m.resume(c, path, "5"))
	require.Equal(t, 410, m.resume(c, path, "5"), "the answer may have been lost")
	require.Equal(t, 200, m.resume(c, path, "7"))
	require.Equal(t, 200, m.resume(c, path, "9"))
	require.Equal(t, 410, m.resume(c, path, "5"))

	m.policy(policytest.LimitTo("a=2"))
	require.Equal(t, 410, m.resume(c, path, "9"))
	m.settle()
	require.Equal(t, 200, m.resume(c, path, "9"), "no client must list for ever")
	require.Equal(t, 200, m.resume(c, path+"2", "5"))
}

// Each cache whose watch was ended lists again, however many ask in the same words.
func TestTwoCachesOfOneViewListTwice(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	m.restore(policytest.LimitTo("a=1"), time.Time{})
	c := m.client(true)
	const path, from = "/api/v1/pods", "/api/v1/pods?watch=1&resourceVersion="
	expired := func(version string) {
		t.Helper()
		require.Equal(t, 410, m.resume(c, path, version))
	}
	a, b := m.open(c, from+"5"), m.open(c, from+"6")
	m.policy(policytest.LimitTo("a=2"))
	require.NoError(t, <-a)
	require.NoError(t, <-b)
	expired("5")
	m.policy(policytest.LimitTo("a=3")) // the other has not come back yet
	expired("6")
	expired("5")
	m.policy(policytest.LimitTo("a=4"))
	m.with(c, "GET", path, "")
	end := m.open(c, from+"7")

	m.policy(policytest.LimitTo("a=5"))
	require.NoError(t, <-end)
	m.settle()
	expired("8") // a cache that was seen lists again, however long it took
	end = m.open(c, from+"9")
	require.NoError(t, m.pod.Shutdown(t.Context()))
	require.NoError(t, <-end)
}

// A pod with more views than are remembered lists more often than needed, and
// not for ever.
func TestForgottenViewsMustListAgain(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(policytest.LimitTo("a=1"))
	m.pod.env.Ledger.Bounds.Views = 0
	c := m.client(true)
	require.Equal(t, 410, m.resume(c, "/api/v1/pods", "5"))
	m.with(c, "GET", "/api/v1/pods", "")
	require.Equal(t, 410, m.resume(c, "/api/v1/pods", "7"))
	m.settle()
	require.Equal(t, 200, m.resume(c, "/api/v1/pods", "7"))
	require.Equal(t, 410, func() int { m.policy(policytest.LimitTo("a=2")); return m.resume(c, "/api/v1/pods", "7") }())
	views, _ := m.pod.env.Ledger.Remembered()
	require.Zero(t, views)
}

// What a pod says at length is not kept.
func TestLongQueriesAreNotKeptInMemory(t *testing.T) {
	m := newMesh(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	m.server.log = slog.New(slog.DiscardHandler)
	m.policy(nil)
	c := m.client(false)
	heap := func() uint64 {
		c.CloseIdleConnections()
		runtime.GC()
		runtime.GC() // what was in pools
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	const turns, size = 64, 100 << 10
	long := strings.Repeat("x", size)
	m.with(c, "GET", "/apis/g/v1/namespaces/x/s/y/s/"+long, "")
	before := heap()
	for i := range turns {
		for _, path := range []string{
			fmt.Sprintf("/apis/g/v1/n%d%s", i, long),
			fmt.Sprintf("/apis/g/v1/namespaces/%s/r%d", long, i),
			fmt.Sprintf("/apis/g/v1/namespaces/x/s/y/s%d/%s", i, long),
			fmt.Sprintf("/api/v1/pods?fieldSelector=%d%s", i, long),
		} {
			require.Equal(t, 200, m.with(c, "GET", path, "").StatusCode)
		}
		require.Equal(t, 410, m.resume(c, "/api/v1/pods", "5", "User-Agent", fmt.Sprint(i, long)))
		require.Equal(t, 410, m.resume(c, "/api/v1/pods", fmt.Sprint(i, long), "User-Agent", fmt.Sprint(i)))
	}
	require.Eventually(t, func() bool { return heap() < before+turns*size/2 }, soon, 50*time.Millisecond)
}

// store is an apiserver with pods.
type store struct {
	streams bool // knows sendInitialEvents
	pods    []*corev1.Pod

	mu       sync.Mutex
	requests []string
}

func (s *store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	s.mu.Lock()
	s.requests = append(s.requests, r.URL.RawQuery)
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	initial := q.Get("sendInitialEvents") == "true"
	if initial && !s.streams {
		e := apierrors.NewInvalid(metav1.SchemeGroupVersion.WithKind("ListOptions").GroupKind(), "", nil)
		w.WriteHeader(int(e.ErrStatus.Code))
		_ = json.NewEncoder(w).Encode(e.ErrStatus)
		return
	}
	selector, _ := labels.Parse(q.Get("labelSelector"))
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
	for _, p := range s.pods {
		if selector.Matches(labels.Set(p.Labels)) {
			list.Items = append(list.Items, *p)
		}
	}
	if q.Get("watch") == "" {
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	event := func(kind string, o any) { _ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": o}) }
	if initial {
		for i := range list.Items {
			event("ADDED", &list.Items[i])
		}
		end := pod("", "10", "")
		end.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		event("BOOKMARK", end)
	}
	// The next event never comes whole.
	_, _ = io.WriteString(w, `{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":"ha`)
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

func pod(name, version, shard string) *corev1.Pod {
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, ResourceVersion: version, Labels: map[string]string{"shard": shard}},
	}
}

// An informer comes to hold what the new policy gives, by a list or by a watch
// that begins with one; that its watch was ended amid an event is nothing to it.
func TestInformerHasObjectsOfPolicyInForce(t *testing.T) {
	t.Parallel()
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("streams=%t", streams), func(t *testing.T) {
			t.Parallel()
			api := &store{streams: streams, pods: []*corev1.Pod{pod("a", "1", "1"), pod("b", "2", "2"), pod("c", "3", "2")}}
			m := newMesh(t, api)
			m.policy(policytest.LimitTo("shard=1"))
			config := m.config("v1")
			client, err := kubernetes.NewForConfig(config)
			require.NoError(t, err)
			lw := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "pods", "", fields.Everything())
			informer := cache.NewSharedInformer(cache.ToListWatcherWithWatchListSemantics(lw, client), &corev1.Pod{}, 0)
			var mu sync.Mutex
			var errs []error
			require.NoError(t, informer.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}))
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() { defer close(stopped); informer.Run(stop) }()
			defer func() { close(stop); <-stopped }()
			holds := func(want ...string) {
				t.Helper()
				require.EventuallyWithT(t, func(c *assert.CollectT) {
					require.ElementsMatch(c, want, informer.GetStore().ListKeys())
				}, soon, 10*time.Millisecond)
			}
			holds("ns/a")
			require.Eventually(t, func() bool { return m.pod.env.Ledger.Watches() == 1 }, soon, time.Millisecond)
			time.Sleep(2 * time.Second) // client-go calls a shorter watch without an event an error

			m.policy(policytest.LimitTo("shard=2"))
			holds("ns/b", "ns/c")

			mu.Lock()
			defer mu.Unlock()
			require.Len(t, errs, 1)
			require.True(t, apierrors.IsResourceExpired(errs[0]), "%v", errs[0])
			api.mu.Lock()
			defer api.mu.Unlock()
			require.Equal(t, streams, !strings.Contains(strings.Join(api.requests, " "), "resourceVersion=0"), "lists, or does not")
		})
	}
}
