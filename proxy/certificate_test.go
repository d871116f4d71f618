package proxy

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/relay"
)

func TestClientCertificateIsRefusedWithExplanation(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	notified := make(chan string, 10)
	m.server.config.Notify = func(_ PodInfo, reason, message string) { notified <- reason + " " + message }
	m.policy(nil)
	cert := m.ca.Leaf("admin")
	for _, http2 := range []bool{true, false} {
		for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			c := m.client(http2)
			config := c.Transport.(*http.Transport).TLSClientConfig
			config.MaxVersion = version
			require.Equal(t, 200, m.with(c, "GET", "/version", "").StatusCode, "without one")
			c.CloseIdleConnections()
			config.Certificates = []tls.Certificate{*cert}
			config.ClientSessionCache = tls.NewLRUClientSessionCache(1)
			for range 2 { // resumed, it still is the certificate's connection
				a := m.with(c, "GET", "/api/v1/secrets", "", "Authorization", "Bearer x")
				require.Equal(t, 401, a.StatusCode)
				s := statusOf(t, a)
				require.Equal(t, metav1.StatusReasonUnauthorized, s.Reason)
				require.Contains(t, s.Message, "spec.clientCertificates: Passthrough")
			}
		}
	}
	for _, s := range api.requests() {
		require.Equal(t, "/version", s.URI)
	}
	require.InDelta(t, 8, testutil.ToFloat64(m.server.metrics.Refusals.WithLabelValues("ns", "operator", "", "client_certificate")), 0)
	select {
	case got := <-notified:
		require.Contains(t, got, "ClientCertificateRefused a client certificate was refused: TLS ends at the mesh")
	case <-time.After(soon):
		t.Fatal("no notice was sent")
	}
	require.Empty(t, notified)
}

func (m *mesh) passthrough(on bool) {
	m.t.Helper()
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Passthrough: on})
}

// authenticating is an apiserver that shows by the client's certificate who
// asks.
func authenticating(t *testing.T) (*mesh, *recorder) {
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		if len(r.TLS.PeerCertificates) > 0 {
			_, _ = io.WriteString(w, r.TLS.PeerCertificates[0].DNSNames[0])
		}
		if r.URL.Query().Get("watch") != "" {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	}}
	m := newMesh(t, api)
	return m, api
}

func TestPassthrough(t *testing.T) {
	t.Parallel()
	m, api := authenticating(t)
	m.api.TLS.ClientAuth = tls.RequestClientCert
	require.Equal(t, 503, m.do("GET", "/version", "").StatusCode, "nothing passes before a policy came")
	require.Empty(t, m.dialed())
	m.passthrough(true)
	// A client of its own: one that retries on a connection that was closed may
	// have dialed another meanwhile, and keeps both.
	c := m.client(true)
	cert := m.ca.Leaf("admin")
	c.Transport.(*http.Transport).TLSClientConfig.Certificates = []tls.Certificate{*cert}
	require.Equal(t, "admin", m.with(c, "GET", "/version", "").body)
	require.Equal(t, []string{m.api.Listener.Addr().String()}, m.dialed())
	require.NotContains(t, m.logs.String(), `"verb":`, "nothing is seen of requests")
	// The counts are its workload's as long as that has a pod.
	other := m.server.Pod(PodInfo{UID: "uid-2", Namespace: "ns", Name: "other"}, m.dial)
	_, err := other.Apply(&meshv1.PodPolicy{Uid: "uid-2", Workload: "operator", Version: "v"})
	require.NoError(t, err)

	// The end of passthrough ends the tunnels.
	resp, err := c.Get("https://kubernetes.default.svc/api/v1/pods?watch=1")
	require.NoError(t, err)
	before := len(api.requests())
	m.policy(policytest.LimitTo("a=b"))
	_, err = io.ReadAll(resp.Body)
	require.Error(t, err)
	_ = resp.Body.Close()
	require.Equal(t, 401, m.with(c, "GET", "/version", "").StatusCode)
	require.Len(t, api.requests(), before)

	require.Eventually(t, func() bool { return strings.Contains(m.logs.String(), `"msg":"passthrough"`) }, soon, time.Millisecond)
	require.Contains(t, m.logs.String(), `"bytes_down"`)
	require.InDelta(t, 1, testutil.ToFloat64(m.server.metrics.Tunnels.WithLabelValues("ns", "operator", "")), 0)
	for _, way := range []string{"up", "down"} {
		require.Greater(t, testutil.ToFloat64(m.server.metrics.TunnelBytes.WithLabelValues("ns", "operator", "", way)), 500.0)
	}
	require.Eventually(t, func() bool { return m.pod.accepting.conns.Open.Taken() <= 1 }, soon, time.Millisecond)
}

func TestConnectionOlderThanPassthroughIsRefused(t *testing.T) {
	t.Parallel()
	m, _ := authenticating(t)
	m.policy(nil)
	plain := m.client(true)
	require.Equal(t, 200, m.with(plain, "GET", "/version", "").StatusCode)
	m.passthrough(true)
	require.Equal(t, 200, m.with(plain, "GET", "/version", "").StatusCode, "is served")
	tunnels := m.server.metrics.Tunnels.WithLabelValues("ns", "operator", "")
	require.Eventually(t, func() bool { // and asked to open another
		require.Equal(t, 200, m.with(plain, "GET", "/version", "").StatusCode)
		return testutil.ToFloat64(tunnels) > 0
	}, soon, time.Millisecond)
}

func TestTunnelsAreCutWithThePod(t *testing.T) {
	t.Parallel()
	m, _ := authenticating(t)
	m.passthrough(true)
	resp, err := m.client(true).Get("https://kubernetes.default.svc/api/v1/pods?watch=1")
	require.NoError(t, err)
	defer resp.Body.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, m.pod.Drain(ctx), context.DeadlineExceeded)
	_, err = io.ReadAll(resp.Body)
	require.Error(t, err)
	require.Eventually(t, func() bool { return m.pod.accepting.conns.Open.Taken() == 0 }, soon, time.Millisecond)
}

func TestRelay(t *testing.T) {
	t.Parallel()
	client, down := tcptest.Pair(t)
	up, server := tcptest.Pair(t)
	type sums struct{ sent, received int64 }
	done := make(chan sums, 1)
	go func() {
		sent, received := relay.Both(down, up, time.Minute)
		done <- sums{sent, received}
	}()
	_, err := io.WriteString(client, "question")
	require.NoError(t, err)
	require.NoError(t, client.CloseWrite())
	b, err := io.ReadAll(server)
	require.NoError(t, err)
	require.Equal(t, "question", string(b))
	_, err = io.WriteString(server, "an answer")
	require.NoError(t, err)
	require.NoError(t, server.Close())
	b, err = io.ReadAll(client)
	require.NoError(t, err)
	require.Equal(t, "an answer", string(b))
	require.Equal(t, sums{8, 9}, <-done)
}
