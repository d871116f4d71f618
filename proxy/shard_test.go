package proxy

import (
	"context"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// leases is an apiserver with one namespace of leases.
type leases struct {
	t    testing.TB
	mu   sync.Mutex
	objs map[string]*coordinationv1.Lease
	recorder
}

// names are those of the Leases that exist.
func (s *leases) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.objs))
}

func (s *leases) serve(w http.ResponseWriter, r *http.Request) {
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), strings.Split(strings.Split(r.Header.Get("Accept"), ",")[0], ";")[0])
	require.True(s.t, ok, r.Header.Get("Accept"))
	reply := func(code int, o runtime.Object) {
		w.Header().Set("Content-Type", info.MediaType)
		w.WriteHeader(code)
		require.NoError(s.t, scheme.Codecs.EncoderForVersion(info.Serializer, coordinationv1.SchemeGroupVersion).Encode(o, w))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	body := s.recorder.last(s.t).Body
	name := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	if name == "leases" && r.Method == http.MethodPost {
		o, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), []byte(body))
		require.NoError(s.t, err)
		l := o.(*coordinationv1.Lease)
		s.objs[l.Name] = l
		reply(http.StatusCreated, l)
		return
	}
	l := s.objs[name]
	if l == nil {
		e := apierrors.NewNotFound(coordinationv1.Resource("leases"), name)
		w.Header().Set("Content-Type", info.MediaType)
		w.WriteHeader(404)
		require.NoError(s.t, scheme.Codecs.EncoderForVersion(info.Serializer, metav1.SchemeGroupVersion).Encode(&e.ErrStatus, w))
		return
	}
	switch r.Method {
	case http.MethodPut:
		o, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), []byte(body))
		require.NoError(s.t, err)
		l = o.(*coordinationv1.Lease)
		if l.Name != name {
			http.Error(w, "the name of the object does not match the name on the URL", 400)
			return
		}
		s.objs[name] = l
	case http.MethodDelete:
		delete(s.objs, name)
	}
	reply(200, l)
}

func TestClientGoUsesShardLock(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		t.Run(contentType, func(t *testing.T) {
			api := &leases{t: t, objs: map[string]*coordinationv1.Lease{}}
			api.then = api.serve
			m := newMesh(t, &api.recorder)
			m.policy(policytest.Locked("s1", &meshv1.Limit{Selector: "a=b"}))
			config := m.config("v1")
			config.ContentType = contentType
			config.AcceptContentTypes = contentType + "," + runtime.ContentTypeJSON
			all, err := coordinationclient.NewForConfig(config)
			require.NoError(t, err)
			c := all.Leases("leases")
			ctx := t.Context()

			_, err = c.Get(ctx, "leases", metav1.GetOptions{})
			require.True(t, apierrors.IsNotFound(err), "%v", err)
			require.NotContains(t, err.Error(), "---")

			holder, seconds := "pod_1", int32(15)
			lease := &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Name: "leases", Namespace: "leases"},
				Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds},
			}
			require.False(t, m.pod.LockHolder())
			got, err := c.Create(ctx, lease, metav1.CreateOptions{})
			require.NoError(t, err)
			require.Equal(t, "leases", got.Name)
			require.Contains(t, api.objs, "leases---s1")
			require.True(t, m.pod.LockHolder())

			got, err = c.Get(ctx, "leases", metav1.GetOptions{})
			require.NoError(t, err)
			require.Equal(t, "leases", got.Name)
			require.Equal(t, "/apis/coordination.k8s.io/v1/namespaces/leases/leases/leases---s1", api.last(t).URI)

			got.Spec.HolderIdentity = new(string)
			got, err = c.Update(ctx, got, metav1.UpdateOptions{})
			require.NoError(t, err)
			require.Equal(t, "leases", got.Name)
			require.False(t, m.pod.LockHolder(), "released")

			got, err = c.Patch(ctx, "leases", types.MergePatchType, []byte(`{"metadata":{"name":"leases"}}`), metav1.PatchOptions{})
			require.NoError(t, err)
			require.Equal(t, "leases", got.Name)
			require.JSONEq(t, `{"metadata":{"name":"leases---s1"}}`, api.last(t).Body)

			own, err := c.Get(ctx, "leases---s1", metav1.GetOptions{})
			require.NoError(t, err)
			require.Equal(t, "leases---s1", own.Name, "who asks by the upstream name gets it")

			lease.Name = "other"
			_, err = c.Create(ctx, lease, metav1.CreateOptions{})
			require.NoError(t, err)
			require.Contains(t, api.objs, "other")

			pol := m.pod.env.Policy.Load()
			m.pod.env.Observations.LockWrites.Note(pol.Locks[0], pol.Locks, "leases", "me", lock.Held{Holder: "me", For: time.Hour, Version: "8"})
			require.Equal(t, []lock.Holder{{Namespace: "leases", Name: "leases", Identity: "me", Version: "8", Resource: "leases"}}, m.pod.Holders())
			require.Equal(t, []string{"leases/leases"}, m.pod.HeldLocks())
			require.NoError(t, c.Delete(ctx, "leases", metav1.DeleteOptions{}))
			require.False(t, m.pod.LockHolder(), "deleted")
			require.Empty(t, m.pod.Holders()[0].Identity)
			require.Empty(t, m.pod.HeldLocks())
			require.NotContains(t, api.objs, "leases---s1")
		})
	}
}

// A write that the lock's version does not order could take effect after its writer has exited.
func TestUnorderedWritesOfTheLockCount(t *testing.T) {
	t.Parallel()
	const path = "/apis/coordination.k8s.io/v1/namespaces/leases/leases/leases"
	for name, c := range map[string]struct {
		method, contentType, body string
		counts                    bool
	}{
		"an update":                {"PUT", "application/json", `{"metadata":{"name":"leases","resourceVersion":"7"}}`, false},
		"an update of any version": {"PUT", "application/json", `{"metadata":{"name":"leases"}}`, true},
		"a patch":                  {"PATCH", "application/merge-patch+json", `{"metadata":{"resourceVersion":"7"}}`, false},
		"a patch of any version":   {"PATCH", "application/merge-patch+json", `{"spec":{"holderIdentity":"me"}}`, true},
		"a JSON patch":             {"PATCH", "application/json-patch+json", `[{"op":"replace","path":"/metadata/resourceVersion","value":"7"}]`, false},
		"a deletion":               {"DELETE", "application/json", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			arrived, answer := make(chan struct{}), make(chan struct{})
			api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
				close(arrived)
				<-answer
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"leases---s1"}}`)
			}}
			m := newMesh(t, api)
			m.policy(policytest.Locked("s1"))
			done := make(chan struct{})
			go func() {
				defer close(done)
				r := asking(t, t.Context(), c.method, path)
				r.Body, r.ContentLength = io.NopCloser(strings.NewReader(c.body)), int64(len(c.body))
				r.Header.Set("Content-Type", c.contentType)
				if resp, err := m.client(true).Do(r); err == nil {
					_ = resp.Body.Close()
				}
			}()
			<-arrived
			applied, err := m.pod.Apply(&meshv1.PodPolicy{Version: "next", Sharding: policytest.Locked("s1")})
			require.NoError(t, err)
			select {
			case <-applied.Settled:
				require.False(t, c.counts, "it settled before the write ended")
			default:
				require.True(t, c.counts, "it waits for the write")
			}
			close(answer)
			<-done
			<-applied.Settled
		})
	}
}

func TestLockTrafficHasItsOwnConnection(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(policytest.Locked("s1"))
	c := m.client(true)
	for range 2 {
		m.with(c, "GET", "/api/v1/namespaces/leases/configmaps/leases", "")
		m.with(c, "GET", "/api/v1/namespaces/leases/configmaps/other", "")
	}
	require.Len(t, m.dialed(), 2)
}

// watches is an apiserver whose watches last until they are cancelled.
func watches() *recorder {
	return &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(200)
		if q := r.URL.Query(); q.Get("watch") == "1" {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, `{}`)
	}}
}

// open starts a watch; the channel gets how it ended.
func (m *mesh) open(c *http.Client, target string) <-chan error {
	m.t.Helper()
	resp, err := c.Get("https://kubernetes.default.svc" + target)
	require.NoError(m.t, err)
	require.Equal(m.t, 200, resp.StatusCode)
	end := make(chan error, 1)
	go func() {
		_, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		end <- err
	}()
	return end
}

func TestRelistAfterPolicyChange(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	pods := func(selector string) *meshv1.Sharding {
		return &meshv1.Sharding{Shard: "s", Limits: []*meshv1.Limit{{
			Selector: selector, Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods"}}},
		}}}
	}
	m.restore(pods("a=1"), time.Time{})
	c := m.client(true)
	const podsWatch, servicesWatch = "/api/v1/pods?watch=1&resourceVersion=5", "/api/v1/services?watch=1&resourceVersion=5"
	affected, untouched := m.open(c, podsWatch), m.open(c, servicesWatch)

	m.policy(pods("a=1")) // the same: nothing ends
	m.policy(pods("a=2"))
	require.NoError(t, <-affected, "a clean end")
	select {
	case err := <-untouched:
		t.Fatalf("a watch of another resource ended: %v", err)
	default:
	}

	expired := func(target string) {
		t.Helper()
		a := m.with(c, "GET", target, "")
		require.Equal(t, 410, a.StatusCode)
		require.Equal(t, metav1.StatusReasonExpired, statusOf(t, a).Reason)
	}
	expired(podsWatch)
	m.with(c, "GET", "/api/v1/namespaces/x/pods", "") // another path
	expired(podsWatch)
	m.with(c, "GET", "/api/v1/pods?limit=5&continue=abc", "") // the rest of an old list
	expired(podsWatch)
	m.with(c, "GET", "/api/v1/pods?limit=5", "")
	again := m.open(c, podsWatch)

	// Another cache of the same path has not listed again.
	expired("/api/v1/pods?watch=1&resourceVersion=5&labelSelector=x%3Dy")

	m.policy(nil)
	require.NoError(t, <-again)
	expired(podsWatch)
	fresh := m.open(c, "/api/v1/pods?watch=1&resourceVersion=5&sendInitialEvents=true")
	resumed := m.open(c, podsWatch)
	fromNow := m.open(c, "/api/v1/pods?watch=1")

	m.set(&meshv1.PodPolicy{Refuse: "contradiction"})
	for _, w := range []<-chan error{fresh, resumed, fromNow, untouched} {
		require.NoError(t, <-w)
	}
}

func TestRelistIsRequestedOnce(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	m.policy(policytest.LimitTo("a=1"))
	c := m.client(true)
	m.with(c, "GET", "/api/v1/pods", "")
	m.policy(policytest.LimitTo("a=2"))
	// A client that lists all and watches one field of it.
	const target = "/api/v1/pods?watch=1&resourceVersion=5&fieldSelector=spec.nodeName%3Dn"
	require.Equal(t, 410, m.with(c, "GET", target, "").StatusCode)
	m.with(c, "GET", "/api/v1/pods", "")
	end := m.open(c, target)
	require.NoError(t, m.pod.Shutdown(t.Context()))
	require.NoError(t, <-end)
}

// A list that was answered under the old policy does not count for the new one.
func TestListUnderOldPolicyDoesNotCount(t *testing.T) {
	t.Parallel()
	arrived, release := make(chan struct{}), make(chan struct{})
	api := watches()
	plain := api.then
	api.then = func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("slow") != "" {
			close(arrived)
			<-release
		}
		plain(w, r)
	}
	m := newMesh(t, api)
	m.policy(policytest.LimitTo("a=1"))
	c := m.client(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		resp, err := c.Get("https://kubernetes.default.svc/api/v1/pods?slow=1")
		if err == nil {
			_ = resp.Body.Close()
		}
	}()
	<-arrived
	m.policy(policytest.LimitTo("a=2"))
	close(release)
	<-done
	require.Equal(t, 410, m.with(c, "GET", "/api/v1/pods?watch=1&resourceVersion=5", "").StatusCode)
}

func TestPoliciesChangeUnderTraffic(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	m.policy(policytest.LimitTo("a=0"))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	c := m.client(true)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for i := 0; ctx.Err() == nil; i++ {
			_, _ = m.pod.Apply(&meshv1.PodPolicy{Sharding: policytest.LimitTo("a=" + string(rune('0'+i%10)))})
		}
	}()
	for ctx.Err() == nil {
		req, err := http.NewRequestWithContext(ctx, "GET", "https://kubernetes.default.svc/api/v1/pods?watch=1", nil)
		require.NoError(t, err)
		if resp, err := c.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	}
	<-ended
}
