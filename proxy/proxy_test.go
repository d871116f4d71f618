package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/certs"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// mesh is a proxy for one pod between a client and a fake apiserver, TLS on both
// sides.
type mesh struct {
	t        testing.TB
	server   *Server
	pod      *Pod
	registry *prometheus.Registry
	api      *httptest.Server
	addr     string // of the pod's listener
	ca       *certs.Authority
	logs     *lines

	mu      sync.Mutex
	dials   []string
	applied Applied // by set
}

// soon is when what must happen has happened, however busy the machine is.
const soon = 30 * time.Second

// newMesh starts all; h is the apiserver.
func newMesh(t testing.TB, h http.Handler) *mesh {
	t.Helper()
	m := &mesh{t: t, ca: certs.New(), registry: prometheus.NewRegistry(), logs: &lines{}}
	leaf := m.ca.Leaf("kubernetes.default.svc", "127.0.0.1")

	m.api = httptest.NewUnstartedServer(h)
	m.api.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	m.api.TLS = &tls.Config{Certificates: []tls.Certificate{*leaf}}
	m.api.EnableHTTP2 = true
	m.api.StartTLS()
	t.Cleanup(m.api.Close)

	var err error
	m.server, err = New(Config{
		Leaf:       func() (*tls.Certificate, error) { return leaf, nil },
		Logger:     slog.New(slog.NewJSONHandler(m.logs, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Registerer: m.registry,
	})
	require.NoError(t, err)
	require.NoError(t, m.server.SetCluster(m.cluster()))
	m.pod = m.server.Pod(PodInfo{UID: "uid-1", Namespace: "ns", Name: "pod"}, m.dial)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- m.pod.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = m.pod.Shutdown(ctx)
		require.NoError(t, <-served)
	})
	return m
}

func (m *mesh) cluster() *meshv1.Cluster {
	return &meshv1.Cluster{ServiceAddresses: []string{m.api.Listener.Addr().String()}, Ca: m.ca.PEM()}
}

func (m *mesh) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	m.mu.Lock()
	m.dials = append(m.dials, addr)
	m.mu.Unlock()
	return (&net.Dialer{}).DialContext(ctx, network, addr)
}

func (m *mesh) dialed() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.dials)
}

// policy puts a policy in force.
func (m *mesh) policy(s *meshv1.Sharding) {
	m.t.Helper()
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Sharding: s})
}

// set is policy of a whole one; the channel is closed when it settled.
func (m *mesh) set(p *meshv1.PodPolicy) (settled <-chan struct{}) {
	m.t.Helper()
	applied, err := m.pod.Apply(p)
	require.NoError(m.t, err)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.applied = applied
	return applied.Settled
}

// client returns a client of the pod over HTTP/2, or HTTP/1.1.
func (m *mesh) client(http2 bool) *http.Client {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(m.ca.PEM())
	tr := &http.Transport{
		TLSClientConfig:    &tls.Config{RootCAs: pool, ServerName: "kubernetes.default.svc"},
		ForceAttemptHTTP2:  http2,
		DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, m.addr)
		},
	}
	if !http2 {
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	m.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// answer is a response read whole.
type answer struct {
	*http.Response
	body string
}

func (m *mesh) do(method, target, body string, header ...string) answer {
	m.t.Helper()
	return m.with(m.client(true), method, target, body, header...)
}

func (m *mesh) with(c *http.Client, method, target, body string, header ...string) answer {
	m.t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequest(method, "https://kubernetes.default.svc"+target, r)
	require.NoError(m.t, err)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	require.NoError(m.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(m.t, err)
	return answer{resp, string(b)}
}

// lines collects what was logged.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// seen is a request as the apiserver got it.
type seen struct {
	Method, URI, Host, Proto string
	Header                   http.Header
	Body                     string
}

// recorder answers with a body and keeps what it was asked.
type recorder struct {
	mu   sync.Mutex
	got  []seen
	then http.HandlerFunc
}

func (s *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.got = append(s.got, seen{r.Method, r.RequestURI, r.Host, r.Proto, r.Header.Clone(), string(b)})
	s.mu.Unlock()
	if s.then != nil {
		s.then(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{}`)
}

func (s *recorder) requests() []seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.got)
}

func (s *recorder) last(t testing.TB) seen {
	t.Helper()
	all := s.requests()
	require.NotEmpty(t, all, "nothing reached the apiserver")
	return all[len(all)-1]
}

func TestSmoke(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	require.Equal(t, 503, m.do("GET", "/api/v1/pods", "").StatusCode)
	m.policy(policytest.LimitTo("shard=a"))
	for _, h2 := range []bool{true, false} {
		c := m.client(h2)
		require.Equal(t, 200, m.with(c, "GET", "/api/v1/namespaces/a/pods/x?pretty=1", "").StatusCode)
		require.Equal(t, "/api/v1/namespaces/a/pods/x?pretty=1", api.last(t).URI)
		require.Equal(t, 200, m.with(c, "GET", "/api/v1/namespaces/a/pods?limit=5&labelSelector=b%3Dc&x=y", "").StatusCode)
		require.Equal(t, "/api/v1/namespaces/a/pods?limit=5&labelSelector=b%3Dc%2Cshard%3Da&x=y", api.last(t).URI)
		require.Equal(t, 200, m.with(c, "POST", "/api/v1/namespaces/a/pods", `{"a":1}`).StatusCode)
		require.Equal(t, `{"a":1}`, api.last(t).Body)
		require.Equal(t, 200, m.with(c, "GET", "/api/v1/namespaces/a/pods?watch=1", "").StatusCode)
	}
}
