package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// past is an apiserver with one ConfigMap more in each version, from 11 on, which
// knows all versions after compacted.
type past struct {
	recorder
	now, compacted atomic.Int64
}

func newPast(now int64) *past {
	p := &past{}
	p.now.Store(now)
	p.then = p.serve
	return p
}

func configMap(version int64) metav1.PartialObjectMetadata {
	return metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: fmt.Sprint("c", version), UID: "u", ResourceVersion: fmt.Sprint(version),
	}}
}

func (p *past) serve(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	media, _ := negotiate(r.Header.Get("Accept"))
	w.Header().Set("Content-Type", media)
	var asked int64
	_, _ = fmt.Sscan(q.Get("resourceVersion"), &asked)
	if q.Get("watch") != "" {
		for sent := asked; ; sent++ {
			for sent >= p.now.Load() {
				select {
				case <-r.Context().Done():
					return
				case <-time.After(time.Millisecond):
				}
			}
			o := configMap(sent + 1)
			_, _ = w.Write(eventOf(media, apiwatch.Added, &corev1.ConfigMap{ObjectMeta: o.ObjectMeta}))
			w.(http.Flusher).Flush()
		}
	}
	version := p.now.Load()
	if q.Get("resourceVersionMatch") == "Exact" {
		if version = asked; version <= p.compacted.Load() {
			w.WriteHeader(http.StatusGone)
			return
		}
	}
	var all []metav1.PartialObjectMetadata
	for v := int64(11); v <= version; v++ {
		all = append(all, configMap(v))
	}
	_, _ = w.Write(wire(media, listOf("", "", metav1.ListMeta{ResourceVersion: fmt.Sprint(version)}, all)))
}

const configMaps = "/api/v1/namespaces/ns/configmaps"

func staleLists(age time.Duration) *meshv1.FaultRule {
	return &meshv1.FaultRule{
		Resources: []*meshv1.ResourceMatch{{Resources: []string{"configmaps"}}},
		StaleList: &meshv1.StaleList{AgeNs: int64(age), Percent: 100},
	}
}

func TestStaleListHasEarlierVersion(t *testing.T) {
	t.Parallel()
	for _, media := range []string{jsonType, protoType} {
		t.Run(media, func(t *testing.T) {
			api := newPast(11)
			m := newMesh(t, api)
			m.faults(staleLists(time.Hour))
			list := func(query string) answer {
				t.Helper()
				a := m.do("GET", configMaps+query, "", "Accept", media, "Accept-Encoding", "gzip")
				require.Equal(t, 200, a.StatusCode)
				return a
			}
			list("")
			require.Empty(t, m.injected(), "nothing was seen before")
			require.Empty(t, api.last(t).Header.Get("Accept-Encoding"))
			api.now.Store(13)
			names, _ := listed(t, media, []byte(list("?resourceVersion=12&labelSelector=a%20in%20(b)&limit=7").body))
			require.Equal(t, []string{"ns/c11"}, names)
			require.Equal(t, configMaps+"?resourceVersion=11&labelSelector=a%20in%20(b)&limit=7&resourceVersionMatch=Exact", api.last(t).URI)
			require.Eventually(t, func() bool { return m.injected()["stale_list"] == 1 }, soon, time.Millisecond)

			// What follows a first piece is of the same version as that.
			list("?limit=7&continue=token")
			require.Equal(t, configMaps+"?limit=7&continue=token", api.last(t).URI)

			// What the apiserver has not any more is asked for as usual.
			api.compacted.Store(12)
			names, _ = listed(t, media, []byte(list("?limit=7").body))
			require.Len(t, names, 3)
			require.Equal(t, configMaps+"?limit=7", api.last(t).URI)
			require.Never(t, func() bool { return m.injected()["stale_list"] != 1 }, 20*time.Millisecond, time.Millisecond)

			m.faults()
			require.Len(t, func() []string { n, _ := listed(t, media, []byte(list("").body)); return n }(), 3)
			require.Zero(t, m.pod.env.Rules.Histories.Len(), "what no rule needs")
		})
	}
}

func TestVersionsAreLearnedFromWatchEvents(t *testing.T) {
	t.Parallel()
	for _, media := range []string{jsonType, protoType} {
		t.Run(media, func(t *testing.T) {
			api := newPast(1)
			m := newMesh(t, api)
			m.faults(staleLists(time.Nanosecond))
			m.do("GET", configMaps, "", "Accept", media)
			api.now.Store(12)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r := asking(t, ctx, "GET", configMaps+"?watch=1&resourceVersion=1")
			r.Header.Set("Accept", media)
			resp, err := m.client(true).Do(r)
			require.NoError(t, err)
			defer resp.Body.Close()
			var want []byte
			for v := int64(2); v <= 12; v++ {
				o := configMap(v)
				want = append(want, eventOf(media, apiwatch.Added, &corev1.ConfigMap{ObjectMeta: o.ObjectMeta})...)
			}
			got := make([]byte, len(want))
			_, err = io.ReadFull(resp.Body, got)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got), "it passes as it came")
			m.do("GET", configMaps, "", "Accept", media)
			require.Equal(t, configMaps+"?resourceVersion=12&resourceVersionMatch=Exact", api.last(t).URI)
		})
	}
}

// What is there when a watch begins has versions of long ago.
func TestInitialEventsShowNoVersion(t *testing.T) {
	t.Parallel()
	events := func(kinds ...apiwatch.EventType) (out []byte) {
		for i, kind := range kinds {
			o := configMap(int64(i + 1))
			out = append(out, eventOf(jsonType, kind, &corev1.ConfigMap{ObjectMeta: o.ObjectMeta})...)
		}
		return out
	}
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", jsonType)
		if r.URL.Query().Get("watch") != "" {
			_, _ = w.Write(events(apiwatch.Added, apiwatch.Added, apiwatch.Bookmark, apiwatch.Added))
			return
		}
		_, _ = w.Write(wire(jsonType, listOf("", "", metav1.ListMeta{}, nil)))
	}}
	m := newMesh(t, api)
	m.faults(staleLists(time.Hour))
	m.do("GET", configMaps+"?watch=1&resourceVersion=0", "")
	m.do("GET", configMaps, "")
	require.Equal(t, configMaps+"?resourceVersion=3&resourceVersionMatch=Exact", api.last(t).URI)
}

func TestStaleListIsNarrowedLikeOthers(t *testing.T) {
	t.Parallel()
	api := newPast(11)
	m := newMesh(t, api)
	rule := staleLists(time.Hour)
	rule.Key = "k"
	traffic := &meshv1.Traffic{Injections: []*meshv1.Injection{{Name: "chaos", Rules: []*meshv1.FaultRule{rule}}}}
	m.set(&meshv1.PodPolicy{Version: "v", Traffic: traffic})
	m.do("GET", configMaps, "")
	m.set(&meshv1.PodPolicy{Version: "w", Traffic: traffic, Sharding: policytest.LimitTo("shard=a")})
	api.now.Store(12)
	m.do("GET", configMaps, "")
	require.Equal(t, configMaps+"?labelSelector=shard%3Da&resourceVersion=11&resourceVersionMatch=Exact", api.last(t).URI)
}

// An informer lists with a watch first, and is refused that.
func TestInformerConvergesAfterStaleList(t *testing.T) {
	t.Parallel()
	api := newPast(11)
	m := newMesh(t, api)
	m.faults(staleLists(time.Hour))
	m.do("GET", configMaps, "")
	api.now.Store(13)
	factory := informers.NewSharedInformerFactoryWithOptions(kubernetes.NewForConfigOrDie(m.config("v1")), 0, informers.WithNamespace("ns"))
	defer factory.Shutdown()
	informer := factory.Core().V1().ConfigMaps().Informer()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	factory.StartWithContext(ctx)
	require.True(t, cache.WaitForCacheSync(ctx.Done(), informer.HasSynced))
	require.Eventually(t, func() bool { return len(informer.GetStore().ListKeys()) == 3 }, soon, 5*time.Millisecond)
	uris := []string{}
	for _, r := range api.requests() {
		uris = append(uris, r.URI)
	}
	require.True(t, slices.ContainsFunc(uris, func(u string) bool { return strings.Contains(u, "resourceVersionMatch=Exact") }), "%v", uris)
	require.True(t, slices.ContainsFunc(uris, func(u string) bool {
		return strings.Contains(u, "watch=true") && strings.Contains(u, "resourceVersion=11")
	}), "%v", uris)
	require.False(t, slices.ContainsFunc(uris, func(u string) bool { return strings.Contains(u, "sendInitialEvents") }), "%v", uris)
	require.Contains(t, m.logs.String(), `"code":422`, "it asked for such a watch")
}
