package proxy

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// sharing is owning, with objects that every shard reads.
func sharing(method meshv1.Method, of ...*meshv1.SharedObjects) *meshv1.Sharding {
	s := owning("mine")
	s.Method, s.Shared = method, of
	s.Limits[0].Resources[0].Resources = []string{"pods", "namespaces", "configmaps"}
	return s
}

func core(resources ...string) []*meshv1.ResourceGroup {
	return []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: resources}}
}

func TestObjectsOfOtherShardsAreReadable(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	for _, byObject := range []bool{false, true} {
		s := owning("mine")
		s.ReadAll = true
		if byObject {
			s.Key = meshv1.Key_KEY_OBJECT
		}
		m.policy(s)
		for _, target := range []string{
			"/api/v1/namespaces/theirs/pods/a",
			"/api/v1/namespaces/theirs/pods/a/log",
			"/api/v1/namespaces/theirs/pods/a/status",
			"/api/v1/namespaces/theirs/pods?fieldSelector=metadata.name%3Da",
			"/api/v1/namespaces/theirs/pods?fieldSelector=metadata.name%3Da&watch=1",
			"/api/v1/watch/namespaces/theirs/pods/a",
			"/api/v1/namespaces?fieldSelector=metadata.name%3Dtheirs",
			"/api/v1/namespaces/theirs",
		} {
			a := m.do("GET", target, "")
			require.Equal(t, 200, a.StatusCode, "%s: %s", target, a.body)
			require.Equal(t, target, api.last(t).URI, "not narrowed")
		}
		if byObject {
			continue
		}
		for _, q := range []string{"GET /api/v1/namespaces/theirs/pods/a/proxy/x", "GET /api/v1/namespaces/theirs/pods/a/exec", "PUT /api/v1/namespaces/theirs/pods/a"} {
			method, target, _ := strings.Cut(q, " ")
			require.Equal(t, 403, m.do(method, target, "").StatusCode, q)
		}
	}
}

// TestListOfOneNameIsNarrowedAcrossNamespaces checks that it is not taken for one object.
func TestListOfOneNameIsNarrowedAcrossNamespaces(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(true, object("mine", "a"), object("theirs", "a"), object("", "a")))
	s := divided(sharding.Keys("mine"), meshv1.Method_METHOD_AUTO)
	s.ReadAll = true
	m.policy(s)
	c := m.client(true)
	for target, want := range map[string][]string{
		"/api/v1/configmaps?fieldSelector=metadata.name%3Da":                   {"mine/a", "/a"},
		"/api/v1/namespaces/theirs/configmaps?fieldSelector=metadata.name%3Da": {"theirs/a"},
	} {
		names, _ := listed(t, jsonType, []byte(m.with(c, "GET", target, "", "Accept", jsonType).body))
		require.Equal(t, want, names)
	}
}

func TestSharedObjectsAreRead(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	named := &meshv1.SharedObjects{Resources: core("configmaps"), Namespaces: []string{"theirs"}, Names: []string{"a"}}
	whole := &meshv1.SharedObjects{Resources: core("pods", "namespaces"), Namespaces: []string{"shared"}}
	anywhere := &meshv1.SharedObjects{Resources: core("configmaps"), Names: []string{"root-ca"}}
	for _, method := range []meshv1.Method{meshv1.Method_METHOD_AUTO, meshv1.Method_METHOD_LABELS} {
		m.policy(sharing(method, named, whole, anywhere))
		for _, q := range []struct {
			request string
			want    int
		}{
			{"GET /api/v1/namespaces/theirs/configmaps/a", 200},
			{"GET /api/v1/namespaces/theirs/configmaps/b", 403},
			{"GET /api/v1/namespaces/other/configmaps/a", 403},
			{"GET /api/v1/namespaces/other/configmaps/root-ca", 200},
			{"GET /api/v1/namespaces/shared/pods/a", 200},
			{"GET /api/v1/namespaces/shared", 200},
			{"GET /api/v1/namespaces/shared/configmaps/a", 403},
			{"PUT /api/v1/namespaces/theirs/configmaps/a", 403},
			{"DELETE /api/v1/namespaces/shared/pods/a", 403},
			{"GET /api/v1/namespaces/shared/pods", 200},
			{"GET /api/v1/namespaces/shared/pods?watch=1", 200},
			{"GET /api/v1/namespaces/theirs/configmaps?fieldSelector=metadata.name%3Da", 200},
			{"GET /api/v1/configmaps?fieldSelector=metadata.name%3Droot-ca", 200},
		} {
			verb, target, _ := strings.Cut(q.request, " ")
			a := m.do(verb, target, "")
			require.Equal(t, q.want, a.StatusCode, "%s: %s", q.request, a.body)
			if q.want == 200 {
				require.Equal(t, target, api.last(t).URI, "not narrowed")
			}
		}
	}
	require.Equal(t, 200, m.do("DELETE", "/api/v1/namespaces/shared/pods", "").StatusCode)
	require.Contains(t, api.last(t).URI, "labelSelector", "a deletecollection is narrowed as elsewhere")
}

func TestSharedObjectsAreWritten(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	s := sharing(meshv1.Method_METHOD_AUTO,
		&meshv1.SharedObjects{Resources: core("configmaps"), Namespaces: []string{"theirs"}, Names: []string{"a"}, WriteAll: true},
		&meshv1.SharedObjects{Resources: core("pods"), Namespaces: []string{"shared"}, WriteAll: true},
	)
	for _, standby := range []bool{false, true} {
		s.Standby = standby
		m.policy(s)
		for _, q := range []struct {
			method, target, body string
			passes               bool
		}{
			{"PUT", "/api/v1/namespaces/theirs/configmaps/a", "{}", true},
			{"PUT", "/api/v1/namespaces/theirs/configmaps/b", "{}", false},
			{"POST", "/api/v1/namespaces/theirs/configmaps", `{"metadata":{"name":"a"}}`, true},
			{"POST", "/api/v1/namespaces/theirs/configmaps", `{"metadata":{"name":"b"}}`, false},
			{"POST", "/api/v1/namespaces/theirs/configmaps", `{"metadata":{"generateName":"a"}}`, false},
			{"POST", "/api/v1/namespaces/theirs/configmaps", `{`, false},
			{"POST", "/api/v1/namespaces/shared/pods", "{}", true},
			{"PATCH", "/api/v1/namespaces/shared/pods/a/status", "{}", true},
			{"POST", "/api/v1/namespaces/other/pods", "{}", false},
		} {
			want := 403
			if q.passes {
				want = 200
			}
			if standby {
				want = 503
			}
			a := m.do(q.method, q.target, q.body)
			require.Equal(t, want, a.StatusCode, "standby %t: %s %s: %s", standby, q.method, q.target, a.body)
			if want == 200 {
				require.Equal(t, q.body, api.last(t).Body)
			}
		}
	}
}

// TestListsKeepSharedObjects checks lists and watches of several objects of which some
// are shared, whatever the apiserver narrows itself.
func TestListsKeepSharedObjects(t *testing.T) {
	t.Parallel()
	objects := append(twenty(), object("kube-system", "ca"), object("kube-system", "other"), object("home", "config"))
	mine := sharding.Keys("ns-1")
	of := []*meshv1.SharedObjects{
		{Resources: core("configmaps"), Namespaces: []string{"kube-system"}, Names: []string{"ca"}},
		{Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"*"}, Resources: []string{"*"}}}, Namespaces: []string{"home"}},
	}
	for _, sharded := range []bool{true, false} {
		api := newFakeAPI(sharded, objects...)
		m := newMesh(t, api)
		c := m.client(true)
		for _, method := range []meshv1.Method{meshv1.Method_METHOD_AUTO, meshv1.Method_METHOD_FILTER} {
			for n, key := range map[int]meshv1.Key{1: meshv1.Key_KEY_NAMESPACE, 2: meshv1.Key_KEY_OBJECT} {
				s := divided(mine, method)
				s.Key = key
				own := inScope(mine)
				if n == 2 {
					s.Limits[0].Scope = sharding.Keys("uid-of-o-3").Proto()
					own = func(o metav1.PartialObjectMetadata) bool { return o.Name == "o-3" }
				}
				s.Shared = of
				m.policy(s)
				want := owned(objects, func(o metav1.PartialObjectMetadata) bool { return own(o) || o.Name == "ca" || o.Namespace == "home" })
				for form, accept := range forms {
					what := fmt.Sprintf("sharded=%t %v %v %s", sharded, method, key, form)
					require.Equal(t, want, m.all(c, "/api/v1/configmaps", accept[0], 0), what)
					require.Equal(t, want, m.watched(c, "/api/v1/configmaps?watch=1", accept[1]), what)
					require.Equal(t, []string{"kube-system/ca"}, m.all(c, "/api/v1/namespaces/kube-system/configmaps", accept[0], 0), what)
					require.Equal(t, []string{"home/config"}, m.all(c, "/api/v1/namespaces/home/configmaps", accept[0], 0), what)
				}
			}
		}
		s := divided(mine, meshv1.Method_METHOD_AUTO)
		s.Shared = of[1:]
		m.policy(s)
		require.Equal(t, owned(objects, func(o metav1.PartialObjectMetadata) bool { return inScope(mine)(o) || o.Namespace == "home" }), m.all(c, "/api/v1/configmaps", jsonType, 0))
		sent, err := url.Parse(api.last(t).URI)
		require.NoError(t, err)
		require.Contains(t, sent.Query().Get("shardSelector"), "||", "the apiserver narrows to what is owned or shared")
	}
}

func TestRefusalNamesTheOwner(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"metadata":{"name":"x","uid":%q}}`, r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:])
	}}
	m := newMesh(t, api)
	for _, key := range []meshv1.Key{meshv1.Key_KEY_NAMESPACE, meshv1.Key_KEY_OBJECT} {
		s := owning("mine")
		s.Key = key
		refused := func(name string) string {
			target := "/api/v1/namespaces/" + name + "/pods/a"
			if key == meshv1.Key_KEY_OBJECT {
				target = "/api/v1/namespaces/x/pods/" + name
			}
			a := m.do("PATCH", target, "{}")
			require.Equal(t, 403, a.StatusCode)
			said := statusOf(t, a)
			require.Equal(t, "pods", said.Details.Kind)
			require.NotEmpty(t, said.Details.Name)
			return said.Message
		}
		m.policy(s)
		require.Contains(t, refused("theirs"), "another shard owns it")
		s.Owners = []*meshv1.Owner{{Shard: "s1", Scope: sharding.Keys("mine").Proto()}, {Shard: "s2", Scope: sharding.Keys("theirs").Proto()}}
		m.policy(s)
		require.Contains(t, refused("theirs"), "shard s2 owns it")
		require.Contains(t, refused("nobodys"), "no shard owns it at the moment")
		s.Owners[0].Scope = sharding.Keys("mine", "released").Proto()
		m.policy(s)
		require.Contains(t, refused("released"), "no shard owns it at the moment")
	}
}

func TestDryRunChangesNothing(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"metadata":{"name":"x","uid":"theirs"}}`)
	}}
	m := newMesh(t, api)
	const leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
	lease := `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"op"}}`
	counted := map[string]int{}
	for _, key := range []meshv1.Key{meshv1.Key_KEY_NAMESPACE, meshv1.Key_KEY_OBJECT} {
		s := owning("mine")
		s.Key, s.Method, s.DryRun, s.FenceNamespaces = key, meshv1.Method_METHOD_AUTO, true, true
		s.Locks = []*meshv1.Lock{{Namespace: "kube-system", Name: "op", UpstreamName: "op---s1"}}
		m.policy(s)
		for _, q := range []struct{ method, target, body, byNamespace, byObject string }{
			{"GET", "/api/v1/pods", "", "narrowed", "narrowed"},
			{"GET", "/api/v1/pods?watch=1", "", "narrowed", "narrowed"},
			{"GET", "/api/v1/namespaces/mine/pods", "", "", "narrowed"},
			{"GET", "/api/v1/namespaces/theirs/pods?limit=1", "", "narrowed", "narrowed"},
			{"DELETE", "/api/v1/namespaces/theirs/pods", "", "narrowed", "refused"},
			{"GET", "/api/v1/namespaces/theirs/pods/a", "", "refused", "refused"},
			{"PUT", "/api/v1/namespaces/theirs/pods/a", "{}", "refused", "refused"},
			{"POST", "/api/v1/namespaces", `{"metadata":{"name":"theirs"}}`, "refused", ""},
			{"PUT", "/api/v1/namespaces/mine/pods/a", "{}", "", "refused"},
			{"PUT", "/api/v1/namespaces/theirs/secrets/a", "{}", "refused", ""},
			{"GET", "/api/v1/namespaces/theirs/secrets", "", "", ""},
			{"GET", leases + "/op", "", "renamed", "renamed"},
			{"PUT", leases + "/op", lease, "renamed", "renamed"},
			{"POST", leases, lease, "renamed", "renamed"},
			{"GET", leases + "?fieldSelector=metadata.name%3Dop", "", "renamed", "renamed"},
			{"PUT", leases + "/other", recordJSON, "renamed", "renamed"}, // when it is discovered
		} {
			want := q.byNamespace
			if key == meshv1.Key_KEY_OBJECT {
				want = q.byObject
			}
			before := len(api.requests())
			a := m.do(q.method, q.target, q.body, "Accept", "application/yaml")
			require.Equal(t, 200, a.StatusCode, "%s %s: %s", q.method, q.target, a.body)
			sent := api.last(t)
			require.Equal(t, q.target, sent.URI)
			require.Equal(t, q.body, sent.Body)
			require.Equal(t, "application/yaml", sent.Header.Get("Accept"))
			if want == "" {
				continue
			}
			require.LessOrEqual(t, len(api.requests())-before, 2, "one look at most")
			verb := map[string]string{"POST": "create", "PUT": "update", "DELETE": "deletecollection", "GET": "get"}[q.method]
			if want == "narrowed" && q.method == "GET" || strings.Contains(q.target, "fieldSelector") {
				verb = "list"
			}
			if strings.Contains(q.target, "watch=1") {
				verb = "watch"
			}
			counted[verb+" "+want]++
			require.EqualValues(t, counted[verb+" "+want], testutil.ToFloat64(m.server.metrics.DryRun.WithLabelValues("ns", "operator", "s1", verb, want)), "%s %s", q.method, q.target)
			require.Eventually(t, func() bool { return strings.Contains(m.logs.String(), `"dry_run":"`+want+`"`) }, soon, time.Millisecond)
		}
	}
	seen := m.pod.ObservedLocks()
	require.Len(t, seen, 1)
	require.Equal(t, "other", seen[0].Name, "reported, and not refused")
}

func TestDryRunOfStandbyIsInvalid(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	s := standby(meshv1.Method_METHOD_AUTO)
	s.DryRun = true
	_, err := m.pod.Apply(&meshv1.PodPolicy{Version: "2", Sharding: s})
	require.Error(t, err)
}

func TestSharingRelists(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*meshv1.Sharding){
		"reads":   func(s *meshv1.Sharding) { s.ReadAll = true },
		"shared":  func(s *meshv1.Sharding) { s.Shared = nil },
		"dry run": func(s *meshv1.Sharding) { s.DryRun = true },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, watches())
			of := &meshv1.SharedObjects{Resources: core("configmaps"), Namespaces: []string{"theirs"}}
			m.restore(sharing(meshv1.Method_METHOD_AUTO, of), time.Time{})
			ended := m.open(m.client(true), "/api/v1/configmaps?watch=1&resourceVersion=5")
			m.policy(sharing(meshv1.Method_METHOD_AUTO, of)) // the same
			next := sharing(meshv1.Method_METHOD_AUTO, of)
			change(next)
			m.policy(next)
			require.NoError(t, <-ended)
		})
	}
}
