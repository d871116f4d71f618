package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	intruderAddress   = "127.0.0.2"
	prometheusAddress = "127.0.0.3"
)

// endpoint is the server of health and metrics at all loopback addresses.
type endpoint struct {
	t       *testing.T
	address string
	metrics *Metrics
}

func serveEndpointsOf(t *testing.T, h http.Handler) *endpoint {
	t.Helper()
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	require.NoError(t, err)
	e := &endpoint{t, fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port), NewMetrics(prometheus.NewRegistry())}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, h, e.metrics.RefusedEndpoint) }()
	t.Cleanup(func() { cancel(); assert.NoError(t, <-done) })
	return e
}

func dialerFrom(from string) *net.Dialer {
	return &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
}

// stall opens connections that begin a request and send no more.
func (e *endpoint) stall(from string, n int) (open []net.Conn) {
	e.t.Helper()
	head := []byte("GET /metrics HTTP/1.1\r\nHost: x\r\nX-Padding: " + strings.Repeat("x", maxEndpointHeader/2))
	for range n {
		c, err := dialerFrom(from).Dial("tcp4", e.address)
		require.NoError(e.t, err)
		e.t.Cleanup(func() { _ = c.Close() })
		_, _ = c.Write(head) // it may be closed already
		open = append(open, c)
	}
	return open
}

// get asks from an address on a connection of its own.
func (e *endpoint) get(from, path string) (status int, body string, err error) {
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DialContext: dialerFrom(from).DialContext, DisableKeepAlives: true,
	}}
	response, err := client.Get("http://" + e.address + path)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

func (e *endpoint) require(from, path string) string {
	e.t.Helper()
	status, body, err := e.get(from, path)
	require.NoError(e.t, err)
	require.Equal(e.t, http.StatusOK, status, body)
	return body
}

func TestStalledConnectionsDoNotBlockOthers(t *testing.T) {
	registry := prometheus.NewRegistry()
	NewMetrics(registry)
	healthy := func() error { return nil }
	e := serveEndpointsOf(t, Handler(healthy, healthy, registry))
	const flood = 600
	began := time.Now()
	// A stalled connection makes room once it is closed.
	stalled := func() bool { return time.Since(began) < endpointReadTimeout }
	e.stall(intruderAddress, flood)

	assert.Contains(t, e.require(prometheusAddress, "/metrics"), "ctrlmesh_agent_refused_connections_total")
	e.require(prometheusAddress, "/healthz")
	e.require(intruderAddress, "/healthz") // as the kubelet has the address of hostNetwork pods
	perPeer := testutil.ToFloat64(e.metrics.refused.WithLabelValues("per_peer"))
	if stalled() {
		assert.GreaterOrEqual(t, perPeer, float64(flood-maxEndpointPerPeer))
	}

	t.Run("of many peers", func(t *testing.T) {
		began = time.Now()
		for i := range 2 * maxEndpointConnections / maxEndpointPerPeer {
			e.stall(fmt.Sprintf("127.0.1.%d", i), maxEndpointPerPeer)
		}
		e.require(prometheusAddress, "/metrics")
		e.require(intruderAddress, "/healthz")
		total := testutil.ToFloat64(e.metrics.refused.WithLabelValues("total"))
		if stalled() {
			assert.GreaterOrEqual(t, total, float64(maxEndpointConnections))
		}
	})
}

func TestRequestHeadsAreBounded(t *testing.T) {
	e := serveEndpointsOf(t, http.NotFoundHandler())
	c, err := net.Dial("tcp4", e.address)
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	go func() { // the server stops reading
		_, _ = io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: x\r\nX-Padding: "+strings.Repeat("x", 1<<20)+"\r\n\r\n")
	}()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(6*endpointReadTimeout)))
	answer := make([]byte, len("HTTP/1.1 431"))
	_, err = io.ReadFull(c, answer)
	require.NoError(t, err)
	assert.Equal(t, "HTTP/1.1 431", string(answer))
}

func TestStalledHeadsAreClosed(t *testing.T) {
	e := serveEndpointsOf(t, http.NotFoundHandler())
	c := e.stall(intruderAddress, 1)[0]
	require.NoError(t, c.SetReadDeadline(time.Now().Add(6*endpointReadTimeout)))
	_, err := io.Copy(io.Discard, c)
	var timeout net.Error
	assert.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the server closes it: %v", err)
}

// counting is a gatherer that knows how often it was asked.
type counting struct {
	prometheus.Gatherer
	gathered atomic.Int64
}

func (c *counting) Gather() ([]*dto.MetricFamily, error) {
	c.gathered.Add(1)
	return c.Gatherer.Gather()
}

func TestRenderingsAreShared(t *testing.T) {
	registry := prometheus.NewRegistry()
	gauge := prometheus.NewGauge(prometheus.GaugeOpts{Name: "subject"})
	registry.MustRegister(gauge)
	gatherer := &counting{Gatherer: registry}
	e := serveEndpointsOf(t, &exposition{gatherer: gatherer})
	began := time.Now()
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() { _, _, _ = e.get(fmt.Sprintf("127.0.1.%d", i), "/metrics") })
	}
	wg.Wait()
	assert.LessOrEqual(t, gatherer.gathered.Load(), 1+int64(time.Since(began)/renderInterval))

	t.Run("and fresh", func(t *testing.T) {
		for i := range 3 {
			gauge.Set(float64(i))
			assert.Contains(t, e.require(prometheusAddress, "/metrics"), fmt.Sprintf("subject %d\n", i))
		}
	})
}
