package proxy

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// twenty objects are in ten namespaces, and two in none.
func twenty() []metav1.PartialObjectMetadata {
	var out []metav1.PartialObjectMetadata
	for i := range 20 {
		out = append(out, object(fmt.Sprintf("ns-%d", i%10), fmt.Sprintf("o-%d", i)))
	}
	return append(out, object("", "everybodys-1"), object("", "everybodys-2"))
}

func owned(objects []metav1.PartialObjectMetadata, owns func(metav1.PartialObjectMetadata) bool) []string {
	var names []string
	for _, o := range objects {
		if owns(o) {
			names = append(names, o.Namespace+"/"+o.Name)
		}
	}
	slices.Sort(names)
	return names
}

func inScope(s sharding.Scope) func(metav1.PartialObjectMetadata) bool {
	return func(o metav1.PartialObjectMetadata) bool { return o.Namespace == "" || s.Owns(o.Namespace) }
}

// forms are what clients accept: of lists, and of watches.
var forms = map[string][2]string{
	"JSON":              {jsonType, jsonType},
	"protobuf":          {protoType + "," + jsonType, protoType + "," + jsonType},
	"Table":             {jsonType + ";as=Table;v=v1;g=meta.k8s.io," + jsonType, jsonType + ";as=Table;v=v1;g=meta.k8s.io," + jsonType},
	"metadata":          {jsonType + ";as=PartialObjectMetadataList;v=v1;g=meta.k8s.io", jsonType + ";as=PartialObjectMetadata;v=v1;g=meta.k8s.io"},
	"metadata protobuf": {protoType + ";as=PartialObjectMetadataList;v=v1;g=meta.k8s.io", protoType + ";as=PartialObjectMetadata;v=v1;g=meta.k8s.io"},
}

// Whatever the method, the apiserver and the encoding, a list and a watch have the
// shard's objects and everybody's.
func TestListsAndWatchesHaveOnlyOwnedObjects(t *testing.T) {
	t.Parallel()
	const path = "/api/v1/configmaps"
	scopes := map[string]sharding.Scope{
		"ranges":  sharding.Of(sharding.Range{First: 0, Last: sharding.Whole.Last / 2}),
		"names":   sharding.Keys("ns-1", "ns-2", "ns-3"),
		"buckets": sharding.InBuckets(sharding.Bucket("ns-1"), sharding.Bucket("ns-4")),
		"nothing": {},
		"all":     sharding.All(),
	}
	objects := twenty()
	for _, sharded := range []bool{true, false} {
		for _, gzip := range []bool{false, true} {
			api := newFakeAPI(sharded, objects...)
			api.gzip = gzip
			m := newMesh(t, api)
			c := m.client(true)
			for name, s := range scopes {
				for _, method := range []meshv1.Method{meshv1.Method_METHOD_AUTO, meshv1.Method_METHOD_SERVER_SIDE, meshv1.Method_METHOD_FILTER} {
					if gzip && s.Everything() {
						continue // is passed as it is
					}
					m.policy(policytest.Divided(s, method))
					want := owned(objects, inScope(s))
					for form, accept := range forms {
						what := fmt.Sprintf("%s, %v, %s, sharded=%t, gzip=%t", name, method, form, sharded, gzip)
						require.Equal(t, want, m.all(c, path, accept[0], 0), what)
						require.Equal(t, want, m.all(c, path, accept[0], 3), what)
						require.Equal(t, want, m.watched(c, path+"?watch=1", accept[1]), what)
						require.Equal(t, want, m.watched(c, path+"?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", accept[1]), what)
					}
				}
			}
		}
	}
}

// Two shards have everything between them, and nothing in common.
func TestShardsByUID(t *testing.T) {
	t.Parallel()
	objects := twenty()
	for _, sharded := range []bool{true, false} {
		m := newMesh(t, newFakeAPI(sharded, objects...))
		c := m.client(true)
		mine := sharding.Of(sharding.Range{First: 0, Last: sharding.Whole.Last / 2})
		var union []string
		for _, s := range []sharding.Scope{mine, sharding.All().Minus(mine), {}} {
			policy := policytest.Divided(s, meshv1.Method_METHOD_AUTO)
			policy.Key = meshv1.Key_KEY_OBJECT
			m.policy(policy)
			want := owned(objects, func(o metav1.PartialObjectMetadata) bool { return s.Owns(string(o.UID)) })
			require.Equal(t, want, m.all(c, "/api/v1/configmaps", jsonType, 0))
			require.Equal(t, want, m.watched(c, "/api/v1/configmaps?watch=1", protoType))
			union = append(union, want...)
		}
		slices.Sort(union)
		require.Equal(t, owned(objects, func(metav1.PartialObjectMetadata) bool { return true }), union)
	}
}

func TestNamespacesGoByTheirOwnName(t *testing.T) {
	t.Parallel()
	objects := []metav1.PartialObjectMetadata{object("", "a"), object("", "b"), object("", "c")}
	api := newFakeAPI(true, objects...)
	m := newMesh(t, api)
	c := m.client(true)
	m.policy(policytest.Divided(sharding.Keys("b"), meshv1.Method_METHOD_AUTO))
	require.Equal(t, []string{"/b"}, m.all(c, "/api/v1/namespaces", jsonType, 0))
	require.NotContains(t, api.last(t).URI, "shardSelector")
	require.Equal(t, []string{"/b"}, m.watched(c, "/api/v1/namespaces?watch=1", protoType))
	require.Equal(t, map[string]string{"namespaces": "Filter"}, m.pod.Methods())
	m.policy(policytest.Divided(sharding.Scope{}, meshv1.Method_METHOD_AUTO))
	require.Empty(t, m.all(c, "/api/v1/namespaces", jsonType, 0))
}

// A namespace in the path is the key: an own one is passed as it is, a foreign one
// is empty and quiet.
func TestOneNamespace(t *testing.T) {
	t.Parallel()
	api := newFakeAPI(true, twenty()...)
	m := newMesh(t, api)
	c := m.client(true)
	m.policy(policytest.Divided(sharding.Keys("ns-1"), meshv1.Method_METHOD_AUTO))
	require.Equal(t, []string{"ns-1/o-1", "ns-1/o-11"}, m.all(c, "/api/v1/namespaces/ns-1/configmaps", jsonType, 0))
	require.Equal(t, "/api/v1/namespaces/ns-1/configmaps?limit=0&continue=", api.last(t).URI)
	for _, accept := range []string{jsonType, protoType} {
		a := m.do("GET", "/api/v1/namespaces/ns-2/configmaps?labelSelector=a%3Db", "", "Accept", accept)
		require.Equal(t, 200, a.StatusCode)
		names, _ := listed(t, accept, []byte(a.body))
		require.Empty(t, names)
		require.Empty(t, m.watched(c, "/api/v1/namespaces/ns-2/configmaps?watch=1", accept), "until a bookmark")
	}
	require.Empty(t, m.pod.Methods(), "of what was not listed over all namespaces nothing is known")
	m.policy(policytest.Divided(sharding.Keys("ns-1"), meshv1.Method_METHOD_LABELS))
	require.Equal(t, []string{"ns-2/o-12", "ns-2/o-2"}, m.all(c, "/api/v1/namespaces/ns-2/configmaps", jsonType, 0), "scopes only fence")
}

// What is reported is what was done, and only of what is divided still.
func TestMethods(t *testing.T) {
	t.Parallel()
	part := sharding.Keys("ns-1", "ns-2")
	const list, initial = "/apis/apps/v1/deployments", "/api/v1/pods?watch=1&sendInitialEvents=true"
	for _, row := range []struct {
		sharded bool
		method  meshv1.Method
		want    string
	}{
		{true, meshv1.Method_METHOD_AUTO, "ServerSide"},
		{false, meshv1.Method_METHOD_AUTO, "Filter"},
		{true, meshv1.Method_METHOD_SERVER_SIDE, "ServerSide"},
		{false, meshv1.Method_METHOD_SERVER_SIDE, "Filter"},
		{true, meshv1.Method_METHOD_FILTER, "Filter"},
	} {
		m := newMesh(t, newFakeAPI(row.sharded, twenty()...))
		c := m.client(true)
		require.Empty(t, m.pod.Methods())
		m.policy(policytest.Divided(part, row.method))
		m.all(c, list, protoType, 0)
		m.watched(c, initial, jsonType)
		want := map[string]string{"deployments.apps": row.want, "pods": row.want}
		require.Eventually(t, func() bool { return maps.Equal(want, m.pod.Methods()) }, soon, time.Millisecond, "%v", row)

		dropped := testutil.ToFloat64(m.server.metrics.Filtered.WithLabelValues("ns", "operator", "s1", "pods", "dropped"))
		require.Equal(t, row.want == "Filter", dropped > 0)

		both := policytest.Divided(part, meshv1.Method_METHOD_LABELS)
		both.Limits[0].Selector = "a=b"
		m.policy(both)
		m.all(c, list, jsonType, 0)
		require.Equal(t, "Labels", m.pod.Methods()["deployments.apps"])
		m.policy(nil)
		require.Empty(t, m.pod.Methods())
	}
}

// Python clients watch without a list: the watch begins with the objects, and no event ends them.
func TestMethodOfAWatchWithoutAListIsKnownAtItsEnd(t *testing.T) {
	t.Parallel()
	for sharded, want := range map[bool]string{true: "ServerSide", false: "Filter"} {
		m := newMesh(t, newFakeAPI(sharded, twenty()...))
		m.policy(policytest.Divided(sharding.Keys("ns-1", "ns-2"), meshv1.Method_METHOD_AUTO))
		m.watched(m.client(true), "/api/v1/pods?watch=True&timeoutSeconds=1", jsonType)
		require.Eventually(t, func() bool { return m.pod.Methods()["pods"] == want }, soon, time.Millisecond, "%v", m.pod.Methods())
	}
}

func TestMethodsAreBounded(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(true))
	m.policy(policytest.Divided(sharding.Keys("a"), meshv1.Method_METHOD_AUTO))
	c := m.client(true)
	for i := range 2 * meshv1.MaxMethods {
		m.with(c, "GET", fmt.Sprintf("/apis/x.example/v1/r%d", i), "", "Accept", jsonType)
	}
	require.Len(t, m.pod.Methods(), meshv1.MaxMethods)
}

// A client never takes half an answer for a whole one.
func TestBrokenFilteredResponseNeverEndsCleanly(t *testing.T) {
	t.Parallel()
	const head = `{"kind":"ConfigMapList","apiVersion":"v1","metadata":{},"items":[{"metadata":{"name":"a","namespace":"own"}},`
	for name, rest := range map[string]string{"ends early": "", "is malformed": "]}"} {
		api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", jsonType)
			_, _ = io.WriteString(w, head+strings.Repeat(" ", 256<<10)+rest)
		}}
		m := newMesh(t, api)
		m.policy(policytest.Divided(sharding.Keys("own"), meshv1.Method_METHOD_AUTO))
		for _, query := range []string{"", "?watch=1"} {
			for _, h2 := range []bool{true, false} {
				resp, err := m.client(h2).Get("https://kubernetes.default.svc/api/v1/configmaps" + query)
				if err == nil && resp.StatusCode == 200 {
					_, err = io.ReadAll(resp.Body)
					_ = resp.Body.Close()
					require.Error(t, err, "%s%s", name, query)
				}
			}
		}
	}
}

// What filters keep is within the pod's bound.
func TestMemoryOfFiltersIsBounded(t *testing.T) {
	t.Parallel()
	api := newFakeAPI(false)
	for i := range 1000 {
		o := object("own", fmt.Sprintf("o-%d", i))
		o.Annotations["note"] = strings.Repeat("x", 1<<10)
		api.objects = append(api.objects, o)
	}
	m := newMesh(t, api)
	c := m.client(true)
	m.policy(policytest.Divided(sharding.Keys("own"), meshv1.Method_METHOD_AUTO))
	require.Len(t, m.all(c, "/api/v1/configmaps", protoType, 0), 1000)
	require.Eventually(t, func() bool { return m.pod.budgets.Filtered.Taken() == 0 }, soon, time.Millisecond)

	m.pod.budgets.Filtered.Take(pipeline.MaxFiltered)
	a := m.do("GET", "/api/v1/configmaps", "", "Accept", protoType+","+jsonType)
	require.Equal(t, 429, a.StatusCode)
	require.Equal(t, "1", a.Header.Get("Retry-After"))
	require.Len(t, m.all(c, "/api/v1/configmaps", jsonType, 0), 1000, "which is not kept")
	m.pod.budgets.Filtered.Give(pipeline.MaxFiltered)
	require.Len(t, m.all(c, "/api/v1/configmaps", protoType, 0), 1000)
	require.Eventually(t, func() bool { return m.pod.budgets.Filtered.Taken() == 0 }, soon, time.Millisecond)
}
