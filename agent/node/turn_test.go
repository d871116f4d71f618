package node

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
)

func TestProbesDoNotWaitForTheLoop(t *testing.T) {
	r := start(t, 0)
	server := httptest.NewServer(telemetry.Handler(r.Healthy, r.Ready, prometheus.NewRegistry()))
	t.Cleanup(server.Close)
	get := func(path string) (status int, body string) {
		response, err := server.Client().Get(server.URL + path)
		require.NoError(t, err)
		defer func() { _ = response.Body.Close() }()
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.StatusCode, string(text)
	}
	entered, release := make(chan struct{}), make(chan struct{})
	finished := make(chan error, 1)
	go func() {
		finished <- r.do(t.Context(), func() error { close(entered); <-release; return nil })
	}()
	<-entered
	// The loop answers nothing before release is closed.
	if status, body := get("/healthz"); status != http.StatusOK {
		require.Greater(t, time.Since(r.turn.Load().ended), loopStalledAfter, body)
	}

	for _, path := range []string{"/healthz", "/readyz"} {
		require.Eventually(t, func() bool { status, _ := get(path); return status == http.StatusServiceUnavailable },
			soon, 50*time.Millisecond, path)
		_, body := get(path)
		require.Contains(t, body, "stalled", path)
	}
	close(release)
	require.NoError(t, <-finished)
	require.Eventually(t, func() bool { status, _ := get("/healthz"); return status == http.StatusOK }, soon, 10*time.Millisecond)
}
