package agent

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/proxy"
	"github.com/ctrlmesh/ctrlmesh/tests/docs"
)

func TestStrangersAreCounted(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	at := free.Addr().String()
	require.NoError(t, free.Close())

	m := newMetrics(prometheus.NewRegistry())
	o := Options{Capture: capture.Address, AddressListen: at, BPFDir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)}
	method, err := capture.Open(o.capturing("", m))
	require.NoError(t, err)
	defer func() { require.NoError(t, method.Close()) }()

	conn, err := net.Dial("tcp", at)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, 1.0, testutil.ToFloat64(m.refused.WithLabelValues("stranger")))
	require.Equal(t, 0.0, testutil.ToFloat64(m.refused.WithLabelValues("queue_full")))
}

func TestAnAgentThatLostItsManagerShowsIt(t *testing.T) {
	r := prometheus.NewRegistry()
	inStep := false
	registerManager(r, func() bool { return inStep })
	for _, now := range []bool{false, true, false} {
		inStep = now
		require.NoError(t, testutil.GatherAndCompare(r, strings.NewReader(fmt.Sprintf(`
# HELP ctrlmesh_agent_manager_connected 1 while this agent hears a manager that has told it all; pods are served as last told otherwise.
# TYPE ctrlmesh_agent_manager_connected gauge
ctrlmesh_agent_manager_connected %v
`, number(now)))))
	}
}

// docs/metrics.md has what an agent serves, with its labels, and nothing else.
func TestMetricsAreDocumented(t *testing.T) {
	registry := prometheus.NewRegistry()
	newMetrics(registry)
	registerManager(registry, func() bool { return true })
	_, err := proxy.New(proxy.Config{Registerer: registry, Leaf: func() (*tls.Certificate, error) { return nil, nil }})
	require.NoError(t, err)
	docs.RequireMetrics(t, "../docs/metrics.md", "## Agent", registry)
}
