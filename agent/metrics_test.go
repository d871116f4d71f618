package agent

import (
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
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
