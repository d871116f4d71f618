package proxy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
)

// versioned is an apiserver that remembers all versions of its pods.
type versioned struct {
	mu      sync.Mutex
	changes []change // that of version n+1 is at n
	changed chan struct{}
	lists   []url.Values // with the exact version: of the proxy
	refuse  func(exact url.Values) int
	// selects are the namespaces that any shardSelector selects; nil: it is not supported.
	selects []string
}

type change struct {
	kind apiwatch.EventType
	pod  corev1.Pod
}

func newVersioned() *versioned {
	return &versioned{changed: make(chan struct{}), refuse: func(url.Values) int { return 0 }}
}

// put makes a change of a pod, which may have labels.
func (s *versioned) put(kind apiwatch.EventType, namespace, name string, labels ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: name, UID: types.UID("uid-" + name), ResourceVersion: strconv.Itoa(len(s.changes) + 1),
	}}
	for _, l := range labels {
		p.Labels = map[string]string{l: ""}
	}
	s.changes = append(s.changes, change{kind, p})
	close(s.changed)
	s.changed = make(chan struct{})
}

// at returns the pods that exist at a version.
func (s *versioned) at(version int) map[string]corev1.Pod {
	out := map[string]corev1.Pod{}
	for _, c := range s.changes[:version] {
		if key := c.pod.Namespace + "/" + c.pod.Name; c.kind == apiwatch.Deleted {
			delete(out, key)
		} else {
			out[key] = c.pod
		}
	}
	return out
}

// in reports whether a request selects a pod.
func (s *versioned) in(r *http.Request, p *corev1.Pod) bool {
	if s.selects != nil && r.URL.Query().Get("shardSelector") != "" && !slices.Contains(s.selects, p.Namespace) {
		return false
	}
	selector, err := labels.Parse(r.URL.Query().Get("labelSelector"))
	_, namespace, namespaced := strings.Cut(r.URL.Path, "/namespaces/")
	namespace, _, _ = strings.Cut(namespace, "/")
	return err == nil && selector.Matches(labels.Set(p.Labels)) && (!namespaced || namespace == p.Namespace)
}

func (s *versioned) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	media, _ := negotiate(r.Header.Get("Accept"))
	w.Header().Set("Content-Type", media)
	q := r.URL.Query()
	switch {
	case q.Get("watch") != "" && q.Get("sendInitialEvents") != "":
		http.Error(w, "not supported", http.StatusUnprocessableEntity)
	case q.Get("watch") != "":
		s.watch(w, r, media)
	default:
		s.list(w, r, media)
	}
}

func (s *versioned) list(w http.ResponseWriter, r *http.Request, media string) {
	q := r.URL.Query()
	s.mu.Lock()
	defer s.mu.Unlock()
	version := len(s.changes)
	if exact := q.Get("resourceVersionMatch") == "Exact"; exact {
		if code := s.refuse(q); code != 0 {
			http.Error(w, "refused", code)
			return
		}
		version, _ = strconv.Atoi(q.Get("resourceVersion"))
		s.lists = append(s.lists, q)
	} else {
		s.lists = append(s.lists, nil)
	}
	list := &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(version)}}
	for _, p := range s.at(version) {
		if s.in(r, &p) {
			list.Items = append(list.Items, p)
		}
	}
	_, _ = w.Write(wire(media, list))
}

func (s *versioned) watch(w http.ResponseWriter, r *http.Request, media string) {
	next, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		s.mu.Lock()
		news, changed := s.changes[next:], s.changed
		s.mu.Unlock()
		for _, c := range news {
			if s.in(r, &c.pod) {
				_, _ = w.Write(eventOf(media, c.kind, &c.pod))
			}
		}
		next += len(news)
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// relisted returns how many lists clients sent, and the queries of those of the proxy.
func (s *versioned) relisted() (clients int, exact []url.Values) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.lists {
		if q == nil {
			clients++
		} else {
			exact = append(exact, q)
		}
	}
	return clients, exact
}

// informed is a pod with an informer of Pods.
type informed struct {
	*mesh
	api    *versioned
	store  cache.Store
	prefix string // of the paths of the informer's cluster
}

func newInformed(t *testing.T, first *meshv1.Sharding, namespace, media string) *informed {
	i := &informed{api: newVersioned()}
	for _, name := range []string{"a", "b", "c", "d"} {
		i.api.put(apiwatch.Added, name, "pod-"+name)
	}
	i.mesh = newMesh(t, i.api)
	i.restore(first, time.Time{})
	i.inform(namespace, media)
	return i
}

func (i *informed) inform(namespace, media string) {
	config := i.config("v1")
	config.ContentType = media
	config.Host += i.prefix
	client, err := kubernetes.NewForConfig(config)
	require.NoError(i.t, err)
	lw := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "pods", namespace, fields.Everything())
	informer := cache.NewSharedInformer(cache.ToListWatcherWithWatchListSemantics(lw, client), &corev1.Pod{}, 0)
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() { defer close(stopped); informer.Run(ctx.Done()) }()
	i.t.Cleanup(func() { cancel(); <-stopped })
	i.store = informer.GetStore()
	require.Eventually(i.t, func() bool { return informer.HasSynced() && i.watching() }, soon, time.Millisecond)
}

func (i *informed) watching() bool { return i.pod.env.Ledger.Watches() == 1 }

func (i *informed) requireHolds(want ...string) {
	i.t.Helper()
	require.EventuallyWithT(i.t, func(c *assert.CollectT) { assert.ElementsMatch(c, want, i.store.ListKeys()) }, soon, time.Millisecond)
}

func inStandby(s *meshv1.Sharding) *meshv1.Sharding {
	s.Standby = true
	return s
}

func byUID(s *meshv1.Sharding) *meshv1.Sharding {
	s.Key = meshv1.Key_KEY_OBJECT
	return s
}

func sharingIn(s *meshv1.Sharding, namespaces ...string) *meshv1.Sharding {
	s.Shared = []*meshv1.SharedObjects{{Resources: s.Limits[0].Resources, Namespaces: namespaces}}
	return s
}

func TestWatchResumesWithObjectsGainedAndLost(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name          string
		namespace     string // of the informer
		before, after *meshv1.Sharding
		had, has      []string
		ranges        bool // the proxy's list selects by hash
		none          bool // there is none
	}{
		{"moved", "", dividing("a", "b"), dividing("b", "c"), []string{"a/pod-a", "b/pod-b"}, []string{"b/pod-b", "c/pod-c"}, true, false},
		{"first keys", "", inStandby(dividing("a")), dividing("a", "c"), nil, []string{"a/pod-a", "c/pod-c"}, true, false},
		{"to standby", "", dividing("a", "c"), inStandby(dividing("a", "c")), []string{"a/pod-a", "c/pod-c"}, nil, true, false},
		{"first division", "", nil, dividing("a"), []string{"a/pod-a", "b/pod-b", "c/pod-c", "d/pod-d"}, []string{"a/pod-a"}, true, false},
		{"division removed", "", dividing("a"), nil, []string{"a/pod-a"}, []string{"a/pod-a", "b/pod-b", "c/pod-c", "d/pod-d"}, true, false},
		{"by uid", "", byUID(dividing("uid-pod-a")), byUID(dividing("uid-pod-b")), []string{"a/pod-a"}, []string{"b/pod-b"}, true, false},
		{"shared", "", sharingIn(dividing("a"), "b"), sharingIn(dividing("c"), "b"), []string{"a/pod-a", "b/pod-b"}, []string{"b/pod-b", "c/pod-c"}, true, false},
		{"shared since", "", dividing("a"), sharingIn(dividing("a"), "b"), []string{"a/pod-a"}, []string{"a/pod-a", "b/pod-b"}, false, false},
		{"namespace gained", "c", dividing("a"), dividing("a", "c"), nil, []string{"c/pod-c"}, false, false},
		{"namespace lost", "c", dividing("a", "c"), dividing("a"), []string{"c/pod-c"}, nil, false, false},
		{"namespace kept", "a", dividing("a", "b"), dividing("a", "c"), []string{"a/pod-a"}, []string{"a/pod-a"}, false, true},
	} {
		for _, media := range []string{jsonType, protoType} {
			t.Run(c.name+" "+media, func(t *testing.T) {
				t.Parallel()
				i := newInformed(t, c.before, c.namespace, media)
				i.requireHolds(c.had...)
				i.policy(c.after)
				if c.none {
					i.api.put(apiwatch.Deleted, "a", "pod-a")
					i.requireHolds()
					clients, exact := i.api.relisted()
					require.Equal(t, 1, clients)
					require.Empty(t, exact)
					return
				}
				require.Eventually(t, func() bool { _, exact := i.api.relisted(); return len(exact) == 1 }, soon, time.Millisecond)
				i.requireHolds(c.has...)
				clients, exact := i.api.relisted()
				require.Equal(t, 1, clients)
				require.Equal(t, c.ranges, exact[0].Get("shardSelector") != "", exact[0])
				require.Eventually(t, func() bool { n, _ := i.tally("ctrlmesh_supplemented_watches_total"); return n == 1 }, soon, time.Millisecond)
				require.Empty(t, exact[0].Get("watch")+exact[0].Get("timeoutSeconds")+exact[0].Get("allowWatchBookmarks"))

				for _, of := range []string{"a", "b", "c", "d"} { // the watch goes on
					i.api.put(apiwatch.Deleted, of, "pod-"+of)
				}
				i.requireHolds()
			})
		}
	}
}

// A pod that got its first keys while it ran has listed nothing since.
func TestSupplementShowsTheMethod(t *testing.T) {
	t.Parallel()
	for method, selects := range map[string][]string{"ServerSide": {"a", "c"}, "Filter": nil} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			i := newInformed(t, inStandby(dividing("a")), "", jsonType)
			i.api.mu.Lock()
			i.api.selects = selects
			i.api.mu.Unlock()
			i.policy(dividing("a", "c"))
			i.requireHolds("a/pod-a", "c/pod-c")
			require.Eventually(t, func() bool { return i.pod.Methods()["pods"] == method }, soon, time.Millisecond, "%v", i.pod.Methods())
			clients, _ := i.api.relisted()
			require.Equal(t, 1, clients)
		})
	}
}

func TestWritesAwaitTheSupplement(t *testing.T) {
	t.Parallel()
	i := newInformed(t, dividing("a"), "", jsonType)
	release := make(chan struct{})
	i.api.mu.Lock()
	i.api.refuse = func(url.Values) int { <-release; return 0 }
	i.api.mu.Unlock()
	i.policy(dividing("a", "b"))
	write := func() int { return i.with(i.client(true), "PUT", gained, "{}").StatusCode }
	require.Equal(t, 409, write())
	i.pod.env.Ledger.Age(relist.Deciding)
	require.Equal(t, 409, write())
	close(release)
	i.requireHolds("a/pod-a", "b/pod-b")
	require.Eventually(t, func() bool {
		i.pod.env.Ledger.Age(relist.Deciding / 2)
		return write() == 200
	}, soon, time.Millisecond)
}

// If the difference cannot be had, the client lists.
func TestClientListsWithoutSupplement(t *testing.T) {
	t.Parallel()
	label := func(s string) *meshv1.Sharding {
		return &meshv1.Sharding{Shard: "s", Limits: []*meshv1.Limit{{Selector: s, Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods"}}}}}}
	}
	refusing := func(code int) func(*informed) {
		return func(i *informed) { i.api.refuse = func(url.Values) int { return code } }
	}
	for _, c := range []struct {
		name          string
		before, after *meshv1.Sharding
		prepare       func(*informed)
		has           []string
	}{
		{"version is too old", dividing("a"), dividing("b"), refusing(410), []string{"b/pod-b"}},
		{"not permitted", dividing("a"), dividing("b"), refusing(403), []string{"b/pod-b"}},
		{"version is ignored", dividing("a"), dividing("b"), func(i *informed) {
			i.api.refuse = func(q url.Values) int { q.Set("resourceVersion", "1"); return 0 }
		}, []string{"b/pod-b"}},
		{"labels decide", label("x"), label("!x"), func(*informed) {}, []string{"a/pod-a", "b/pod-b", "c/pod-c", "d/pod-d"}},
		{"some clients are denied", dividing("a"), func() *meshv1.Sharding {
			s := dividing("b")
			s.DeniedUserAgents = []string{"other"}
			return s
		}(), func(*informed) {}, []string{"b/pod-b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			i := newInformed(t, c.before, "", jsonType)
			i.api.mu.Lock()
			c.prepare(i)
			i.api.mu.Unlock()
			i.policy(c.after)
			i.requireHolds(c.has...)
			clients, _ := i.api.relisted()
			require.Equal(t, 2, clients)
		})
	}
}

// Whatever moves while objects change, an informer ends with what the last policy shows,
// and has listed once.
func TestInformerFollowsKeysThatMoveToAndFro(t *testing.T) {
	t.Parallel()
	for _, media := range []string{jsonType, protoType} {
		t.Run(media, func(t *testing.T) {
			t.Parallel()
			i := newInformed(t, dividing("a", "b"), "", media)
			i.api.put(apiwatch.Added, "a", "first")
			i.requireHolds("a/pod-a", "b/pod-b", "a/first") // a watch without events would last for a second
			random := rand.New(rand.NewPCG(1, uint64(len(media))))
			namespaces := []string{"a", "b", "c", "d"}
			done := make(chan struct{})
			go func() {
				defer close(done)
				churn := rand.New(rand.NewPCG(2, 3))
				for n := range 600 {
					kinds := []apiwatch.EventType{apiwatch.Added, apiwatch.Modified, apiwatch.Deleted}
					i.api.put(kinds[churn.IntN(3)], namespaces[churn.IntN(4)], fmt.Sprint("pod-", churn.IntN(5)))
					if n%10 == 0 {
						time.Sleep(time.Millisecond)
					}
				}
			}()
			names, owned := slices.Clone(namespaces), []string{}
			for range 40 {
				random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
				owned = slices.Clone(names[:1+random.IntN(3)])
				i.policy(dividing(owned...))
				time.Sleep(time.Duration(random.IntN(4)) * time.Millisecond)
			}
			<-done
			i.api.mu.Lock()
			var want, all []string
			for key, p := range i.api.at(len(i.api.changes)) {
				all = append(all, key)
				if slices.Contains(owned, p.Namespace) {
					want = append(want, key)
				}
			}
			i.api.mu.Unlock()
			i.requireHolds(want...)
			// On a slow machine all moves may have come before the watch: here is one that did not.
			i.policy(dividing(namespaces...))
			i.requireHolds(all...)
			clients, exact := i.api.relisted()
			require.Equal(t, 1, clients)
			require.NotEmpty(t, exact)
		})
	}
}
