package proxy

import (
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
)

const (
	allPods     = "/api/v1/pods"
	allServices = "/api/v1/services"
	fromFive    = "?watch=1&resourceVersion=5"
	fromTen     = "?watch=1&resourceVersion=10"
)

// dividing divides pods, services and events by namespace.
func dividing(namespaces ...string) *meshv1.Sharding {
	return &meshv1.Sharding{Shard: "s1", ReadAll: true, Limits: []*meshv1.Limit{{
		Scope:     sharding.Keys(namespaces...).Proto(),
		Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods", "services", "events", "nodes"}}},
	}}}
}

// gaining is a pod whose policies change.
type gaining struct {
	*mesh
	c     *http.Client
	ended []<-chan error
	// bookmark ends the initial events of a watch.
	bookmark chan struct{}
}

func newGaining(t *testing.T, first *meshv1.Sharding) *gaining {
	g := &gaining{bookmark: make(chan struct{})}
	g.mesh = newMesh(t, http.HandlerFunc(g.serve))
	g.restore(first, time.Time{})
	g.c = g.client(true)
	t.Cleanup(func() { _ = g.pod.Shutdown(t.Context()) })
	return g
}

func (g *gaining) serve(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	q := r.URL.Query()
	if q.Get("watch") == "" {
		_, _ = io.WriteString(w, `{"kind":"List","apiVersion":"v1","metadata":{"uid":"old","resourceVersion":"10"},"items":[]}`)
		return
	}
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	if q.Get("sendInitialEvents") != "" {
		select {
		case <-g.bookmark:
			_, _ = io.WriteString(w, `{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"10","annotations":{"`+metav1.InitialEventsAnnotationKey+`":"true"}}}}`+"\n")
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
		}
	}
	<-r.Context().Done()
}

func (g *gaining) watch(target string) {
	g.t.Helper()
	g.ended = append(g.ended, g.open(g.c, target))
}

// change puts a policy in force, and awaits that the watches ended.
func (g *gaining) change(to *meshv1.Sharding) {
	g.t.Helper()
	g.policy(to)
	g.awaitEnds()
}

// changeMembers is change of a policy that knows member clusters.
func (g *gaining) changeMembers(to *meshv1.Sharding) {
	g.t.Helper()
	g.set(policytest.ThroughClusters(to, nil))
	g.awaitEnds()
}

func (g *gaining) awaitEnds() {
	g.t.Helper()
	for _, end := range g.ended {
		require.NoError(g.t, <-end)
	}
	g.ended = nil
}

// relist tries to resume, and fills the cache: the apiserver has no exact versions.
func (g *gaining) relist(path string) {
	g.t.Helper()
	g.requireCode(410, "GET", path+fromFive)
	g.fill(path)
}

// fill lists, and watches from there.
func (g *gaining) fill(path string) {
	g.t.Helper()
	require.Equal(g.t, 200, g.with(g.c, "GET", path, "").StatusCode)
	g.watch(path + fromTen)
}

func (g *gaining) passTime(by time.Duration) { g.pod.env.Ledger.Age(by) }

func (g *gaining) requireCode(want int, method, target string) {
	g.t.Helper()
	a := g.with(g.c, method, target, "{}")
	require.Equal(g.t, want, a.StatusCode, "%s %s: %s", method, target, a.body)
	if want == http.StatusConflict {
		said := statusOf(g.t, a)
		require.Equal(g.t, metav1.StatusReasonConflict, said.Reason)
		require.Contains(g.t, said.Message, "ShardingConfig ns/s1")
		require.Empty(g.t, a.Header.Get("Retry-After"), "the client must not repeat it")
	}
}

const (
	gained   = "/api/v1/namespaces/b/pods/x"
	ownedAll = "/api/v1/namespaces/a/pods/x"
)

func TestWritesOfGainedObjectsAwaitCaches(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	g.watch(allPods + fromFive)
	g.watch(allServices + fromFive)
	g.requireCode(403, "PUT", gained)
	g.change(dividing("a", "b"))

	for _, r := range []struct {
		want           int
		method, target string
	}{
		{409, "PUT", gained},
		{409, "PATCH", gained + "/status"},
		{409, "DELETE", gained},
		{409, "POST", "/api/v1/namespaces/b/services"},
		{409, "DELETE", "/api/v1/namespaces/b/services"},
		{200, "GET", gained},
		{200, "POST", "/api/v1/namespaces/b/events"},     // no decision, and sent once only
		{200, "POST", "/api/v1/namespaces/b/configmaps"}, // not divided
		{200, "PUT", ownedAll},
	} {
		g.requireCode(r.want, r.method, r.target)
	}
	g.relist(allPods)
	g.requireCode(409, "PUT", gained)
	g.requireCode(410, "GET", allServices+fromFive)
	g.requireCode(409, "PUT", gained)
	g.fill(allServices)
	g.requireCode(409, "PUT", gained) // by a decision from before
	g.passTime(relist.Deciding)
	g.requireCode(200, "PUT", gained)
}

func TestCatchUpEndsWithoutWatchesThatNobodyOpensAgain(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	g.watch(allPods + fromFive)
	g.change(dividing("a", "b"))
	const soonOver = 20 * time.Second
	g.passTime(relist.CatchUp - soonOver)
	g.requireCode(409, "PUT", gained)
	g.passTime(soonOver)
	g.requireCode(200, "PUT", gained)
}

func TestProgramWithoutCachesWritesAtOnce(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	g.change(dividing("a", "b"))
	g.requireCode(200, "PUT", gained)
}

func TestOnlyShardingRedivides(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	before := g.pod.env.Policy.Load()
	g.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Sharding: dividing("a"), Traffic: decided{limits: limitsOf("pods")}.traffic()})
	limited := g.pod.env.Policy.Load()
	require.NotSame(t, before, limited)
	require.False(t, before.Redivides(limited))
	g.change(dividing("a", "b"))
	require.True(t, limited.Redivides(g.pod.env.Policy.Load()))
}

func TestWaitForOneObjectDelaysNoWrite(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	g.watch(allPods + fromFive + "&fieldSelector=metadata.name%3Dx")
	g.change(dividing("a", "b"))
	g.requireCode(200, "PUT", gained)
}

func TestLossOfKeysDelaysNoWrite(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a", "b"))
	g.watch(allPods + fromFive)
	g.change(dividing("a"))
	g.requireCode(200, "PUT", ownedAll)
	g.requireCode(403, "PUT", gained)
}

// A cache whose watch an earlier change ended may not have listed yet.
func TestCacheBetweenTwoChangesIsAwaited(t *testing.T) {
	t.Parallel()
	for name, listed := range map[string]bool{"listed between": true, "listed neither time": false} {
		t.Run(name, func(t *testing.T) {
			g := newGaining(t, dividing("a", "c"))
			g.watch(allPods + fromFive)
			g.change(dividing("a"))
			if listed {
				g.requireCode(200, "GET", allPods)
			}
			g.change(dividing("a", "b"))
			g.requireCode(409, "PUT", gained)
			g.requireCode(410, "GET", allPods+fromTen)
			g.fill(allPods)
			g.passTime(relist.Deciding)
			g.requireCode(200, "PUT", gained)
		})
	}
}

// A cache that had no watch open, because its client was waiting to list, say.
func TestCacheWithoutWatchIsAwaitedWhenItComes(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	g.change(dividing("a", "b"))
	g.requireCode(410, "GET", allPods+fromFive)
	g.requireCode(409, "PUT", gained)
	g.fill(allPods)
	g.passTime(relist.Deciding)
	g.requireCode(200, "PUT", gained)
}

func TestCacheIsAwaitedUntilInitialEventsEnd(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	g.watch(allPods + fromFive)
	g.change(dividing("a", "b"))
	g.watch(allPods + "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true")
	g.passTime(relist.Deciding)
	g.requireCode(409, "PUT", gained)
	close(g.bookmark)
	require.Eventually(t, func() bool {
		g.passTime(relist.Deciding / 2)
		return g.with(g.c, "PUT", gained, "{}").StatusCode == 200
	}, soon, time.Millisecond)
}

func TestFirstKeysAfterStandbyAwaitCaches(t *testing.T) {
	t.Parallel()
	s := dividing()
	s.Standby = true
	g := newGaining(t, s)
	g.watch(allPods + fromFive)
	g.requireCode(503, "PUT", "/api/v1/nodes/x")
	g.change(dividing("a", "b"))
	g.requireCode(409, "PUT", ownedAll)
	g.requireCode(409, "PUT", "/api/v1/nodes/x")
	g.relist(allPods)
	g.passTime(relist.Deciding)
	g.requireCode(200, "PUT", ownedAll)
	g.requireCode(200, "PUT", "/api/v1/nodes/x")
}

func TestGainedUIDsAwaitCaches(t *testing.T) {
	t.Parallel()
	byUID := func(uids ...string) *meshv1.Sharding {
		s := dividing(uids...)
		s.Key = meshv1.Key_KEY_OBJECT
		return s
	}
	const create = "/api/v1/namespaces/b/pods"
	for _, c := range []struct {
		name             string
		before, after    *meshv1.Sharding
		updated, created int
	}{
		{"gained", byUID("other"), byUID("other", "old"), 409, 409},
		{"gained another", byUID("old"), byUID("other", "old"), 200, 409},
		{"lost", byUID("other", "old"), byUID("old"), 200, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGaining(t, c.before)
			g.watch(allPods + fromFive)
			g.change(c.after)
			g.requireCode(c.updated, "PUT", gained)
			g.requireCode(c.created, "POST", create)
			g.relist(allPods)
			g.passTime(relist.Deciding)
			g.requireCode(200, "PUT", gained)
			g.requireCode(200, "POST", create)
		})
	}
}

func TestAwaitedViewsAreBounded(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	g.pod.env.Ledger.Bounds.Awaited = 1
	g.watch(allPods + fromFive)
	g.watch(allServices + fromFive)
	g.change(dividing("a", "b"))
	g.requireCode(409, "PUT", gained)
	g.relist(allServices)
	g.relist(allPods)
	g.passTime(relist.Deciding)
	g.requireCode(200, "PUT", gained)
}

// It is unknown which caches were filled before the earlier proxy ended.
func TestCachesOfEarlierProxyAreAwaited(t *testing.T) {
	t.Parallel()
	m := newGaining(t, dividing("a"))
	m.requireCode(200, "PUT", ownedAll)

	g := &gaining{mesh: newMesh(t, watches())}
	g.restore(dividing("a"), time.Now().Add(-time.Second))
	g.c = g.client(true)
	g.requireCode(409, "PUT", ownedAll)
	g.requireCode(200, "POST", "/api/v1/namespaces/a/configmaps")
	g.requireCode(403, "PUT", gained)
	g.passTime(relist.Resuming)
	g.requireCode(200, "PUT", ownedAll)
}
