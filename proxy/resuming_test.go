package proxy

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// follower is a simple client: it follows a watch, and resumes from the version that it read
// last.
type follower struct {
	*mesh
	c              *http.Client
	query, version string
	has            map[string]bool
}

const bookmarks = "&allowWatchBookmarks=true"

func newFollower(m *mesh, version, query string, has ...string) *follower {
	f := &follower{mesh: m, c: m.client(true), query: query, version: version, has: map[string]bool{}}
	for _, h := range has {
		f.has[h] = true
	}
	return f
}

// stream is an open watch. close ends it as a client does that goes away.
type stream struct {
	code  int
	body  io.Reader
	close func()
}

func (f *follower) open() stream {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	resp, err := f.c.Do(asking(f.t, ctx, "GET", allPods+"?watch=true&resourceVersion="+f.version+f.query))
	require.NoError(f.t, err)
	return stream{resp.StatusCode, resp.Body, cancel}
}

// follow reads events until the watch ends, a second at most.
func (f *follower) follow(s stream) {
	f.t.Helper()
	require.Equal(f.t, 200, s.code)
	time.AfterFunc(time.Second, s.close)
	for d := json.NewDecoder(s.body); ; {
		var e struct {
			Type   string
			Object corev1.Pod
		}
		if d.Decode(&e) != nil {
			return
		}
		f.version = e.Object.ResourceVersion
		switch key := e.Object.Namespace + "/" + e.Object.Name; e.Type {
		case "ADDED", "MODIFIED":
			f.has[key] = true
		case "DELETED":
			delete(f.has, key)
		}
	}
}

func (f *follower) requireHas(want ...string) {
	f.t.Helper()
	require.ElementsMatch(f.t, want, slices.Collect(maps.Keys(f.has)))
}

// requireLists requires that a watch which resumes gets 410.
func (f *follower) requireLists() {
	f.t.Helper()
	require.Equal(f.t, 410, f.open().code)
}

// newPods returns an apiserver with a pod in each of four namespaces, behind a wrapper.
func newPods(t *testing.T, wrap func(*versioned) http.Handler) (*versioned, *mesh) {
	api := newVersioned()
	for _, name := range []string{"a", "b", "c", "d"} {
		api.put(apiwatch.Added, name, "pod-"+name)
	}
	if wrap == nil {
		return api, newMesh(t, api)
	}
	return api, newMesh(t, wrap(api))
}

func (m *mesh) supplements() int {
	n, _ := m.tally("ctrlmesh_supplemented_watches_total")
	return int(n)
}

func (m *mesh) awaitSupplement() {
	m.t.Helper()
	require.Eventually(m.t, func() bool { return m.supplements() == 1 }, soon, time.Millisecond)
}

// later puts a policy in force while a watch is followed.
func (m *mesh) later(s *meshv1.Sharding) {
	time.AfterFunc(500*time.Millisecond, func() {
		_, _ = m.pod.Apply(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Sharding: s})
	})
}

func TestDeniedClientSeesNothingAfterAMove(t *testing.T) {
	t.Parallel()
	_, m := newPods(t, nil)
	denied := func(s *meshv1.Sharding) *meshv1.Sharding {
		s.DeniedUserAgents = []string{"Go-http*"}
		return s
	}
	m.restore(denied(dividing("a")), time.Time{})
	f := newFollower(m, "4", bookmarks)
	first := f.open()
	m.policy(denied(dividing("b")))
	f.follow(first)
	f.requireLists()
	f.requireHas()
}

// limiting limits lists as an apiserver does.
type limiting struct{ *versioned }

func (l limiting) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n, _ := strconv.Atoi(r.URL.Query().Get("limit"))
	l.rewrite(w, r, func(list *corev1.PodList) {
		if n > 0 && len(list.Items) > n {
			list.Items, list.Continue = list.Items[:n], "more"
		}
	})
}

// rewrite edits the lists of an apiserver.
func (s *versioned) rewrite(w http.ResponseWriter, r *http.Request, edit func(*corev1.PodList)) {
	if r.URL.Query().Get("watch") != "" {
		s.ServeHTTP(w, r)
		return
	}
	rec := httptest.NewRecorder()
	s.ServeHTTP(rec, r)
	var list corev1.PodList
	_ = json.Unmarshal(rec.Body.Bytes(), &list)
	edit(&list)
	w.Header().Set("Content-Type", jsonType)
	_, _ = w.Write(wire(jsonType, &list))
}

func TestLimitOfAWatchDoesNotLimitTheSupplement(t *testing.T) {
	t.Parallel()
	_, m := newPods(t, func(v *versioned) http.Handler { return limiting{v} })
	m.restore(dividing("a"), time.Time{})
	f := newFollower(m, "4", bookmarks+"&limit=1", "a/pod-a")
	first := f.open()
	m.policy(dividing("a", "b", "c", "d"))
	f.follow(first)
	f.follow(f.open())
	f.requireHas("a/pod-a", "b/pod-b", "c/pod-c", "d/pod-d")
}

func TestSupplementThatWasNotReadComesAgain(t *testing.T) {
	t.Parallel()
	_, m := newPods(t, nil)
	m.restore(dividing("a"), time.Time{})
	f := newFollower(m, "4", bookmarks, "a/pod-a")
	first := f.open()
	m.policy(dividing("a", "b"))
	f.follow(first)
	second := f.open()
	m.awaitSupplement()
	second.close()
	require.Eventually(t, func() bool { return m.pod.env.Ledger.Watches() == 0 }, soon, time.Millisecond)
	f.follow(f.open())
	f.requireHas("a/pod-a", "b/pod-b")
}

// Without bookmarks its version would go back to that of an old object.
func TestClientWithoutBookmarksLists(t *testing.T) {
	t.Parallel()
	_, m := newPods(t, nil)
	m.restore(dividing("a", "c"), time.Time{})
	f := newFollower(m, "4", "", "a/pod-a", "c/pod-c")
	first := f.open()
	m.policy(dividing("a", "b"))
	f.follow(first)
	f.requireLists()
}

// sorted serves watches from no version: they begin with the objects by their names.
type sorted struct{ *versioned }

func (l sorted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if v := q.Get("resourceVersion"); q.Get("watch") == "" || v != "" && v != "0" {
		l.versioned.ServeHTTP(w, r)
		return
	}
	l.mu.Lock()
	now := len(l.changes)
	pods := slices.SortedFunc(maps.Values(l.at(now)), func(a, b corev1.Pod) int { return cmp.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	l.mu.Unlock()
	w.Header().Set("Content-Type", jsonType)
	for _, p := range pods {
		_, _ = w.Write(eventOf(jsonType, apiwatch.Added, &p))
	}
	q.Set("resourceVersion", strconv.Itoa(now))
	r.URL.RawQuery = q.Encode()
	l.watch(w, r, jsonType)
}

func TestClientThatWatchedFromNoVersionLists(t *testing.T) {
	t.Parallel()
	api, m := newPods(t, func(v *versioned) http.Handler { return sorted{v} })
	api.put(apiwatch.Added, "a", "late")
	m.restore(dividing("a", "c"), time.Time{})
	f := newFollower(m, "", bookmarks)
	first := f.open()
	m.later(dividing("c"))
	f.follow(first)
	f.requireHas("a/late", "a/pod-a", "c/pod-c")
	require.Equal(t, "3", f.version)
	f.requireLists()
}

func TestFaultsHoldBackNoSupplement(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]*meshv1.WatchFault{
		"delay": {Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: never}},
		"drop":  {Drop: &meshv1.WatchFault_Drop{Percent: 100, MadeUpAfterNs: int64(time.Minute)}},
	} {
		t.Run(name, func(t *testing.T) {
			_, m := newPods(t, nil)
			m.restore(dividing("a"), time.Time{})
			k := newFollower(m, "4", bookmarks, "a/pod-a")
			first := k.open()
			rule := ofWatches(f)
			rule.Resources[0].Resources = []string{"pods"}
			m.sharded(dividing("a", "b"), injecting(rule))
			k.follow(first)
			k.follow(k.open())
			k.requireHas("a/pod-a", "b/pod-b")
		})
	}
}

// Events that are made up for come late, so that the cache is ahead of its version.
func TestClientWhoseEventsWereMadeUpLists(t *testing.T) {
	t.Parallel()
	api, m := newPods(t, nil)
	rule := ofWatches(&meshv1.WatchFault{Drop: &meshv1.WatchFault_Drop{Percent: 100, MadeUpAfterNs: int64(200 * time.Millisecond)}})
	rule.Resources[0].Resources = []string{"pods"}
	m.sharded(dividing("a", "free"), injecting(rule))
	m.settle()
	f := newFollower(m, "4", bookmarks, "a/pod-a")
	first := f.open()
	api.put(apiwatch.Added, "a", "x")
	api.put(apiwatch.Added, "free", "late")
	m.later(dividing("a"))
	f.follow(first)
	f.requireHas("a/pod-a", "a/x", "free/late")
	require.Equal(t, "5", f.version)
	f.requireLists()
}

func TestClientThatReadThroughATunnelLists(t *testing.T) {
	t.Parallel()
	api, m := newPods(t, nil)
	m.restore(dividing("a"), time.Time{})
	f := newFollower(m, "4", bookmarks, "a/pod-a")
	first := f.open()
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Passthrough: true})
	f.follow(first)
	f.c = m.client(true)
	api.put(apiwatch.Added, "d", "late")
	second := f.open()
	m.later(dividing("b"))
	f.follow(second)
	f.requireHas("a/pod-a", "d/late")
	f.c = m.client(true)
	f.requireLists()
}

func TestSupplementHoldsNoMemoryAfterItsEnd(t *testing.T) {
	t.Parallel()
	_, m := newPods(t, func(v *versioned) http.Handler { return fat{v} })
	m.restore(dividing("a"), time.Time{})
	f := newFollower(m, "4", bookmarks, "a/pod-a")
	first := f.open()
	m.policy(dividing("a", "b"))
	f.follow(first)
	second := f.open()
	defer second.close()
	go func() { _, _ = io.Copy(io.Discard, second.body) }()
	m.awaitSupplement()
	require.Eventually(t, func() bool { return m.pod.budgets.Filtered.Taken() == 0 }, soon, time.Millisecond)
}

func TestAbandonedSupplementHoldsNoMemory(t *testing.T) {
	t.Parallel()
	_, m := newPods(t, func(v *versioned) http.Handler { return fat{v} })
	m.restore(dividing("a"), time.Time{})
	f := newFollower(m, "4", bookmarks, "a/pod-a")
	first := f.open()
	m.policy(dividing("a", "b", "c", "d"))
	f.follow(first)
	second := f.open() // and does not read
	require.NotZero(t, m.pod.budgets.Filtered.Taken())
	second.close()
	require.Eventually(t, func() bool { return m.pod.budgets.Filtered.Taken() == 0 }, soon, time.Millisecond)
}

// fat lists large objects.
type fat struct{ *versioned }

func (l fat) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	l.rewrite(w, r, func(list *corev1.PodList) {
		for i := range list.Items {
			list.Items[i].Annotations = map[string]string{"x": strings.Repeat("x", 1<<20)}
		}
	})
}

// A deprecated path means a watch, whatever the query says.
func TestDeprecatedWatchPathsList(t *testing.T) {
	t.Parallel()
	_, m := newPods(t, nil)
	m.restore(dividing("a"), time.Time{})
	f := newFollower(m, "4", bookmarks, "a/pod-a")
	open := func() stream {
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := f.c.Do(asking(t, ctx, "GET", "/api/v1/watch/pods?watch=true&resourceVersion=4"+bookmarks))
		require.NoError(t, err)
		return stream{resp.StatusCode, resp.Body, cancel}
	}
	first := open()
	m.policy(dividing("a", "b"))
	f.follow(first)
	require.Equal(t, 410, open().code)
}
