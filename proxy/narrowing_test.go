package proxy

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// divided is a shard that owns a scope of all resources.
func divided(owned sharding.Scope, method meshv1.Method) *meshv1.Sharding {
	return &meshv1.Sharding{Shard: "s1", Method: method, Limits: []*meshv1.Limit{{Scope: owned.Proto()}}}
}

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
					m.policy(divided(s, method))
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
			policy := divided(s, meshv1.Method_METHOD_AUTO)
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
	m.policy(divided(sharding.Keys("b"), meshv1.Method_METHOD_AUTO))
	require.Equal(t, []string{"/b"}, m.all(c, "/api/v1/namespaces", jsonType, 0))
	require.NotContains(t, api.last(t).URI, "shardSelector")
	require.Equal(t, []string{"/b"}, m.watched(c, "/api/v1/namespaces?watch=1", protoType))
	require.Equal(t, map[string]string{"namespaces": "Filter"}, m.pod.Methods())
	m.policy(divided(sharding.Scope{}, meshv1.Method_METHOD_AUTO))
	require.Empty(t, m.all(c, "/api/v1/namespaces", jsonType, 0))
}

// A namespace in the path is the key: an own one is passed as it is, a foreign one
// is empty and quiet.
func TestOneNamespace(t *testing.T) {
	t.Parallel()
	api := newFakeAPI(true, twenty()...)
	m := newMesh(t, api)
	c := m.client(true)
	m.policy(divided(sharding.Keys("ns-1"), meshv1.Method_METHOD_AUTO))
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
	m.policy(divided(sharding.Keys("ns-1"), meshv1.Method_METHOD_LABELS))
	require.Equal(t, []string{"ns-2/o-12", "ns-2/o-2"}, m.all(c, "/api/v1/namespaces/ns-2/configmaps", jsonType, 0), "scopes only fence")
}

func TestNarrowedListSendsShardSelector(t *testing.T) {
	t.Parallel()
	api := newFakeAPI(true, twenty()...)
	m := newMesh(t, api)
	half := sharding.Of(sharding.Range{First: 0, Last: sharding.Whole.Last / 2})
	both := divided(half, meshv1.Method_METHOD_AUTO)
	both.Limits[0].Selector = "a=b"
	asked := func(target string) url.Values {
		m.do("GET", "/api/v1/configmaps"+target, "", "Accept-Encoding", "gzip")
		last := api.last(t)
		require.NotContains(t, last.Header, "Accept-Encoding")
		u, err := url.Parse(last.URI)
		require.NoError(t, err)
		return u.Query()
	}
	const everybodys = " || shardRange(object.metadata.namespace, '0xcbf29ce484222325', '0xcbf29ce484222326')"
	m.policy(both)
	require.Equal(t, url.Values{
		"limit":         {"5"},
		"labelSelector": {"a=b,c=d"},
		"shardSelector": {"shardRange(object.metadata.namespace, '0x0000000000000000', '0x8000000000000000')" + everybodys},
	}, asked("?limit=5&labelSelector=c%3Dd"))
	const theirs = "shardRange(object.metadata.uid, '0x0', '0x1')"
	require.Equal(t, url.Values{"labelSelector": {"a=b"}, "shardSelector": {theirs}}, asked("?shardSelector="+url.QueryEscape(theirs)))
	require.Equal(t, "Metadata", asked("?includeObject=None").Get("includeObject"))
	require.Equal(t, "Object", asked("?includeObject=Object").Get("includeObject"))

	m.policy(divided(half, meshv1.Method_METHOD_FILTER))
	require.Empty(t, asked(""))
	m.policy(divided(sharding.InBuckets(1), meshv1.Method_METHOD_AUTO))
	require.Empty(t, asked(""), "buckets are no ranges")

	m.policy(divided(half, meshv1.Method_METHOD_LABELS))
	m.do("GET", "/api/v1/configmaps", "", "Accept-Encoding", "gzip")
	require.Equal(t, "/api/v1/configmaps", api.last(t).URI)
	require.Equal(t, "gzip", api.last(t).Header.Get("Accept-Encoding"))
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
		m.policy(divided(part, row.method))
		m.all(c, list, protoType, 0)
		m.watched(c, initial, jsonType)
		want := map[string]string{"deployments.apps": row.want, "pods": row.want}
		require.Eventually(t, func() bool { return maps.Equal(want, m.pod.Methods()) }, soon, time.Millisecond, "%v", row)

		dropped := testutil.ToFloat64(m.server.metrics.Filtered.WithLabelValues("ns", "operator", "s1", "pods", "dropped"))
		require.Equal(t, row.want == "Filter", dropped > 0)

		both := divided(part, meshv1.Method_METHOD_LABELS)
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
		m.policy(divided(sharding.Keys("ns-1", "ns-2"), meshv1.Method_METHOD_AUTO))
		m.watched(m.client(true), "/api/v1/pods?watch=True&timeoutSeconds=1", jsonType)
		require.Eventually(t, func() bool { return m.pod.Methods()["pods"] == want }, soon, time.Millisecond, "%v", m.pod.Methods())
	}
}

func TestMethodsAreBounded(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(true))
	m.policy(divided(sharding.Keys("a"), meshv1.Method_METHOD_AUTO))
	c := m.client(true)
	for i := range 2 * isolation.MaxMethods {
		m.with(c, "GET", fmt.Sprintf("/apis/x.example/v1/r%d", i), "", "Accept", jsonType)
	}
	require.Len(t, m.pod.Methods(), isolation.MaxMethods)
}

// What cannot be filtered is never passed on.
func TestUnfilterableResponsesAreRefused(t *testing.T) {
	t.Parallel()
	var contentType, encoding, body string
	var code int
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		if encoding != "" {
			w.Header().Set("Content-Encoding", encoding)
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}}
	m := newMesh(t, api)
	m.policy(divided(sharding.Keys("own"), meshv1.Method_METHOD_AUTO))
	const foreign = `{"kind":"ConfigMapList","apiVersion":"v1","metadata":{},"items":[{"metadata":{"name":"secret-name","namespace":"foreign"}}]}`
	for _, c := range []struct {
		name, contentType, encoding, body string
		code, want                        int
	}{
		{"unknown type", "application/cbor", "", foreign, 200, 406},
		{"no type", "", "", foreign, 200, 406},
		{"unknown encoding", jsonType, "br", foreign, 200, 406},
		{"not gzip", jsonType, "gzip", foreign, 200, 502},
		{"not JSON", jsonType, "", "secret-name", 200, 502},
		{"nothing", jsonType, "", "", 200, 502},
		{"another success", jsonType, "", "secret-name", 203, 502},
		{"an error", "text/plain", "", "the apiserver's words", 503, 503},
	} {
		contentType, encoding, body, code = c.contentType, c.encoding, c.body, c.code
		a := m.do("GET", "/api/v1/configmaps", "")
		require.Equal(t, c.want, a.StatusCode, c.name)
		require.NotContains(t, a.body, "secret-name", c.name)
		if c.want == 503 {
			require.Equal(t, c.body, a.body)
			continue
		}
		require.Contains(t, statusOf(t, a).Message, "the apiserver", c.name)
	}
	upstream := len(api.requests())
	a := m.do("GET", "/api/v1/configmaps", "", "Accept", "application/cbor, text/html")
	require.Equal(t, 406, a.StatusCode)
	require.Equal(t, metav1.StatusReasonNotAcceptable, statusOf(t, a).Reason)
	require.Len(t, api.requests(), upstream)

	contentType, encoding, body, code = jsonType, "", "", 200
	require.Equal(t, 200, m.do("HEAD", "/api/v1/configmaps", "").StatusCode)
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
		m.policy(divided(sharding.Keys("own"), meshv1.Method_METHOD_AUTO))
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
	m.policy(divided(sharding.Keys("own"), meshv1.Method_METHOD_AUTO))
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
