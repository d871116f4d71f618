package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Each fault is injected into watches, and client-go's informer recovers from it by itself.
func TestWatchFaults(t *testing.T) {
	t.Parallel()
	pod := clientPod(t)
	ns := pod.Namespace
	for _, c := range []struct {
		name, watch string
		// soonest is the minimum delay of an event; 0 if there is none.
		soonest time.Duration
		again   bool // it has to watch again, or list
	}{
		{name: "gone", watch: `gone: {percent: "100", after: 500ms}`, again: true},
		{name: "cut", watch: `cut: {percent: "100", after: 500ms}`, again: true},
		{name: "stall", watch: `stall: {percent: "100", lasts: 3s}`, soonest: 2 * time.Second},
		{name: "delay", watch: `delay: {percent: "100", fixedDelay: 2s}`, soonest: 2 * time.Second},
		{name: "duplicate", watch: `duplicate: {percent: "100"}`},
		{name: "drop", watch: `drop: {percent: "100", madeUpAfter: 3s}`, soonest: 3 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := faults(t, ns, "watch", `
httpFault:
- name: `+c.name+`
  match: {resources: [{resources: [configmaps], verbs: [watch]}]}
  watch: {`+c.watch+`}
`, 1)
			i := newWatcher(t, pod)
			start := time.Now()
			if c.name == "stall" { // a watch stalls from its start
				start = i.began
			}
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: c.name}, Data: map[string]string{"n": "0"}}
			create(t, cm)
			i.holds(t, cm)
			require.GreaterOrEqual(t, time.Since(start), c.soonest)
			for n := range 3 { // changes of one object, then a deletion
				patch(t, cm, fmt.Sprintf(`{"data": {"n": "%d"}}`, n+1))
			}
			remove(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "kube-root-ca.crt"}}) // it is created again
			i.holds(t, cm)
			if c.again {
				until(t, "it to watch again", func(context.Context) error { return orElse(i.watches() > 2, "it does not") })
			}
			if c.name != "stall" { // a stall is counted when the watch ends
				counted(t, pod.Spec.NodeName, "ctrlmesh_faults_injected_total", map[string]string{"namespace": ns, "rule": c.name}, 1)
			}
			remove(t, f)
			remove(t, cm)
			i.truth(t)
		})
	}
}

// watcher is an informer in a pod, of its namespace's ConfigMaps.
type watcher struct {
	ns    string
	store cache.Store
	began time.Time

	mu   sync.Mutex
	uris []string
}

func newWatcher(t *testing.T, pod *corev1.Pod) *watcher {
	t.Helper()
	i := &watcher{ns: pod.Namespace, began: time.Now()}
	config := from(t, pod)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			i.mu.Lock()
			i.uris = append(i.uris, r.URL.RequestURI())
			i.mu.Unlock()
			return next.RoundTrip(r)
		})
	})
	clientset, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	factory := informers.NewSharedInformerFactoryWithOptions(clientset, 0, informers.WithNamespace(i.ns))
	maps := factory.Core().V1().ConfigMaps().Informer()
	i.store = maps.GetStore()
	ctx, cancel := context.WithCancel(t.Context())
	factory.StartWithContext(ctx)
	t.Cleanup(func() { cancel(); factory.Shutdown() })
	synced, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	require.True(t, cache.WaitForCacheSync(synced.Done(), maps.HasSynced))
	return i
}

// watches returns how many watches it has sent.
func (i *watcher) watches() (n int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, uri := range i.uris {
		if strings.Contains(uri, "watch=true") {
			n++
		}
	}
	return n
}

// holds waits until the store has the current version of an object. Shards of other tests may have
// the mesh label it.
func (i *watcher) holds(t *testing.T, cm *corev1.ConfigMap) {
	t.Helper()
	until(t, "the informer to hold "+cm.Name, func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(cm), cm); err != nil {
			return err
		}
		obj, ok, _ := i.store.GetByKey(cm.Namespace + "/" + cm.Name)
		if !ok {
			return fmt.Errorf("it has none")
		}
		if rv := obj.(*corev1.ConfigMap).ResourceVersion; rv != cm.ResourceVersion {
			return fmt.Errorf("its is of %s, not %s", rv, cm.ResourceVersion)
		}
		return nil
	})
}

// truth waits until the store has exactly the existing objects.
func (i *watcher) truth(t *testing.T) {
	t.Helper()
	until(t, "the informer to have exactly the existing objects", func(ctx context.Context) error {
		var list corev1.ConfigMapList
		if err := cluster.List(ctx, &list, client.InNamespace(i.ns)); err != nil {
			return err
		}
		want, got := map[string]string{}, map[string]string{}
		for _, cm := range list.Items {
			want[cm.Name] = cm.ResourceVersion
		}
		for _, obj := range i.store.List() {
			got[obj.(*corev1.ConfigMap).Name] = obj.(*corev1.ConfigMap).ResourceVersion
		}
		if fmt.Sprint(want) != fmt.Sprint(got) {
			return fmt.Errorf("it contains %v, not %v", got, want)
		}
		return nil
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
