package label

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// fakeAPI serves ConfigMaps' and Pods' metadata, in pages.
type fakeAPI struct {
	mu        sync.Mutex
	objects   map[string]map[string]string // resource/namespace/name -> labels
	forbidden string                       // a verb refused on configmaps
	lists     []string                     // continue tokens asked for
	patches   int
	expire    bool // the next continue token is refused
}

func (f *fakeAPI) forbid(verb string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.forbidden = verb
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "/")
	fail := func(code int, reason metav1.StatusReason, msg string) {
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(code), Reason: reason, Message: msg})
	}
	if r.Method == http.MethodPatch {
		key := parts[2] + "/" + parts[1] + "/" + parts[3]
		if f.forbidden == "patch" && parts[2] == "configmaps" {
			fail(403, metav1.StatusReasonForbidden, `configmaps "x" is forbidden: User "m" cannot patch resource "configmaps" in API group ""`)
			return
		}
		var patch metav1.PartialObjectMetadata
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
			fail(400, metav1.StatusReasonBadRequest, err.Error())
			return
		}
		if strings.HasPrefix(parts[3], "stuck") {
			fail(422, metav1.StatusReasonInvalid, "stuck for ever")
			return
		}
		f.patches++
		maps.Copy(f.objects[key], patch.Labels)
		_ = json.NewEncoder(w).Encode(metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1"}})
		return
	}
	resource, namespace := parts[0], ""
	if len(parts) == 3 {
		resource, namespace = parts[2], parts[1]
	}
	if f.forbidden == "list" && resource == "configmaps" {
		fail(403, metav1.StatusReasonForbidden, `configmaps is forbidden: User "m" cannot list resource "configmaps" in API group "" at the cluster scope`)
		return
	}
	q := r.URL.Query()
	token := q.Get("continue")
	f.lists = append(f.lists, token)
	if token != "" && f.expire {
		f.expire = false
		fail(410, metav1.StatusReasonExpired, "The provided continue parameter is too old")
		return
	}
	sel, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		fail(400, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	limit, _ := strconv.Atoi(q.Get("limit"))
	list := metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{Kind: "PartialObjectMetadataList", APIVersion: "meta.k8s.io/v1"}}
	var keys []string
	for k := range f.objects {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		p := strings.Split(k, "/")
		if p[0] != resource || namespace != "" && p[1] != namespace || k <= token || !sel.Matches(labels.Set(f.objects[k])) {
			continue
		}
		if len(list.Items) == limit {
			last := list.Items[limit-1]
			list.Continue = resource + "/" + last.Namespace + "/" + last.Name
			break
		}
		list.Items = append(list.Items, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: p[1], Name: p[2], Labels: f.objects[k]}})
	}
	_ = json.NewEncoder(w).Encode(list)
}

func (f *fakeAPI) unstamped() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, l := range f.objects {
		p := strings.Split(k, "/")
		if p[1] != "mesh" && !labels.SelectorFromSet(Of(p[1])).Matches(labels.Set(l)) {
			n++
		}
	}
	return n
}

func newSweep(t *testing.T, n int) (*fakeAPI, *Sweeper) {
	t.Helper()
	f := &fakeAPI{objects: map[string]map[string]string{}}
	for i := range n {
		f.objects[fmt.Sprintf("configmaps/ns-%d/cm-%04d", i%3, i)] = map[string]string{"app": "foo"}
	}
	f.objects["configmaps/mesh/own"] = map[string]string{}
	f.objects["pods/ns-0/p"] = map[string]string{v1alpha1.NamespaceLabel: "ns-0"} // half a stamp
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	client, err := metadata.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
	require.NoError(t, err)
	return f, &Sweeper{
		Metadata: client,
		Served:   func() ([]*metav1.APIResourceList, error) { return served, nil },
		Limiter:  rate.NewLimiter(rate.Inf, 1),
		Skip:     "mesh",
		Settings: platform.Default,
		Every:    time.Hour,
		Changed:  func() {},
	}
}

func TestSweepLeavesOutWhatTheAdministratorExcludes(t *testing.T) {
	f, s := newSweep(t, 9)
	settings, err := platform.Parse(map[string]string{platform.Key: "stamping: {excludedResources: [pods], excludedNamespaces: [ns-1]}"})
	require.NoError(t, err)
	s.Settings = func() *platform.Settings { return settings }
	one := config("one", group([]string{""}, []string{"configmaps", "pods"}))
	one.Spec.Limits[0].Selector = &metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.NamespaceLabel: "ns-0"}}
	s.Set([]*v1alpha1.ShardingConfig{one})
	require.True(t, s.Pass(t.Context(), false))
	status := s.Status(one)
	require.Equal(t, []string{"configmaps"}, status.Completed)
	require.EqualValues(t, 6, status.Stamped)
	require.Contains(t, status.Message, "pods is not labelled: stamping.excludedResources of ConfigMap ctrlmesh-platform excludes it")
	require.Equal(t, 4, f.unstamped(), "three of the namespace, and the pod")

	settings = platform.Default()
	s.Set([]*v1alpha1.ShardingConfig{one})
	require.True(t, s.Pass(t.Context(), false))
	require.Zero(t, f.unstamped(), "once it is allowed")
}

func TestSweep(t *testing.T) {
	f, s := newSweep(t, 1200)
	one := config("one", group([]string{""}, []string{"configmaps", "pods"}))
	two := config("two", group([]string{""}, []string{"configmaps"}))
	require.False(t, s.Status(one).Done, "nothing is known yet")
	s.Set([]*v1alpha1.ShardingConfig{one, two})
	require.True(t, s.Pass(t.Context(), false))
	require.Zero(t, f.unstamped())
	require.Equal(t, &v1alpha1.StampingStatus{Done: true, Completed: []string{"configmaps", "pods"}, Seen: 1201, Stamped: 1201}, s.Status(one))
	require.True(t, s.Status(two).Done)
	require.Equal(t, 1201, f.patches, "one walk for two configurations")

	// What is done is not walked again, unless it is time to.
	f.lists, f.patches = nil, 0
	require.True(t, s.Pass(t.Context(), false))
	require.Empty(t, f.lists)
	f.objects["configmaps/ns-0/late"] = map[string]string{}
	require.True(t, s.Pass(t.Context(), true))
	require.Zero(t, f.unstamped())
	require.Equal(t, 1, f.patches)
	require.Len(t, f.lists, 4, "two lists of what needs labels, of each resource")

	// A new resource is walked; one that nobody lists is forgotten.
	three := config("three", group([]string{""}, []string{"pods"}))
	s.Set([]*v1alpha1.ShardingConfig{three})
	require.True(t, s.Status(three).Done)
	require.True(t, s.Pass(t.Context(), false))
	s.Set([]*v1alpha1.ShardingConfig{two})
	require.False(t, s.Status(two).Done)
}

func TestSweepResumes(t *testing.T) {
	f, s := newSweep(t, 1200)
	c := config("one", group([]string{""}, []string{"configmaps", "pods"}))
	c.Status.Stamping = &v1alpha1.StampingStatus{Resource: "configmaps", Continue: "configmaps/ns-1/cm-0001", Completed: []string{"pods"}, Seen: 400, Stamped: 400}
	s.Set([]*v1alpha1.ShardingConfig{c})
	require.Equal(t, c.Status.Stamping, s.Status(c), "what the last leader said stands until more is known")
	require.True(t, s.Pass(t.Context(), false))
	require.Equal(t, "configmaps/ns-1/cm-0001", f.lists[0])
	st := s.Status(c)
	require.True(t, st.Done)
	require.Greater(t, st.Stamped, int64(400))
	require.Contains(t, st.Completed, "pods")
}

func TestSweepSurvivesAnExpiredToken(t *testing.T) {
	f, s := newSweep(t, 1200)
	f.expire = true
	s.Set([]*v1alpha1.ShardingConfig{config("one", group([]string{""}, []string{"configmaps"}))})
	require.True(t, s.Pass(t.Context(), false))
	require.Equal(t, 1, f.unstamped(), "the pod, which nobody lists")
}

func TestSweepSaysWhatItMayNot(t *testing.T) {
	for _, verb := range []string{"list", "patch"} {
		f, s := newSweep(t, 20)
		f.forbid(verb)
		c := config("one", group([]string{""}, []string{"configmaps", "pods"}))
		s.Set([]*v1alpha1.ShardingConfig{c})
		require.False(t, s.Pass(t.Context(), false))
		st := s.Status(c)
		require.False(t, st.Done)
		require.Contains(t, st.Message, "kubectl create clusterrole ctrlmesh-stamp-configmaps --verb=list,patch --resource=configmaps")
		require.Equal(t, []string{"pods"}, st.Completed, "the others are labelled")

		f.forbid("")
		require.True(t, s.Pass(t.Context(), false))
		st = s.Status(c)
		require.True(t, st.Done)
		require.Empty(t, st.Message)
	}
}

func TestOneStuckObjectHoldsBackNoOther(t *testing.T) {
	f, s := newSweep(t, 20)
	f.objects["configmaps/ns-0/stuck"] = map[string]string{}
	c := config("one", group([]string{""}, []string{"configmaps"}), group([]string{"example.com"}, []string{"foos"}))
	s.Set([]*v1alpha1.ShardingConfig{c})
	require.False(t, s.Pass(t.Context(), false))
	require.Equal(t, 2, f.unstamped(), "the stuck one and the pod that nobody lists")
	require.Contains(t, s.Status(c).Message, "ns-0/stuck")
	require.Contains(t, s.Status(c).Message, "foos.example.com")
}

func TestDiscoveryOutage(t *testing.T) {
	_, s := newSweep(t, 2)
	s.Served = func() ([]*metav1.APIResourceList, error) { return served, errors.New("example.com is away") }
	c := config("one", group([]string{""}, []string{"configmaps"}), group([]string{"example.com"}, []string{"foos"}))
	s.Set([]*v1alpha1.ShardingConfig{c})
	require.False(t, s.Pass(t.Context(), false))
	require.False(t, s.Status(c).Done)
	require.Equal(t, []string{"configmaps"}, s.Status(c).Completed)
}

func TestRun(t *testing.T) {
	f, s := newSweep(t, 20)
	changed := make(chan struct{}, 1000)
	s.Changed = func() { changed <- struct{}{} }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()
	c := config("one", group([]string{""}, []string{"configmaps", "pods"}))
	s.Set([]*v1alpha1.ShardingConfig{c})
	for !s.Status(c).Done {
		<-changed
	}
	require.Zero(t, f.unstamped())
	cancel()
	require.NoError(t, <-ended)
}
