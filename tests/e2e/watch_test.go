package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// A watch delivers only the shard's objects, in the apiserver's own bytes, and objects enter
// and leave it by the client's selector.
func (m *members) testWatch(t *testing.T) {
	for shard := range m.pods {
		rv := revision(t)
		last := m.commotion(t, shard)
		for _, format := range []string{typeJSON, typeProtobuf + ";stream=watch", typeJSON + strings.ReplaceAll(asMetadata, "List", "") + ";stream=watch"} {
			flags := append(accept(format), "-until", last)
			member, direct := m.both(t, shard, flags, http.MethodGet,
				"/api/v1/configmaps?watch=true&resourceVersion="+rv,
				"/api/v1/configmaps?watch=1&labelSelector=color%21%3Dred&resourceVersion="+rv,
				"/api/v1/configmaps?watch&allowWatchBookmarks=true&labelSelector=color%21%3Dblue&resourceVersion="+rv,
				"/api/v1/watch/configmaps?labelSelector=seen&resourceVersion="+rv,
				"/api/v1/namespaces/"+m.owned[shard][0]+"/configmaps?watch=true&resourceVersion="+rv,
				"/api/v1/watch/namespaces/"+m.owned[shard][0]+"/configmaps?resourceVersion="+rv,
			)
			for i := range member {
				what := fmt.Sprintf("%s, question %d", format, i)
				require.Equal(t, http.StatusOK, member[i].Code, "%s: %s", what, member[i].Body)
				assert.Equal(t, direct[i].Header["Content-Type"], member[i].Header["Content-Type"], what)
				assert.Equal(t, texts(direct[i].Frames), texts(member[i].Frames), what)
			}
			if format == typeJSON {
				assert.Equal(t, []string{"ADDED", "MODIFIED", "MODIFIED", "DELETED", "ADDED"}, kinds(t, member[0].Frames))
				assert.Equal(t, []string{"ADDED", "MODIFIED", "DELETED", "ADDED"}, kinds(t, member[1].Frames), "an object that its selector no longer matches is deleted")
				assert.Equal(t, []string{"ADDED", "DELETED", "ADDED"}, kinds(t, member[2].Frames), "an object that its selector matches now is new")
			}
		}
	}
}

// commotion creates, changes and deletes an object in the shard and one in the other shard.
// At last it creates one in the shard that all of testWatch's selectors match, and returns
// its name.
func (m *members) commotion(t *testing.T, shard int) string {
	t.Helper()
	ctx := t.Context()
	for _, ns := range []string{m.foreign(shard)[0], m.owned[shard][0]} {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "moving", Labels: map[string]string{"color": "blue", "seen": ""}}}
		create(t, cm)
		cm.Data = map[string]string{"a": "b"}
		require.NoError(t, cluster.Update(ctx, cm))
		cm.Labels["color"] = "red"
		require.NoError(t, cluster.Update(ctx, cm))
		require.NoError(t, cluster.Delete(ctx, cm))
	}
	last := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: m.owned[shard][0], GenerateName: "last-", Labels: map[string]string{"seen": ""}}}
	create(t, last)
	return last.Name
}

func texts(frames [][]byte) []string {
	out := make([]string, len(frames))
	for i, f := range frames {
		out[i] = string(f)
	}
	return out
}

func kinds(t *testing.T, frames [][]byte) []string {
	t.Helper()
	var out []string
	for _, f := range frames {
		var event metav1.WatchEvent
		require.NoError(t, json.Unmarshal(f, &event))
		out = append(out, event.Type)
	}
	return out
}

// A watch ends when the apiserver ends it: at its timeout, or at once because its
// resourceVersion is too old.
func (m *members) testWatchEnd(t *testing.T) {
	member, direct := m.both(t, 0, accept(typeJSON), http.MethodGet,
		"/api/v1/configmaps?watch=true&timeoutSeconds=1&resourceVersion="+revision(t),
		"/api/v1/configmaps?watch=true&timeoutSeconds=1&resourceVersion=1",
		"/api/v1/configmaps?watch=true&resourceVersion=none")
	for i := range member {
		assert.Equal(t, direct[i].Code, member[i].Code, i)
		assert.Equal(t, expired.ReplaceAllString(string(direct[i].Body), "$1 (N)"), expired.ReplaceAllString(string(member[i].Body), "$1 (N)"), i)
	}
}

// expired is the message of a watch from a version that is gone. The number is that of the oldest
// version that is left, and changes between two requests.
var expired = regexp.MustCompile(`(too old resource version: \d+) \(\d+\)`)

// A streamed list ends with its bookmark, which has no labels that a selector could match.
func (m *members) testWatchList(t *testing.T) {
	rv := revision(t)
	for shard := range m.pods {
		for _, selector := range []string{"", "&labelSelector=color%21%3Dred"} {
			member, direct := m.both(t, shard, append(accept(typeJSON), "-until", metav1.InitialEventsAnnotationKey), http.MethodGet,
				"/api/v1/configmaps?watch=true&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&resourceVersion="+rv+selector)
			want, wantMark := initial(t, direct[0].Frames)
			got, gotMark := initial(t, member[0].Frames)
			assert.Equal(t, want, got)
			assert.GreaterOrEqual(t, len(got), perSpace)
			require.NotEmpty(t, gotMark.ResourceVersion)
			wantMark.ResourceVersion, gotMark.ResourceVersion = "", "" // the newest at the time of the request
			assert.Equal(t, wantMark, gotMark)
		}
	}
}

// initial returns the initial events, and the bookmark at their end.
func initial(t *testing.T, frames [][]byte) ([]string, corev1.ConfigMap) {
	t.Helper()
	n := len(frames) - 1
	for _, kind := range kinds(t, frames[:n]) {
		require.EqualValues(t, watch.Added, kind)
	}
	require.Equal(t, []string{string(watch.Bookmark)}, kinds(t, frames[n:]))
	var event struct{ Object corev1.ConfigMap }
	require.NoError(t, json.Unmarshal(frames[n], &event))
	require.Equal(t, "true", event.Object.Annotations[metav1.InitialEventsAnnotationKey])
	return texts(frames[:n]), event.Object
}

// held is an informer's content as probe prints it.
type held struct {
	Objects  map[string]string
	Requests []string
}

// client-go's informers have the content that they would have outside the mesh, whether they
// list or stream, and receive later events.
func (m *members) testInformers(t *testing.T) {
	for _, watchList := range []bool{true, false} {
		for _, format := range []string{typeProtobuf, typeJSON} {
			t.Run(fmt.Sprintf("watchlist=%t,%s", watchList, format), func(t *testing.T) { m.testInformer(t, watchList, format) })
		}
	}
}

func (m *members) testInformer(t *testing.T, watchList bool, format string) {
	const shard = 1
	own, foreign := m.owned[shard][1], m.foreign(shard)[0]
	name := fmt.Sprintf("late-%t-%s", watchList, format[strings.LastIndexAny(format, "/.")+1:])
	flags := []string{fmt.Sprintf("-watchlist=%t", watchList), "-accept=" + format, "-until=" + own + "/" + name}

	member := m.inform(t, shard, append(flags, "-selector=color!=red")...)
	for _, ns := range []string{foreign, own} {
		create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"color": "green"}}})
	}
	got := member()
	want := informer(t.Context(), m.direct, append(flags, "-selector=color!=red,"+m.selector(shard))...)
	require.NoError(t, want.err)
	assert.Equal(t, want.Objects, got.Objects)
	assert.Greater(t, len(got.Objects), perSpace)
	assert.NotContains(t, got.Objects, foreign+"/"+name)

	// The member's informer sent the same requests, without a fallback.
	require.Len(t, got.Requests, len(want.Requests), "%s", got.Requests)
	assert.Equal(t, watchList, strings.Contains(got.Requests[0], "sendInitialEvents=true"), got.Requests[0])
	assert.Equal(t, watchList, strings.Contains(got.Requests[0], "watch=true"), got.Requests[0])
}

// inform runs an informer in a shard's member. When the informer watches, it returns a
// function that waits for its end.
func (m *members) inform(t *testing.T, shard int, flags ...string) func() held {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	open := m.watches(t, shard)
	end := make(chan informed, 1)
	go func() { end <- informer(ctx, m.pods[shard], flags...) }()
	until(t, "the informer's watch", func(context.Context) error {
		select {
		case i := <-end:
			end <- i
			return kube.Never(fmt.Errorf("it ended: %w", i.err))
		default:
		}
		if now := m.watches(t, shard); now <= open {
			return fmt.Errorf("%v are open, as before", now)
		}
		return nil
	})
	return func() held {
		t.Helper()
		i := <-end
		require.NoError(t, i.err)
		return i.held
	}
}

// informed is the result of an informer.
type informed struct {
	held
	err error
}

// informer runs an informer of ConfigMaps in a pod.
func informer(ctx context.Context, pod *corev1.Pod, flags ...string) (out informed) {
	command := append([]string{"probe", "informer"}, flags...)
	stdout, _, err := cluster.Exec(ctx, pod.Namespace, pod.Name, "", append(command, "configmaps")...)
	if out.err = err; err == nil {
		out.err = json.Unmarshal([]byte(stdout), &out.held)
	}
	return out
}

// watches returns how many watches of ConfigMaps a shard's member has open.
func (m *members) watches(t *testing.T, shard int) float64 {
	t.Helper()
	return kube.Total(scrapeAgent(t, m.pods[shard].Spec.NodeName)["ctrlmesh_watches"],
		map[string]string{"namespace": m.home, "shard": m.shard(shard), "resource": "configmaps"})
}
