package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os/exec"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

// A client that takes the apiserver's CA from elsewhere ends the handshake. Only its own log would
// say so.
func TestClientsThatDoNotTrustTheMeshAreReported(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	notified := make(chan string, 1)
	m.server.config.Notify = func(_ PodInfo, reason, message string) { notified <- reason + " " + message }
	counted := func() float64 { return testutil.ToFloat64(m.pod.workload().Counter(m.server.metrics.Distrusted)) }
	await := func(n float64) {
		t.Helper()
		require.Eventually(t, func() bool { return counted() == n }, soon, time.Millisecond)
	}

	require.Equal(t, 200, m.with(m.client(true), "GET", "/api/v1/pods", "").StatusCode)
	_, err := tls.Dial("tcp", m.addr, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}) // another error
	require.Error(t, err)
	require.False(t, m.pod.Distrusted())
	require.Zero(t, counted())

	for i, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		_, err := tls.Dial("tcp", m.addr, &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "kubernetes.default.svc", MinVersion: version, MaxVersion: version})
		require.Error(t, err)
		await(float64(i + 1))
	}
	require.True(t, m.pod.Distrusted())
	require.Contains(t, <-notified, "MeshCANotTrusted a client in pod ns/pod does not trust the mesh's CA")

	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	for i, version := range []string{"-tls1_2", "-tls1_3"} { // which does not encrypt the alert
		out, err := exec.CommandContext(ctx, needs.Program(t, "openssl"), "s_client", version, "-verify_return_error", "-no-CApath", "-connect", m.addr).CombinedOutput()
		require.Error(t, err, "%s", out)
		await(float64(3 + i))
	}
	m.pod.accepting.distrust.Store(time.Now().Add(-distrustFor).UnixNano())
	require.False(t, m.pod.Distrusted(), "it was long ago")
}
