package proxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/redirected"
)

func TestPodServesEgressWithItsPolicy(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Host) }))
	defer other.Close()
	dialed := make(chan string, 100)
	pod := m.server.Pod(PodInfo{UID: "uid-2", Namespace: "ns", Name: "other"}, func(ctx context.Context, network, addr string) (net.Conn, error) {
		dialed <- addr
		return (&net.Dialer{}).DialContext(ctx, network, other.Listener.Addr().String())
	})
	cluster := m.cluster()
	cluster.ServiceAddresses = append(cluster.ServiceAddresses, "192.0.2.9:443")
	require.NoError(t, m.server.SetCluster(cluster))
	serve := func(to string) (at string, served chan error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		served = make(chan error, 1)
		go func() { served <- pod.ServeEgress(redirected.Listener{Listener: l, To: netip.MustParseAddrPort(to)}) }()
		return l.Addr().String(), served
	}
	ask := func(at, host string) string {
		c, err := net.Dial("tcp", at)
		require.NoError(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(soon))
		_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+host+"\r\nConnection: close\r\n\r\n")
		require.NoError(t, err)
		b, _ := io.ReadAll(c)
		return string(b)
	}
	at, served := serve("192.0.2.1:80")
	require.Empty(t, ask(at, "early.example.com"), "before the first policy")
	set := func(traffic *meshv1.Traffic) {
		_, err := pod.Apply(&meshv1.PodPolicy{Uid: "uid-2", Workload: "w", Version: "v", Traffic: traffic})
		require.NoError(t, err)
	}
	allow := func(host string) *meshv1.Traffic {
		return &meshv1.Traffic{Egress: &meshv1.Egress{Ports: []uint32{80}}, Breakers: []*meshv1.Breaker{{Name: "cb", Intercepts: []*meshv1.InterceptRule{{
			Name: "r", Http: []*meshv1.HttpMatch{{Host: &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: host}}}},
		}}}}}
	}
	set(allow("a.example.com"))
	require.Contains(t, ask(at, "a.example.com"), "200 OK")
	require.Contains(t, ask(at, "b.example.com"), "403 Forbidden")
	set(allow("b.example.com"))
	require.Contains(t, ask(at, "b.example.com"), "200 OK")
	set(nil)
	require.Contains(t, ask(at, "a.example.com"), "200 OK", "without rules all passes")
	require.Len(t, dialed, 3)
	for range 3 {
		require.Equal(t, "192.0.2.1:80", <-dialed)
	}
	forbidden, servedToo := serve("192.0.2.9:443")
	require.Empty(t, ask(forbidden, "a.example.com"), "the apiserver is not reached that way")
	require.Empty(t, dialed)
	require.NoError(t, testutil.GatherAndCompare(m.registry, strings.NewReader(`
# HELP ctrlmesh_egress_requests_total Requests of captured pods to other hosts than the apiserver, or connections where requests cannot be seen, by verdict.
# TYPE ctrlmesh_egress_requests_total counter
ctrlmesh_egress_requests_total{namespace="ns",protocol="http",shard="",verdict="denied",workload="w"} 1
ctrlmesh_egress_requests_total{namespace="ns",protocol="http",shard="",verdict="passed",workload="w"} 2
ctrlmesh_egress_requests_total{namespace="ns",protocol="other",shard="",verdict="denied",workload=""} 1
ctrlmesh_egress_requests_total{namespace="ns",protocol="other",shard="",verdict="denied",workload="w"} 1
ctrlmesh_egress_requests_total{namespace="ns",protocol="other",shard="",verdict="passed",workload="w"} 1
`), "ctrlmesh_egress_requests_total"))

	// A tunnel goes on while the pod drains, and ends with it.
	tunnel, err := net.Dial("tcp", at)
	require.NoError(t, err)
	defer tunnel.Close()
	require.Eventually(t, func() bool { return pod.egress.Conns.Open.Taken() == 1 }, soon, time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	drained := make(chan error, 1)
	go func() { drained <- pod.Drain(ctx) }()
	require.NoError(t, <-served)
	require.NoError(t, <-servedToo)
	_, err = io.WriteString(tunnel, "GET / HTTP/1.1\r\nHost: late\r\n\r\n")
	require.NoError(t, err)
	b := make([]byte, len("HTTP/1.1 200"))
	_, err = io.ReadFull(tunnel, b)
	require.NoError(t, err)
	require.Equal(t, "HTTP/1.1 200", string(b))
	cancel()
	require.ErrorIs(t, <-drained, context.Canceled)
	require.Eventually(t, func() bool { return pod.egress.Conns.Open.Taken() == 0 }, soon, time.Millisecond)
}
