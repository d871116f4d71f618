package stages

import (
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Lists, watches and deletecollections find nothing there, also by name.
func TestListsOutsideTheLimitsAreEmpty(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	nothing := isolation.Nothing.String()
	for _, reads := range []bool{true, false} {
		for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_ENFORCE, meshv1.Isolation_ISOLATION_OFF} {
			m.policy(confined(reads, isolation))
			for _, q := range []struct {
				method, query string
				byName        bool
			}{
				{"GET", "", false},
				{"GET", "fieldSelector=metadata.name%3Da", true},
				{"DELETE", "", false},
			} {
				for namespace, empty := range map[string]bool{
					"mine": false, "outside": true, "theirs": !q.byName || !reads, "read": q.method == "DELETE",
				} {
					m.do(q.method, "/api/v1/namespaces/"+namespace+"/pods?"+q.query, "")
					sent, err := url.Parse(m.last().URI)
					require.NoError(t, err)
					require.Equal(t, empty, sent.Query().Get("labelSelector") == nothing, "%s %s in %s, reads: %v", q.method, q.query, namespace, reads)
				}
			}
		}
	}
}

// A deletecollection in a namespace of another shard finds nothing, whatever the
// isolation, as a list would.
func TestDeleteCollectionInForeignNamespaceDeletesNothing(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	nothing := isolation.Nothing.String()
	for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_ENFORCE, meshv1.Isolation_ISOLATION_OBSERVE, meshv1.Isolation_ISOLATION_OFF} {
		for _, q := range []struct{ target, plain, wide string }{
			{"/api/v1/namespaces/mine/pods", "", ""},
			{"/api/v1/namespaces/theirs/pods", nothing, nothing},
			{"/api/v1/namespaces/theirs/pods?labelSelector=a", nothing + ",a", nothing + ",a"},
			{"/api/v1/namespaces/ns/pods", nothing, nothing}, // the pod's own, but they are divided
			{"/api/v1/namespaces/theirs/secrets", "", nothing},
			{"/api/v1/namespaces/ns/secrets", "", ""},
			{"/api/v1/nodes", "", ""},
		} {
			for wide, want := range map[bool]string{false: q.plain, true: q.wide} {
				s := policytest.Owning("mine")
				s.Isolation, s.FenceNamespaces = isolation, wide
				m.policy(s)
				a := m.do("DELETE", q.target, "")
				require.Equal(t, 200, a.code, "%v %s: %s", isolation, q.target, a.body)
				sent, err := url.Parse(m.last().URI)
				require.NoError(t, err)
				got := sent.Query().Get("labelSelector")
				require.ElementsMatch(t, strings.Split(want, ","), strings.Split(got, ","), "%v, fenced namespaces %t: %s", isolation, wide, q.target)
			}
		}
		m.policy(policytest.Owning("mine", "theirs"))
		require.Equal(t, 400, m.do("DELETE", "/api/v1/namespaces/ns/pods?labelSelector=((", "").code)
	}
}

func TestMalformedQueriesAreRefusedWhereTheyCount(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.policy(&meshv1.Sharding{Shard: "s", Limits: []*meshv1.Limit{{
		Selector: "a=b", Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods"}}},
	}}})
	for _, q := range []string{"labelSelector=%zz", "labelSelector=a;b=1", "x=%", "labelSelector=a+in"} {
		a := m.do("DELETE", "/api/v1/namespaces/x/pods?"+q, "")
		require.Equal(t, 400, a.code, q)
		require.Equal(t, metav1.StatusReasonBadRequest, a.status.Reason)
	}
	require.Empty(t, m.requests)
	require.Equal(t, 200, m.do("GET", "/api/v1/services?labelSelector=%zz", "").code)
	require.Equal(t, "/api/v1/services?labelSelector=%zz", m.last().URI)
}

func TestSelectorsNarrowListsAndWatches(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.policy(policytest.LimitTo("s=1"))
	for _, c := range []struct {
		method, target string
		narrowed       bool
	}{
		{"GET", "/api/v1/pods", true},
		{"HEAD", "/api/v1/pods", true},
		{"GET", "/api/v1/pods?watch=true", true},
		{"GET", "/api/v1/pods?w%61tch=1", true},
		{"GET", "/api/v1/pods?fieldSelector=metadata.name%3Dx", true},
		{"DELETE", "/api/v1/namespaces/a/pods", true},
		{"POST", "/api/v1/namespaces/a/pods", false},
		{"GET", "/api/v1/namespaces/a/pods/x", false},
		{"PUT", "/api/v1/namespaces/a/pods/x", false},
		{"PATCH", "/api/v1/namespaces/a/pods/x/status", false},
		{"DELETE", "/api/v1/namespaces/a/pods/x", false},
		{"GET", "/apis", false},
		{"GET", "/openapi/v2", false},
	} {
		require.Equal(t, 200, m.do(c.method, c.target, "").code)
		u, err := url.Parse(m.last().URI)
		require.NoError(t, err)
		require.Equal(t, c.narrowed, u.Query().Get("labelSelector") == "s=1", "%s %s", c.method, c.target)
	}
}

// sharing is owning, with objects that every shard reads.
func sharing(method meshv1.Method, of ...*meshv1.SharedObjects) *meshv1.Sharding {
	s := policytest.Owning("mine")
	s.Method, s.Shared, s.Limits[0].Resources = method, of, policytest.Core("pods", "namespaces", "configmaps")
	return s
}

func TestObjectsOfOtherShardsAreReadable(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	for _, byObject := range []bool{false, true} {
		s := policytest.Owning("mine")
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
			require.Equal(t, 200, a.code, "%s: %s", target, a.body)
			require.Equal(t, target, m.last().URI, "not narrowed")
		}
		if byObject {
			continue
		}
		for _, q := range []string{"GET /api/v1/namespaces/theirs/pods/a/proxy/x", "GET /api/v1/namespaces/theirs/pods/a/exec", "PUT /api/v1/namespaces/theirs/pods/a"} {
			method, target, _ := strings.Cut(q, " ")
			require.Equal(t, 403, m.do(method, target, "").code, q)
		}
	}
}

func TestSharedObjectsAreRead(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	named := &meshv1.SharedObjects{Resources: policytest.Core("configmaps"), Namespaces: []string{"theirs"}, Names: []string{"a"}}
	whole := &meshv1.SharedObjects{Resources: policytest.Core("pods", "namespaces"), Namespaces: []string{"shared"}}
	anywhere := &meshv1.SharedObjects{Resources: policytest.Core("configmaps"), Names: []string{"root-ca"}}
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
			require.Equal(t, q.want, a.code, "%s: %s", q.request, a.body)
			if q.want == 200 {
				require.Equal(t, target, m.last().URI, "not narrowed")
			}
		}
	}
	require.Equal(t, 200, m.do("DELETE", "/api/v1/namespaces/shared/pods", "").code)
	require.Contains(t, m.last().URI, "labelSelector", "a deletecollection is narrowed as elsewhere")
}

func TestSharedObjectsAreWritten(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := sharing(meshv1.Method_METHOD_AUTO,
		&meshv1.SharedObjects{Resources: policytest.Core("configmaps"), Namespaces: []string{"theirs"}, Names: []string{"a"}, WriteAll: true},
		&meshv1.SharedObjects{Resources: policytest.Core("pods"), Namespaces: []string{"shared"}, WriteAll: true},
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
			require.Equal(t, want, a.code, "standby %t: %s %s: %s", standby, q.method, q.target, a.body)
			if want == 200 {
				require.Equal(t, q.body, m.last().Body)
			}
		}
	}
}

func TestNarrowedListSendsShardSelector(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response { return response(200, typeJSON, `{"items":[]}`) }
	half := sharding.Of(sharding.Range{First: 0, Last: sharding.Whole.Last / 2})
	both := policytest.Divided(half, meshv1.Method_METHOD_AUTO)
	both.Limits[0].Selector = "a=b"
	asked := func(target string) url.Values {
		m.do("GET", "/api/v1/configmaps"+target, "", "Accept-Encoding", "gzip")
		last := m.last()
		require.False(t, last.Header.Has("Accept-Encoding"))
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

	m.policy(policytest.Divided(half, meshv1.Method_METHOD_FILTER))
	require.Empty(t, asked(""))
	m.policy(policytest.Divided(sharding.InBuckets(1), meshv1.Method_METHOD_AUTO))
	require.Empty(t, asked(""), "buckets are no ranges")

	m.policy(policytest.Divided(half, meshv1.Method_METHOD_LABELS))
	m.do("GET", "/api/v1/configmaps", "", "Accept-Encoding", "gzip")
	require.Equal(t, "/api/v1/configmaps", m.last().URI)
	require.Equal(t, "gzip", m.last().Header.Get("Accept-Encoding"))
}

// What cannot be filtered is never passed on.
func TestUnfilterableResponsesAreRefused(t *testing.T) {
	t.Parallel()
	var contentType, encoding, body string
	var code int
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response {
		r := response(code, contentType, body)
		r.Header.Set("Content-Encoding", encoding)
		return r
	}
	m.policy(policytest.Divided(sharding.Keys("own"), meshv1.Method_METHOD_AUTO))
	const foreign = `{"kind":"ConfigMapList","apiVersion":"v1","metadata":{},"items":[{"metadata":{"name":"secret-name","namespace":"foreign"}}]}`
	for _, c := range []struct {
		name, contentType, encoding, body string
		code, want                        int
	}{
		{"unknown type", "application/cbor", "", foreign, 200, 406},
		{"no type", "", "", foreign, 200, 406},
		{"unknown encoding", typeJSON, "br", foreign, 200, 406},
		{"not gzip", typeJSON, "gzip", foreign, 200, 502},
		{"not JSON", typeJSON, "", "secret-name", 200, 502},
		{"nothing", typeJSON, "", "", 200, 0}, // as if the apiserver did not answer
		{"another success", typeJSON, "", "secret-name", 203, 502},
		{"an error", "text/plain", "", "the apiserver's words", 503, 503},
	} {
		contentType, encoding, body, code = c.contentType, c.encoding, c.body, c.code
		a := m.do("GET", "/api/v1/configmaps", "")
		require.Equal(t, c.want, a.code, c.name)
		require.NotContains(t, a.body, "secret-name", c.name)
		switch c.want {
		case 0:
			require.Error(t, a.err)
		case 503:
			require.Equal(t, c.body, a.body)
		default:
			require.Contains(t, a.body, "the apiserver", c.name)
		}
	}
	before := len(m.requests)
	a := m.do("GET", "/api/v1/configmaps", "", "Accept", "application/cbor, text/html")
	require.Equal(t, 406, a.code)
	require.Equal(t, metav1.StatusReasonNotAcceptable, a.status.Reason)
	require.Len(t, m.requests, before)

	contentType, encoding, body, code = typeJSON, "", "", 200
	require.Equal(t, 200, m.do("HEAD", "/api/v1/configmaps", "").code)
}
