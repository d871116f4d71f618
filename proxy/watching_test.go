package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// chronicle is an apiserver that knows all that ever happened to its config maps: the n-th
// event has version n.
type chronicle struct {
	mu      sync.Mutex
	log     []happened
	changed chan struct{}
	// silent: no watch has anything but these events.
	silent bool
}

type happened struct {
	kind   apiwatch.EventType
	object metav1.PartialObjectMetadata
}

func newChronicle() *chronicle { return &chronicle{changed: make(chan struct{})} }

// happen has something happen to an object, of namespace own-0 unless it is named with
// another.
func (h *chronicle) happen(kind apiwatch.EventType, name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	o := object("own-0", name)
	if namespace, own, is := strings.Cut(name, "/"); is {
		o = object(namespace, own)
	}
	o.ResourceVersion = strconv.Itoa(len(h.log) + 1)
	h.log = append(h.log, happened{kind, o})
	close(h.changed)
	h.changed = make(chan struct{})
}

// now is what there is, and what happened; the channel is closed by what happens next.
func (h *chronicle) now() (state map[string]metav1.PartialObjectMetadata, log []happened, next <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	state = map[string]metav1.PartialObjectMetadata{}
	for _, e := range h.log {
		if state[e.object.Name] = e.object; e.kind == apiwatch.Deleted {
			delete(state, e.object.Name)
		}
	}
	return state, h.log, h.changed
}

// versions are of each object the one it has.
func (h *chronicle) versions() map[string]string {
	out := map[string]string{}
	state, _, _ := h.now()
	for name, o := range state {
		out[name] = o.ResourceVersion
	}
	return out
}

func (h *chronicle) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	media, as := negotiate(r.Header.Get("Accept"))
	w.Header().Set("Content-Type", media)
	q := r.URL.Query()
	state, log, _ := h.now()
	if q.Get("watch") == "" {
		objects := slices.Collect(maps.Values(state))
		_, _ = w.Write(wire(media, listOf(as, "", metav1.ListMeta{ResourceVersion: strconv.Itoa(len(log))}, objects)))
		return
	}
	send := func(kind apiwatch.EventType, o metav1.PartialObjectMetadata) {
		_, _ = w.Write(eventOf(media, kind, one(as, o)))
		w.(http.Flusher).Flush()
	}
	after, _ := strconv.Atoi(q.Get("resourceVersion"))
	if q.Get("sendInitialEvents") != "" {
		for _, o := range state {
			send(apiwatch.Added, o)
		}
		after = len(log)
		send(apiwatch.Bookmark, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(after), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	}
	w.(http.Flusher).Flush()
	end := time.After(3 * time.Second)
	for {
		_, log, next := h.now()
		for ; after < len(log); after++ {
			send(log[after].kind, log[after].object)
		}
		select {
		case <-next:
		case <-end:
			if !h.silent {
				return
			}
			end = nil
		case <-r.Context().Done():
			return
		}
	}
}

func ofWatches(f *meshv1.WatchFault) *meshv1.FaultRule {
	return &meshv1.FaultRule{Watch: f, Seed: new(int64(7)), Resources: []*meshv1.ResourceMatch{{
		ApiGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"watch"},
	}}}
}

const allConfigMaps = "/api/v1/configmaps"

// watching opens a watch and answers what it reads, an event at a time as "KIND name".
func (m *mesh) watching(c *http.Client, version string) (next func() string, end func()) {
	m.t.Helper()
	ctx, cancel := context.WithCancel(m.t.Context())
	resp, err := c.Do(asking(m.t, ctx, "GET", allConfigMaps+"?watch=true&resourceVersion="+version))
	require.NoError(m.t, err)
	require.Equal(m.t, 200, resp.StatusCode)
	d := json.NewDecoder(resp.Body)
	return func() string {
			var e struct {
				Type   string
				Object metav1.PartialObjectMetadata
			}
			switch err := d.Decode(&e); {
			case err == io.EOF:
				return "end"
			case err != nil:
				return "cut"
			}
			return e.Type + " " + e.Object.Name
		}, func() {
			cancel()
			_ = resp.Body.Close()
		}
}

const never = int64(time.Hour)

// From Kubernetes 1.37 the apiserver compresses watches with initial events if the client accepts
// that.
func TestWatchesThatAreReadAreNotCompressed(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		rule *meshv1.FaultRule
		want string
	}{
		"faults are injected":   {ofWatches(&meshv1.WatchFault{Drop: &meshv1.WatchFault_Drop{Percent: 100, MadeUpAfterNs: never}}), ""},
		"versions are recorded": {staleLists(time.Hour), ""},
		"of another resource":   {&meshv1.FaultRule{Resources: []*meshv1.ResourceMatch{{Resources: []string{"secrets"}}}, StaleList: &meshv1.StaleList{AgeNs: never, Percent: 100}}, "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Type", jsonType) }}
			m := newMesh(t, api)
			m.faults(test.rule)
			a := m.do("GET", configMaps+"?watch=true", "", "Accept-Encoding", "gzip")
			require.Equal(t, 200, a.StatusCode)
			require.Equal(t, test.want, api.last(t).Header.Get("Accept-Encoding"))
		})
	}
}

// The time until a pod takes what its watches bring is counted: informers that lag are seen.
func TestWatchesThatAreReadLateAreCounted(t *testing.T) {
	t.Parallel()
	const lag = 300 * time.Millisecond
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", jsonType)
		_, _ = io.WriteString(w, strings.Repeat("x", 32<<20)) // more than all buffers together
	}}
	m := newMesh(t, api)
	m.policy(policytest.LimitTo("shard=a"))
	resp, err := m.client(true).Do(asking(t, t.Context(), "GET", "/api/v1/secrets?watch=true"))
	require.NoError(t, err)
	defer resp.Body.Close()
	time.Sleep(lag) // the time itself is what is counted
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	waited, _ := m.tally("ctrlmesh_watch_delivery_seconds_total", "resource", "secrets")
	require.Greater(t, waited, lag.Seconds()/2)
}

// dropping is traffic in which all events are dropped but those of namespace free.
func dropping() *meshv1.Traffic {
	r := ofWatches(&meshv1.WatchFault{Drop: &meshv1.WatchFault_Drop{Percent: 100, MadeUpAfterNs: never}})
	return injecting(r)
}

func injecting(r *meshv1.FaultRule) *meshv1.Traffic {
	r.Name, r.Key = "r", "k"
	return &meshv1.Traffic{NoFaults: []string{"free"}, Injections: []*meshv1.Injection{{Name: "chaos", Rules: []*meshv1.FaultRule{r}}}}
}

// sharded puts a policy in force that divides, and injects.
func (m *mesh) sharded(s *meshv1.Sharding, of *meshv1.Traffic) {
	m.t.Helper()
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Sharding: s, Traffic: of})
}

// code is that of a watch which resumes.
func (m *mesh) code(c *http.Client, version string) int {
	m.t.Helper()
	ctx, cancel := context.WithCancel(m.t.Context())
	resp, err := c.Do(asking(m.t, ctx, "GET", allConfigMaps+"?watch=true&resourceVersion="+version))
	require.NoError(m.t, err)
	cancel()
	_ = resp.Body.Close()
	return resp.StatusCode
}

// withholds waits until something is kept from a client.
func (m *mesh) withholds() {
	m.t.Helper()
	require.Eventually(m.t, func() bool { return m.pod.budgets.Filtered.Taken() > 0 }, soon, time.Millisecond)
}

func TestClientWithGapMustList(t *testing.T) {
	t.Parallel()
	protocols(t, func(t *testing.T, http2 bool) {
		api := newChronicle()
		m := newMesh(t, api)
		m.traffic(dropping())
		m.settle()
		c := m.client(http2)
		require.Equal(t, 200, m.code(c, "1"))
		for i := range 3 { // as often as it likes
			next, end := m.watching(c, "0")
			for range 3 {
				api.happen(apiwatch.Modified, "a")
				api.happen(apiwatch.Modified, "free/b")
			}
			for range 3 * (i + 1) { // with those before
				require.Equal(t, "MODIFIED b", next())
			}
			version := api.versions()["b"]
			// Also while the proxy does not know yet that the client has gone.
			require.Equal(t, 410, m.code(c, version))
			end()
			require.Eventually(t, func() bool { return m.pod.budgets.Filtered.Taken() == 0 }, soon, time.Millisecond)
			require.Equal(t, 410, m.code(c, version), "and again, if it lost the answer")
			require.Equal(t, 200, m.code(c, "1000"), "one who has read more since")
			require.Eventually(t, func() bool { return m.gaps() == 1 }, soon, time.Millisecond, "of however many watches")
		}
		version := api.versions()["b"]
		require.Equal(t, 200, m.do("GET", allConfigMaps, "").StatusCode)
		require.Equal(t, 200, m.code(c, version), "it has listed")
	})
}

// Nobody knows what the proxy before kept from its clients when it ended.
func TestCachesDoubtfulAfterTakeoverMustList(t *testing.T) {
	t.Parallel()
	for _, keep := range []bool{false, true} {
		for name, c := range map[string]struct {
			traffic *meshv1.Traffic
			code    int
		}{
			"drop":  {dropping(), 410},
			"delay": {injecting(ofWatches(&meshv1.WatchFault{Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: never}})), 200},
			"none":  {nil, 200},
		} {
			t.Run(fmt.Sprint(name, " ", keep), func(t *testing.T) {
				m := newMesh(t, &recorder{})
				policy := &meshv1.PodPolicy{Uid: "uid-1", Version: "v", Traffic: c.traffic, Sharding: &meshv1.Sharding{Shard: "s", KeepCaches: keep}}
				require.NoError(t, m.pod.Restore(policy, time.Time{}))
				m.sharded(policy.Sharding, nil) // the rule has just been removed
				client := m.client(true)
				require.Equal(t, 200, m.resume(client, "/api/v1/pods", "5"), "no rule is about these")
				resumed := m.with(client, "GET", allConfigMaps+"?watch=true&resourceVersion=5", "")
				require.Equal(t, c.code, resumed.StatusCode)
				require.Equal(t, c.code == 410, strings.Contains(resumed.body, "faults may have kept events of configmaps"), resumed.body)
				require.Equal(t, 200, m.with(client, "GET", allConfigMaps, "").StatusCode)
				require.Equal(t, 200, m.resume(client, allConfigMaps, "5"))
			})
		}
	}
}

// What was held back under a policy is not sent under another that divides otherwise.
func TestDelayedEventsAreDroppedAfterScopeChange(t *testing.T) {
	t.Parallel()
	late := func() *meshv1.Traffic {
		return injecting(ofWatches(&meshv1.WatchFault{Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: never}}))
	}
	for name, c := range map[string]struct {
		keep    bool
		traffic *meshv1.Traffic
		after   *meshv1.Traffic
		code    int
	}{
		"delayed":               {false, late(), late(), 410},
		"delayed, and then not": {false, late(), nil, 410},
		"delayed, caches kept":  {true, late(), late(), 200},
		"dropped":               {false, dropping(), dropping(), 410},
		"dropped, and then not": {false, dropping(), nil, 410},
		"dropped, caches kept":  {true, dropping(), dropping(), 410},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := newChronicle()
			api.silent = true
			m := newMesh(t, api)
			shard := func(namespaces ...string) *meshv1.Sharding {
				s := policytest.Divided(sharding.Keys(namespaces...), meshv1.Method_METHOD_FILTER)
				s.KeepCaches = c.keep
				return s
			}
			m.sharded(shard("own-0", "free"), c.traffic)
			m.settle()
			client := m.client(true)
			next, end := m.watching(client, "0")
			defer end()
			if c.traffic.GetInjections()[0].GetRules()[0].GetWatch().GetDrop() == nil {
				api.happen(apiwatch.Added, "free/b")
				api.happen(apiwatch.Added, "a")
			} else {
				api.happen(apiwatch.Added, "a")
				api.happen(apiwatch.Added, "free/b")
			}
			require.Equal(t, "ADDED b", next())
			m.withholds()
			m.sharded(shard("free"), c.after)
			require.Equal(t, "end", next())
			require.Eventually(t, func() bool { return m.pod.budgets.Filtered.Taken() == 0 }, soon, time.Millisecond)
			require.Equal(t, c.code, m.code(client, api.versions()["b"]))
		})
	}
}

// Faults are let at what filtering leaves of a watch.
func TestFaultsOfFilteredWatches(t *testing.T) {
	t.Parallel()
	api := newChronicle()
	m := newMesh(t, api)
	m.sharded(policytest.Divided(sharding.Keys("own-0", "free"), meshv1.Method_METHOD_FILTER),
		injecting(ofWatches(&meshv1.WatchFault{Duplicate: &meshv1.WatchFault_Duplicate{Percent: 100}})))
	next, end := m.watching(m.client(true), "0")
	defer end()
	for _, name := range []string{"a", "others/b", "free/c", "d"} {
		api.happen(apiwatch.Added, name)
	}
	for _, want := range []string{"a", "a", "c", "d", "d"} {
		require.Equal(t, "ADDED "+want, next())
	}
	require.Equal(t, 2, m.injected()["watch_duplicate"])
}

// The watch of the lock has faults by rules that name it only.
func TestFaultsOfLockWatchNeedItsName(t *testing.T) {
	t.Parallel()
	for want, names := range map[int][]string{1: nil, 2: {"leases"}} {
		m := newMesh(t, &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json;stream=watch")
			_, _ = io.WriteString(w, `{"type":"ADDED","object":{"kind":"Lease","metadata":{"namespace":"leases","name":"leases---s1","resourceVersion":"5"}}}`+"\n")
		}})
		m.sharded(policytest.Locked("s1"), injecting(&meshv1.FaultRule{
			Watch:     &meshv1.WatchFault{Duplicate: &meshv1.WatchFault_Duplicate{Percent: 100}},
			Resources: []*meshv1.ResourceMatch{{ApiGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"watch"}, Names: names}},
		}))
		a := m.do("GET", "/apis/coordination.k8s.io/v1/namespaces/leases/leases?fieldSelector=metadata.name%3Dleases&watch=1", "")
		require.Equal(t, want, strings.Count(a.body, `"name":"leases"`), a.body)
		require.NotContains(t, a.body, "---")
	}
}

func TestFaultsOfOpenWatchesExpire(t *testing.T) {
	t.Parallel()
	api := newChronicle()
	api.silent = true
	m := newMesh(t, api)
	of := dropping()
	m.traffic(of)
	next, end := m.watching(m.client(true), "0")
	defer end()
	api.happen(apiwatch.Added, "a")
	m.withholds()
	of.Injections[0].Expires = time.Now().Add(2 * time.Second).Unix()
	m.traffic(of)
	require.Equal(t, "ADDED a", next())
	require.False(t, time.Now().Before(time.Unix(of.Injections[0].Expires, 0)))
	api.happen(apiwatch.Modified, "a")
	require.Equal(t, "MODIFIED a", next(), "the watch goes on")
}

// What a policy without the rule flushes, and what a policy with it leaves alone.
func TestPolicyChangeEndsFaultsOfWatches(t *testing.T) {
	t.Parallel()
	api := newChronicle()
	m := newMesh(t, api)
	rule := func() *meshv1.FaultRule {
		return ofWatches(&meshv1.WatchFault{Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: int64(time.Hour)}})
	}
	m.faults(rule())
	next, end := m.watching(m.client(true), "0")
	defer end()
	api.happen(apiwatch.Added, "a")
	require.Eventually(t, func() bool { return m.pod.budgets.Filtered.Taken() > 0 }, soon, time.Millisecond)
	m.faults(rule())
	time.Sleep(50 * time.Millisecond)
	require.NotZero(t, m.pod.budgets.Filtered.Taken(), "the rule is still there")
	m.faults()
	require.Equal(t, "ADDED a", next())
	api.happen(apiwatch.Modified, "a")
	require.Equal(t, "MODIFIED a", next(), "the watch goes on")
	require.Zero(t, m.pod.budgets.Filtered.Taken())
}

// When two injections inject faults into a watch, each ends by itself.
func TestOneOfTwoInjectionsEnds(t *testing.T) {
	t.Parallel()
	rule := func(name string, f *meshv1.WatchFault) *meshv1.Injection {
		r := ofWatches(f)
		r.Name, r.Key = name, name
		return &meshv1.Injection{Name: name, Rules: []*meshv1.FaultRule{r}}
	}
	late := func(ns int64) *meshv1.WatchFault {
		return &meshv1.WatchFault{Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: ns}}
	}
	drop := &meshv1.WatchFault{Drop: &meshv1.WatchFault_Drop{Percent: 100, MadeUpAfterNs: never}}
	stall := &meshv1.WatchFault{Stall: &meshv1.WatchFault_Stall{Percent: 100}}
	for _, c := range []struct {
		what         string
		ends, stays  *meshv1.WatchFault
		first, later []string // what is read when one has ended, and of an event then
	}{
		{
			"what was dropped is made up for", drop, &meshv1.WatchFault{Duplicate: &meshv1.WatchFault_Duplicate{Percent: 100}},
			[]string{"ADDED a"}, []string{"MODIFIED a", "MODIFIED a"},
		},
		{"what was delayed comes at once", late(never), late(1), []string{"ADDED a"}, []string{"MODIFIED a"}},
		{"what is dropped yet is not made up for", late(never), drop, nil, nil},
		{"a stall that is over ends the watch", stall, late(1), []string{"end"}, nil},
	} {
		for _, expires := range []bool{false, true} {
			t.Run(fmt.Sprint(c.what, ", expired: ", expires), func(t *testing.T) {
				t.Parallel()
				api := newChronicle()
				api.silent = true
				m := newMesh(t, api)
				ends, stays := rule("ends", c.ends), rule("stays", c.stays)
				both := &meshv1.Traffic{Injections: []*meshv1.Injection{ends, stays}}
				m.traffic(both)
				next, end := m.watching(m.client(true), "0")
				defer end()
				api.happen(apiwatch.Added, "a")
				if c.ends == stall {
					require.Eventually(t, func() bool { return m.injected()["watch_stall"] == 1 }, soon, time.Millisecond)
				} else {
					m.withholds()
				}
				if expires {
					ends.Expires = time.Now().Add(2 * time.Second).Unix()
					m.traffic(both)
				} else {
					m.traffic(&meshv1.Traffic{Injections: []*meshv1.Injection{stays}})
				}
				for _, want := range c.first {
					require.Equal(t, want, next())
				}
				if c.later != nil {
					api.happen(apiwatch.Modified, "a")
				}
				for _, want := range c.later {
					require.Equal(t, want, next())
				}
				if c.first == nil {
					require.Eventually(t, func() bool {
						return m.pod.env.Rules.Faults.States()[len(m.pod.env.Rules.Faults.States())-1].Injected == 1 && m.injected()["watch_drop"] == 1
					},
						soon, time.Millisecond)
					require.NotZero(t, m.pod.budgets.Filtered.Taken())
				}
			})
		}
	}
}

// A namespace that forbids faults is left alone from then on.
func TestForbiddingFaultsEndsThemInOpenWatches(t *testing.T) {
	t.Parallel()
	api := newChronicle()
	api.silent = true
	m := newMesh(t, api)
	of := injecting(ofWatches(&meshv1.WatchFault{Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: never}}))
	m.traffic(of)
	next, end := m.watching(m.client(true), "0")
	defer end()
	of.NoFaults = []string{"free", "own-0"}
	m.traffic(of)
	require.Eventually(t, func() bool {
		api.happen(apiwatch.Added, "a")
		return m.pod.budgets.Filtered.Taken() == 0
	}, soon, 10*time.Millisecond)
	require.Equal(t, "ADDED a", next())
}

func TestDrainingFlushesDelayedEvents(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]*meshv1.WatchFault{
		"delayed": {Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: never}},
		"dropped": {Drop: &meshv1.WatchFault_Drop{Percent: 100, MadeUpAfterNs: never}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := newChronicle()
			api.silent = true
			m := newMesh(t, api)
			m.traffic(injecting(ofWatches(f)))
			c := m.client(false)
			next, end := m.watching(c, "0")
			defer end()
			want := map[string]bool{}
			for i := range 20 {
				api.happen(apiwatch.Added, fmt.Sprint("o", i))
				want[fmt.Sprint("ADDED o", i)] = true
			}
			m.withholds()
			drained := make(chan error, 1)
			go func() { drained <- m.pod.Drain(t.Context()) }()
			got := map[string]bool{}
			for range want {
				got[next()] = true
			}
			require.Equal(t, want, got)
			api.happen(apiwatch.Added, "another")
			require.Equal(t, "ADDED another", next(), "nothing is held back any more")
			require.Equal(t, "end", next())
			c.CloseIdleConnections()
			require.NoError(t, <-drained)
		})
	}
}

func TestCutWatchHasNoCleanEnd(t *testing.T) {
	t.Parallel()
	protocols(t, func(t *testing.T, http2 bool) {
		m := newMesh(t, newChronicle())
		m.faults(ofWatches(&meshv1.WatchFault{Cut: &meshv1.WatchFault_Cut{Percent: 100, AfterNs: int64(10 * time.Millisecond)}}))
		next, end := m.watching(m.client(http2), "0")
		defer end()
		require.Equal(t, "cut", next())
	})
}

func TestUnreadableWatchPassesUnchanged(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/cbor-seq")
		_, _ = io.WriteString(w, "whatever")
	}})
	m.faults(ofWatches(&meshv1.WatchFault{Cut: &meshv1.WatchFault_Cut{Percent: 100}}))
	a := m.do("GET", allConfigMaps+"?watch=true&resourceVersion=0", "")
	require.Equal(t, 200, a.StatusCode)
	require.Equal(t, "whatever", a.body)
	require.Eventually(t, func() bool {
		return strings.Contains(m.logs.String(), `"fault_skipped":"content type cannot be filtered`)
	}, soon, time.Millisecond)
}

// An informer comes to the truth whatever is done to its watches, once it is over.
func TestInformersRecover(t *testing.T) {
	t.Parallel()
	const ms = int64(time.Millisecond)
	for name, f := range map[string]*meshv1.WatchFault{
		"gone":      {Gone: &meshv1.WatchFault_Gone{Percent: 50, AfterNs: 300 * ms}},
		"cut":       {Cut: &meshv1.WatchFault_Cut{Percent: 70, AfterNs: 300 * ms}},
		"stall":     {Stall: &meshv1.WatchFault_Stall{Percent: 100, AfterNs: 100 * ms, LastsNs: 300 * ms}},
		"no end":    {Stall: &meshv1.WatchFault_Stall{Percent: 100, AfterNs: 100 * ms}},
		"delay":     {Delay: &meshv1.WatchFault_Late{Percent: 30, ByNs: 50 * ms}},
		"duplicate": {Duplicate: &meshv1.WatchFault_Duplicate{Percent: 50}},
		"drop":      {Drop: &meshv1.WatchFault_Drop{Percent: 50, MadeUpAfterNs: 200 * ms}},
		"drop long": {Drop: &meshv1.WatchFault_Drop{Percent: 50, MadeUpAfterNs: 3600 * 1000 * ms}, Cut: &meshv1.WatchFault_Cut{Percent: 50, AfterNs: 500 * ms}},
		"all": {
			Cut:       &meshv1.WatchFault_Cut{Percent: 50, AfterNs: 700 * ms},
			Stall:     &meshv1.WatchFault_Stall{Percent: 50, AfterNs: 100 * ms, LastsNs: 300 * ms},
			Delay:     &meshv1.WatchFault_Late{Percent: 30, ByNs: 50 * ms},
			Duplicate: &meshv1.WatchFault_Duplicate{Percent: 30},
			Drop:      &meshv1.WatchFault_Drop{Percent: 30, MadeUpAfterNs: 200 * ms},
		},
	} {
		for _, media := range []string{jsonType, protoType} {
			t.Run(name+" "+media, func(t *testing.T) {
				t.Parallel()
				api := newChronicle()
				m := newMesh(t, api)
				m.faults(ofWatches(f))
				config := m.config("v1")
				config.ContentType, config.AcceptContentTypes = media, media
				client, err := kubernetes.NewForConfig(config)
				require.NoError(t, err)
				api.happen(apiwatch.Added, "first")
				factory := informers.NewSharedInformerFactory(client, 0)
				store := factory.Core().V1().ConfigMaps().Informer().GetStore()
				stop := make(chan struct{})
				factory.Start(stop)
				defer factory.Shutdown()
				defer close(stop)
				cached := func() map[string]string {
					out := map[string]string{}
					for _, o := range store.List() {
						c := o.(*corev1.ConfigMap)
						out[c.Name] = c.ResourceVersion
					}
					return out
				}
				for i := range 150 {
					name := fmt.Sprint("o", i%7)
					kind := apiwatch.Added
					if _, is := api.versions()[name]; is {
						kind = []apiwatch.EventType{apiwatch.Modified, apiwatch.Deleted}[i%2]
					}
					api.happen(kind, name)
					time.Sleep(15 * time.Millisecond)
				}
				m.faults()
				require.Eventually(t, func() bool { return maps.Equal(api.versions(), cached()) }, 40*time.Second, 20*time.Millisecond,
					"the informer never came to the truth")
				require.Eventually(t, func() bool { return m.pod.budgets.Filtered.Taken() == 0 }, soon, time.Millisecond)
			})
		}
	}
}

func TestFaultyWatchesReleaseEverything(t *testing.T) {
	m := newMesh(t, newChronicle())
	c := m.client(true)
	m.faults()
	_, end := m.watching(c, "0")
	end()
	require.Eventually(t, func() bool { return m.pod.env.Ledger.Watches() == 0 }, soon, time.Millisecond)
	before := runtime.NumGoroutine()
	m.faults(ofWatches(&meshv1.WatchFault{
		Drop:  &meshv1.WatchFault_Drop{Percent: 50, MadeUpAfterNs: int64(time.Hour)},
		Stall: &meshv1.WatchFault_Stall{Percent: 50},
	}))
	var ends []func()
	for range 20 {
		_, end := m.watching(c, "0")
		ends = append(ends, end)
	}
	for _, end := range ends {
		end()
	}
	require.Eventually(t, func() bool {
		return runtime.NumGoroutine() <= before+2 && m.pod.env.Ledger.Watches() == 0 && m.gaps() == 0
	}, soon, 10*time.Millisecond)
}

// gaps returns how many gaps are remembered.
func (m *mesh) gaps() int {
	_, gaps := m.pod.env.Ledger.Remembered()
	return gaps
}

// A fault of a watch is counted when it is done, and is not spent before.
func TestUnusedWatchFaultsAreNotCounted(t *testing.T) {
	t.Parallel()
	const ms = int64(time.Millisecond)
	cut := func(after int64) *meshv1.FaultRule {
		r := ofWatches(&meshv1.WatchFault{Cut: &meshv1.WatchFault_Cut{Percent: 100, AfterNs: after}})
		r.Count = 1
		return r
	}
	var api http.Handler = newChronicle()
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { api.ServeHTTP(w, r) }))
	c := m.client(true)
	spent := func(of uint64, why string) {
		t.Helper()
		require.Eventually(t, func() bool { return m.pod.env.Rules.Faults.States()[0].Injected == of }, soon, time.Millisecond, why)
	}
	m.faults(cut(never))
	for range 2 {
		_, end := m.watching(c, "0")
		spent(1, "it may happen yet")
		end()
		spent(0, "the client left")
	}
	for why, answer := range map[string]http.HandlerFunc{
		"it was refused":     func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) },
		"it is encoded":      func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Encoding", "br") },
		"it cannot be read":  func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Type", "application/cbor-seq") },
		"it ended by itself": func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Type", jsonType) },
	} {
		api = answer
		m.with(c, "GET", allConfigMaps+"?watch=true&resourceVersion=0", "")
		spent(0, why)
	}
	require.Empty(t, m.injected())

	api = newChronicle()
	m.faults(cut(ms))
	next, end := m.watching(c, "0")
	require.Equal(t, "cut", next())
	end()
	spent(1, "it happened")
	require.Eventually(t, func() bool { return m.injected()["watch_cut"] == 1 }, soon, time.Millisecond)
	m.faults(ofWatches(&meshv1.WatchFault{Stall: &meshv1.WatchFault_Stall{Percent: 100, AfterNs: ms}}))
	_, end = m.watching(c, "0")
	defer end()
	require.Eventually(t, func() bool { return m.injected()["watch_stall"] == 1 }, soon, time.Millisecond, "before the watch is over")
}

func TestMethodsOfFaultyWatchesAreReported(t *testing.T) {
	t.Parallel()
	for sharded, want := range map[bool]string{true: "ServerSide", false: "Filter"} {
		m := newMesh(t, newFakeAPI(sharded, twenty()...))
		m.sharded(policytest.Divided(sharding.Keys("ns-1", "ns-2"), meshv1.Method_METHOD_AUTO),
			injecting(&meshv1.FaultRule{Watch: &meshv1.WatchFault{Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: 1}}}))
		m.watched(m.client(true), "/api/v1/pods?watch=1&sendInitialEvents=true", jsonType)
		require.Eventually(t, func() bool { return m.pod.Methods()["pods"] == want }, soon, time.Millisecond, "%v", want)
		require.NotZero(t, m.injected()["watch_delay"])
	}
}
