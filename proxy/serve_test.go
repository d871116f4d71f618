package proxy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/certs"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// statusOf decodes a refusal as a client of Kubernetes does.
func statusOf(t testing.TB, a answer) metav1.Status {
	t.Helper()
	o, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), []byte(a.body))
	require.NoError(t, err, "%d %q", a.StatusCode, a.body)
	s, ok := o.(*metav1.Status)
	require.True(t, ok)
	require.EqualValues(t, a.StatusCode, s.Code)
	require.Contains(t, s.Message, "ctrlmesh")
	return *s
}

func TestNothingPassesWithoutAPolicy(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	a := m.do("GET", "/api/v1/pods", "")
	require.Equal(t, 503, a.StatusCode)
	require.Equal(t, "1", a.Header.Get("Retry-After"))
	require.Equal(t, metav1.StatusReasonServiceUnavailable, statusOf(t, a).Reason)

	m.set(&meshv1.PodPolicy{Version: "1", Refuse: "configs a and b contradict"})
	a = m.do("GET", "/api/v1/pods", "")
	require.Equal(t, 503, a.StatusCode)
	require.Equal(t, "5", a.Header.Get("Retry-After"))
	require.Contains(t, statusOf(t, a).Message, "configs a and b contradict")
	require.Empty(t, api.requests())
}

func TestInvalidPolicyKeepsLastValidOne(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	require.Empty(t, m.pod.Version())
	m.policy(policytest.LimitTo("a=b"))
	for _, bad := range []*meshv1.Sharding{
		policytest.LimitTo("a in"),
		{Locks: []*meshv1.Lock{{Name: "x"}}},
	} {
		_, err := m.pod.Apply(&meshv1.PodPolicy{Version: "bad", Sharding: bad})
		require.Error(t, err)
		require.Equal(t, "v", m.pod.Version())
	}
}

func TestCallerAndHeadersReachTheApiserver(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(nil)
	for _, http2 := range []bool{true, false} {
		for _, target := range []string{"/api/v1/namespaces/a/pods/x", "/api/v1/pods?watch=1"} {
			c := m.client(http2)
			a := m.with(c, "GET", target, "",
				"Authorization", "Bearer t0ken", "User-Agent", "operator/1", "Impersonate-User", "x",
				"Accept-Encoding", "gzip, zstd", "Keep-Alive", "5", "Te", "trailers", "X-Custom", "1")
			require.Equal(t, 200, a.StatusCode)
			got := api.last(t)
			require.Equal(t, target, got.URI)
			require.Equal(t, "kubernetes.default.svc", got.Host)
			for k, want := range map[string]string{
				"Authorization": "Bearer t0ken", "User-Agent": "operator/1", "Impersonate-User": "x",
				"Accept-Encoding": "gzip, zstd", "X-Custom": "1",
				"Keep-Alive": "", "Te": "", "X-Forwarded-For": "", "Via": "", "Forwarded": "", "Connection": "",
			} {
				require.Equal(t, want, got.Header.Get(k), k)
			}
			delete(got.Header, pipeline.AuditHeader)
			require.Len(t, got.Header, 5)
		}
		// A header that is not there is not made up.
		m.with(m.client(http2), "GET", "/version", "", "User-Agent", "")
		require.NotContains(t, api.last(t).Header, "User-Agent")
		require.NotContains(t, api.last(t).Header, "Accept-Encoding")
		require.NotContains(t, api.last(t).Header, "Authorization")
	}
	require.NotContains(t, m.logs.String(), "t0ken")
}

// raw sends bytes over TLS and returns the answer.
func (m *mesh) raw(request string) answer {
	m.t.Helper()
	conn, err := tls.Dial("tcp", m.addr, &tls.Config{InsecureSkipVerify: true, ServerName: "evil.example.com"})
	require.NoError(m.t, err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(soon))
	_, err = io.WriteString(conn, request)
	require.NoError(m.t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(m.t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(m.t, err)
	return answer{resp, string(body)}
}

func TestOnlyTheApiserverIsDialled(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(nil)
	for _, c := range []struct {
		request string
		code    int
	}{
		{"GET /version HTTP/1.1\r\nHost: evil.example.com\r\nConnection: close\r\n\r\n", 200},
		{"GET https://evil.example.com:1/version HTTP/1.1\r\nHost: 10.0.0.1\r\nConnection: close\r\n\r\n", 200},
		{"GET /version HTTP/1.1\r\nHost: 169.254.169.254\r\nConnection: close\r\n\r\n", 200},
		{"CONNECT evil.example.com:443 HTTP/1.1\r\nHost: evil.example.com:443\r\nConnection: close\r\n\r\n", 405},
		{"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400},
		{"GET @evil.example.com/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400},
		{"TRACE /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405},
		{"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n", 200}, // chunked wins, the length is dropped
		{"GET /version HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\nConnection: close\r\n\r\n", 501},
	} {
		require.Equal(t, c.code, m.raw(c.request).StatusCode, c.request)
	}
	for _, addr := range m.dialed() {
		require.Equal(t, m.api.Listener.Addr().String(), addr)
	}
	for _, r := range api.requests() {
		require.Equal(t, "/version", r.URI)
	}
}

func TestEndpointsWhenTheServiceDoesNotAnswer(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, dead.Close())
	c := m.cluster()
	c.EndpointAddresses, c.ServiceAddresses = c.ServiceAddresses, []string{dead.Addr().String()}
	require.NoError(t, m.server.SetCluster(c))
	require.Equal(t, 200, m.do("GET", "/version", "").StatusCode)
	require.Equal(t, []string{dead.Addr().String(), m.api.Listener.Addr().String()}, m.dialed())
}

func TestSetClusterTakesLiteralAddressesAndACA(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	for _, c := range []*meshv1.Cluster{
		{},
		{ServiceAddresses: []string{"kubernetes.default.svc:443"}, Ca: m.ca.PEM()},
		{ServiceAddresses: []string{"10.0.0.1"}, Ca: m.ca.PEM()},
		{ServiceAddresses: []string{"10.0.0.1:443"}, Ca: []byte("x")},
	} {
		require.Error(t, m.server.SetCluster(c))
	}
	require.Equal(t, 200, m.do("GET", "/version", "").StatusCode)
}

func TestUnverifiedApiserverGetsNoRequest(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(nil)
	c := m.cluster()
	c.Ca = certs.New().PEM()
	require.NoError(t, m.server.SetCluster(c))
	for _, target := range []string{"/version", "/api/v1/pods?watch=1", "/api/v1/namespaces/a/services/b/proxy/"} {
		a := m.do("GET", target, "", "Authorization", "Bearer t0ken")
		require.Equal(t, 502, a.StatusCode)
		require.NotContains(t, statusOf(t, a).Message, "127.0.0.1")
	}
	require.Empty(t, api.requests())
}

func TestUpstreamErrorsInTheNegotiatedType(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	m.api.Close()
	for accept, want := range map[string]string{
		"":                                    "application/json",
		"*/*":                                 "application/json",
		"application/vnd.kubernetes.protobuf": "application/vnd.kubernetes.protobuf",
		"application/vnd.kubernetes.protobuf,application/json":                            "application/vnd.kubernetes.protobuf",
		"application/json;as=Table;v=v1;g=meta.k8s.io,application/json":                   "application/json",
		"application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1": "application/json",
		"text/html": "application/json",
	} {
		a := m.do("GET", "/api/v1/pods", "", "Accept", accept)
		require.Equal(t, 502, a.StatusCode)
		require.Equal(t, want, a.Header.Get("Content-Type"), accept)
		statusOf(t, a)
	}
}

func TestAmbiguousPathsAreRefused(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(policytest.LimitTo("shard=1"))
	const narrowed = "?labelSelector=shard%3D1"
	for _, c := range []struct{ path, want string }{
		{"/api/v1/pods", "/api/v1/pods" + narrowed},
		{"/api/v1/pods/", "/api/v1/pods/" + narrowed},
		{"/api/v1/p%6Fds", "/api/v1/p%6Fds" + narrowed},
		{"/%61pi/v1/pods", "/%61pi/v1/pods" + narrowed},
		{"/api/v1/watch/pods", "/api/v1/watch/pods" + narrowed},
		{"/api/v1/watch/namespaces/a/pods/x", "/api/v1/watch/namespaces/a/pods/x" + narrowed},
		{"/apis/metrics.k8s.io/v1beta1/namespaces/a/pods", "/apis/metrics.k8s.io/v1beta1/namespaces/a/pods" + narrowed},
		{"/api/v1/namespaces", "/api/v1/namespaces" + narrowed},
		{"/api/v1/namespaces/a/pods/x", "/api/v1/namespaces/a/pods/x"},
		{"/apis/rbac.authorization.k8s.io/v1/clusterroles/system:node", "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:node"},
		{"/apis/rbac.authorization.k8s.io/v1/clusterroles/system%3Anode", "/apis/rbac.authorization.k8s.io/v1/clusterroles/system%3Anode"},
		{"/.well-known/openid-configuration", "/.well-known/openid-configuration"},
		{"/", "/"},
		{"/api/v1/namespaces/a/services/b/proxy/x//..%2Fy/../z/", "/api/v1/namespaces/a/services/b/proxy/x//..%2Fy/../z/"},
		{"/api/v1//pods", ""},
		{"//api/v1/pods", ""},
		{"/api/v1/pods//", ""},
		{"/api/v1/./pods", ""},
		{"/api/v1/x/../pods", ""},
		{"/api/v1/x/%2e%2e/pods", ""},
		{"/api/v1/x/%2E./pods", ""},
		{"/api%2Fv1/pods", ""},
		{"/api/v1%2fpods", ""},
		{"/api/v1/namespaces/a%2Fpods", ""},
		{"/api/v1/namespaces/a/services/b%2Fproxy/../../pods", ""},
		{"/api/v1/watch", ""},
	} {
		before := len(api.requests())
		a := m.raw("GET " + c.path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if c.want == "" {
			require.Equal(t, 400, a.StatusCode, c.path)
			statusOf(t, a)
			require.Len(t, api.requests(), before, c.path)
			continue
		}
		require.Equal(t, 200, a.StatusCode, c.path)
		require.Equal(t, c.want, api.last(t).URI, c.path)
	}
}

func TestBodiesPassUntouched(t *testing.T) {
	t.Parallel()
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = io.WriteString(z, strings.Repeat("list ", 100000))
	_ = z.Close()
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/gzip":
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write(zipped.Bytes())
		case "/trailer":
			w.Header().Set("Trailer", "X-Sum")
			_, _ = io.WriteString(w, "body")
			w.Header().Set("X-Sum", "42")
		case "/none":
			w.WriteHeader(http.StatusNoContent)
		case "/odd":
			w.Header()["Warning"] = []string{"299 - a", "299 - b"}
			w.Header().Set("Content-Type", "application/cbor")
			w.WriteHeader(http.StatusTeapot)
			_, _ = w.Write([]byte{0xd9, 0xd9, 0xf7, 0x00})
		}
	}}
	m := newMesh(t, api)
	m.policy(policytest.LimitTo("a=b"))
	for _, http2 := range []bool{true, false} {
		c := m.client(http2)
		a := m.with(c, "GET", "/gzip", "", "Accept-Encoding", "gzip")
		require.Equal(t, zipped.String(), a.body)
		require.Equal(t, "gzip", a.Header.Get("Content-Encoding"))
		a = m.with(c, "GET", "/trailer", "")
		require.Equal(t, "body", a.body)
		require.Equal(t, "42", a.Trailer.Get("X-Sum"))
		require.Equal(t, 204, m.with(c, "GET", "/none", "").StatusCode)
		a = m.with(c, "GET", "/odd", "")
		require.Equal(t, http.StatusTeapot, a.StatusCode)
		require.Equal(t, "\xd9\xd9\xf7\x00", a.body)
		require.Equal(t, []string{"299 - a", "299 - b"}, a.Header["Warning"])

		for _, size := range []int{0, 1, 5000, 13000, 3 << 20} {
			body := strings.Repeat("x", size)
			require.Equal(t, 200, m.with(c, "POST", "/api/v1/namespaces/a/pods", body, "Content-Type", "x/y").StatusCode)
			require.Equal(t, body, api.last(t).Body)
			req, err := http.NewRequest("PUT", "https://kubernetes.default.svc/api/v1/namespaces/a/pods/b", io.MultiReader(strings.NewReader(body)))
			require.NoError(t, err)
			resp, err := c.Do(req) // of unknown length: chunked
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, body, api.last(t).Body)
		}
	}
}

func TestTruncatedResponseIsVisibleToClient(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"items":[`)
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}))
	m.policy(nil)
	for _, http2 := range []bool{true, false} {
		for _, target := range []string{"/api/v1/pods", "/api/v1/pods?watch=1"} {
			resp, err := m.client(http2).Get("https://kubernetes.default.svc" + target)
			if err == nil {
				_, err = io.ReadAll(resp.Body)
				_ = resp.Body.Close()
			}
			require.Error(t, err)
		}
	}
}

func TestStreamsAreFlushedAndCancelled(t *testing.T) {
	t.Parallel()
	next, gone := make(chan string), make(chan struct{}, 1)
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		for {
			select {
			case s := <-next:
				_, _ = io.WriteString(w, s)
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				gone <- struct{}{}
				return
			}
		}
	}))
	m.policy(nil)
	for _, http2 := range []bool{true, false} {
		for _, target := range []string{
			"/api/v1/pods?watch=1",
			"/api/v1/namespaces/a/pods/b/log?follow=true",
			"/api/v1/namespaces/a/services/b/proxy/events",
			"/apis/cluster.karmada.io/v1alpha1/clusters/one/proxy/api/v1/pods?watch=1",
		} {
			ctx, cancel := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, "GET", "https://kubernetes.default.svc"+target, nil)
			require.NoError(t, err)
			resp, err := m.client(http2).Do(req) // the head comes before any event
			require.NoError(t, err)
			for _, event := range []string{"one\n", strings.Repeat("x", 9000) + "\n", "three\n"} {
				next <- event
				got := make([]byte, len(event))
				_, err = io.ReadFull(resp.Body, got)
				require.NoError(t, err)
				require.Equal(t, event, string(got))
			}
			cancel()
			<-gone
			_ = resp.Body.Close()
		}
	}
}

func TestCancelledRequestEndsUpstream(t *testing.T) {
	t.Parallel()
	started, gone := make(chan struct{}), make(chan struct{})
	m := newMesh(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(started)
		<-r.Context().Done()
		close(gone)
	}))
	m.policy(nil)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", "https://kubernetes.default.svc/api/v1/namespaces/a/pods/slow", nil)
	require.NoError(t, err)
	go func() {
		<-started
		cancel()
	}()
	_, err = m.client(true).Do(req)
	require.ErrorIs(t, err, context.Canceled)
	<-gone
	require.Eventually(t, func() bool { return strings.Contains(m.logs.String(), `"code":499`) }, soon, time.Millisecond)
}

func TestWriteIsNeverSentTwice(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	api.then = func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/drop") {
			panic(http.ErrAbortHandler) // after it was received
		}
	}
	m.policy(nil)
	c := m.client(true)
	require.Equal(t, 200, m.with(c, "POST", "/api/v1/namespaces/a/pods", "{}").StatusCode)
	before := len(api.requests())
	require.Equal(t, 502, m.with(c, "PUT", "/api/v1/namespaces/a/pods/drop", "{}").StatusCode)
	require.Len(t, api.requests(), before+1)
	before++
	require.Equal(t, 502, m.with(c, "DELETE", "/api/v1/namespaces/a/pods/drop", "").StatusCode)
	require.Len(t, api.requests(), before+1)
}

func TestIdleUpstreamConnectionsMayClose(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(nil)
	c := m.client(true)
	for range 3 {
		for _, method := range []string{"POST", "GET", "PUT"} {
			require.Equal(t, 200, m.with(c, method, "/api/v1/namespaces/a/pods", "{}").StatusCode, method)
			m.api.CloseClientConnections()
		}
	}
	require.Len(t, api.requests(), 9)
}

func TestConnectionsAreKept(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	c := m.client(true)
	for range 20 {
		require.Equal(t, 200, m.with(c, "POST", "/api/v1/namespaces/a/pods", "{}").StatusCode)
		require.Equal(t, 200, m.with(c, "GET", "/api/v1/pods?watch=1", "").StatusCode)
	}
	require.Len(t, m.dialed(), 1)
}

func TestManyStreamsShareAConnection(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		<-release
	}))
	m.policy(nil)
	c := m.client(true)
	var bodies []io.Closer
	for range 100 {
		resp, err := c.Get("https://kubernetes.default.svc/api/v1/pods?watch=1")
		require.NoError(t, err)
		bodies = append(bodies, resp.Body)
	}
	require.LessOrEqual(t, len(m.dialed()), 32+1)
	close(release)
	for _, b := range bodies {
		_ = b.Close()
	}
}

func TestRequestIsLoggedAndCounted(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(policytest.LimitTo("a=b"))
	a := m.do("GET", "/api/v1/namespaces/x/pods/y/status?secret=query", "", "Authorization", "Bearer t0ken")
	require.Equal(t, 200, a.StatusCode)
	id := api.last(t).Header.Get("Audit-ID")
	require.Len(t, id, 36)
	require.Eventually(t, func() bool { return strings.Contains(m.logs.String(), id) }, soon, time.Millisecond)
	line := m.logs.String()
	for _, want := range []string{
		`"msg":"request"`, `"pod":"ns/pod"`, `"uid":"uid-1"`, `"shard":"s1"`, `"verb":"get"`, `"resource":"pods"`,
		`"subresource":"status"`, `"namespace":"x"`, `"name":"y"`, `"code":200`, `"added":`, `"bytes":2`,
	} {
		require.Contains(t, line, want)
	}
	require.NotContains(t, line, "secret")
	require.NotContains(t, line, "t0ken")

	m.do("GET", "/version", "", "Audit-ID", "mine")
	require.Equal(t, "mine", api.last(t).Header.Get("Audit-ID"))

	require.NoError(t, testutil.GatherAndCompare(m.registry, strings.NewReader(`
# HELP ctrlmesh_requests_total Requests of captured pods to the apiserver, including those that the proxy refused, by the code of the response. Code 499: the client went away first; other: the connection was closed without a response.
# TYPE ctrlmesh_requests_total counter
ctrlmesh_requests_total{code="200",namespace="ns",resource="",shard="s1",verb="get",workload="operator"} 1
ctrlmesh_requests_total{code="200",namespace="ns",resource="pods",shard="s1",verb="get",workload="operator"} 1
`), "ctrlmesh_requests_total"))
}

// An agent that is killed must not take the only trace of a stream along.
func TestStreamIsLoggedBeforeItIsSent(t *testing.T) {
	t.Parallel()
	var m *mesh
	logged := make(chan string, 1)
	m = newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		logged <- m.logs.String()
		if r.Header.Get("Upgrade") == "" {
			w.WriteHeader(http.StatusOK)
		} else {
			w.WriteHeader(http.StatusForbidden)
		}
	}))
	m.policy(nil)
	for _, test := range []struct {
		name, method, path string
		header             []string
	}{
		{"watch", "GET", "/api/v1/pods?watch=1&secret=query", nil},
		{"log", "GET", "/api/v1/namespaces/a/pods/b/log?follow=true&secret=query", nil},
		{"exec", "POST", "/api/v1/namespaces/a/pods/b/exec?secret=query", []string{"Connection", "Upgrade", "Upgrade", "SPDY/3.1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			id := "id-of-" + test.name
			m.with(m.client(false), test.method, test.path, "", append(test.header, "Audit-ID", id)...)
			line := <-logged
			require.Contains(t, line, `"msg":"stream begins","audit_id":"`+id+`","pod":"ns/pod"`)
			require.NotContains(t, line, "secret")
			require.Eventually(t, func() bool {
				return strings.Contains(m.logs.String(), `"msg":"request","audit_id":"`+id+`"`)
			}, soon, time.Millisecond, "and when it is answered")
		})
	}
}

func TestExpectContinueIsHonoured(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(nil)
	conn, err := tls.Dial("tcp", m.addr, &tls.Config{InsecureSkipVerify: true})
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(soon)))
	br := bufio.NewReader(conn)
	_, err = io.WriteString(conn, "PUT /api/v1/namespaces/a/pods/b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
	require.NoError(t, err)
	line, err := br.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "HTTP/1.1 100 Continue\r\n", line)
	_, err = io.WriteString(conn, "body")
	require.NoError(t, err)
	_, err = br.ReadString('\n')
	require.NoError(t, err)
	resp, err := http.ReadResponse(br, nil)
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, "body", api.last(t).Body)
	require.Empty(t, api.last(t).Header.Get("Expect"))
}

func TestOddPathsMakeNoSeries(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	c := m.client(true)
	for i := range 3 * metrics.MaxResources {
		m.with(c, "GET", fmt.Sprintf("/apis/g/v1/r%d/x", i), "")
	}
	for _, odd := range []string{"%00", "A", "%ff", strings.Repeat("x", 100)} {
		m.with(c, "GET", "/apis/g/v1/"+odd+"/x", "")
	}
	n, err := testutil.GatherAndCount(m.registry, "ctrlmesh_requests_total")
	require.NoError(t, err)
	require.Equal(t, metrics.MaxResources+1, n)
}

func TestWatchesAreCountedWhileOpen(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	m.policy(nil)
	gauge := m.server.metrics.Watches.WithLabelValues("ns", "operator", "", "pods")
	resp, err := m.client(true).Get("https://kubernetes.default.svc/api/v1/pods?watch=1")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return testutil.ToFloat64(gauge) == 1 }, soon, time.Millisecond)
	require.Contains(t, m.logs.String(), `"verb":"watch"`, "the line comes when the watch starts")
	_ = resp.Body.Close()
	require.Eventually(t, func() bool { return testutil.ToFloat64(gauge) == 0 }, soon, time.Millisecond)
}

func TestPanicIsAnswered500(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	m.pod.env.Policy.Load().Plans.Cached.Store(match.Kind{Verb: "get"}, (*pipeline.Plan)(nil))
	a := m.do("GET", "/version", "")
	require.Equal(t, 500, a.StatusCode)
	require.Equal(t, metav1.StatusReasonInternalError, statusOf(t, a).Reason)
	require.InDelta(t, 1, testutil.ToFloat64(m.server.metrics.Panics), 0)
	require.Equal(t, 200, m.do("POST", "/version", "").StatusCode)
}

func TestShutdownEndsAll(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	m.policy(nil)
	resp, err := m.client(true).Get("https://kubernetes.default.svc/api/v1/pods?watch=1")
	require.NoError(t, err)
	require.NoError(t, m.pod.Shutdown(t.Context()))
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err, "the watch ends cleanly")
	_ = resp.Body.Close()
	_, err = net.DialTimeout("tcp", m.addr, time.Second)
	require.Error(t, err)
	require.NoError(t, m.pod.Shutdown(t.Context()))
}

func TestClientGoUnderstandsRefusals(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(policytest.LimitTo("a=b"))
	err := m.rest("v1").Get().Resource("pods").Param("labelSelector", "a in").Do(t.Context()).Error()
	require.True(t, apierrors.IsBadRequest(err), "%v", err)
}

// rest is client-go's client for a version of the core group.
func (m *mesh) rest(version string) rest.Interface {
	m.t.Helper()
	c, err := rest.RESTClientFor(m.config(version))
	require.NoError(m.t, err)
	return c
}

func (m *mesh) config(version string) *rest.Config {
	c := &rest.Config{
		Host:            "https://kubernetes.default.svc",
		APIPath:         "/api",
		TLSClientConfig: rest.TLSClientConfig{CAData: m.ca.PEM()},
		Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, m.addr)
		},
		QPS: -1,
	}
	c.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	gv := scheme.Scheme.PrioritizedVersionsForGroup("")[0]
	gv.Version = version
	c.GroupVersion = &gv
	return c
}

func TestUnreadableBodyIsBadRequest(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	for _, path := range []string{
		"/api/v1/namespaces/a/pods",             // by the pool
		"/api/v1/namespaces/a/services/b/proxy", // by a shared connection
	} {
		for _, body := range []string{"zz\r\n", "4\r\nbodyzz\r\n"} {
			a := m.raw("POST " + path + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
			require.Equal(t, 400, a.StatusCode, path)
			require.Equal(t, metav1.StatusReasonBadRequest, statusOf(t, a).Reason)
		}
	}
	require.Zero(t, testutil.ToFloat64(m.server.metrics.UpstreamErrors.WithLabelValues("ns", "operator", "")))
}
