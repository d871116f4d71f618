package proxy

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// A process that dies may leave a write upstream. It is over when it is answered.
func TestQuietWaitsForWritesOfExitedProcesses(t *testing.T) {
	t.Parallel()
	for name, http2 := range map[string]bool{"http2": true, "http1": false} {
		t.Run(name, func(t *testing.T) {
			arrived, answer := make(chan struct{}), make(chan struct{})
			api := &recorder{then: func(http.ResponseWriter, *http.Request) { arrived <- struct{}{}; <-answer }}
			m := newMesh(t, api)
			m.policy(policytest.LimitTo("shard=a"))

			ctx, die := context.WithCancel(t.Context())
			c := m.client(http2)
			var conn net.Conn // of a process that dies the kernel closes it
			c.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
				var err error
				conn, err = (&net.Dialer{}).DialContext(ctx, network, m.addr)
				return conn, err
			}
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				r, _ := http.NewRequestWithContext(ctx, "POST", "https://kubernetes.default.svc/api/v1/namespaces/a/pods", strings.NewReader("{}"))
				if resp, err := c.Do(r); err == nil {
					_ = resp.Body.Close()
				}
			}()
			<-arrived

			short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			require.ErrorIs(t, m.pod.Quiet(short), context.DeadlineExceeded, "he lives")

			die()
			<-gone
			_ = conn.Close()
			quiet := make(chan error, 1)
			go func() { quiet <- m.pod.Quiet(t.Context()) }()
			select {
			case err := <-quiet:
				t.Fatalf("a write is under way, and that is quiet (%v)", err)
			case <-time.After(50 * time.Millisecond):
			}
			close(answer)
			require.NoError(t, <-quiet)
			require.Equal(t, "v", m.pod.Version())
		})
	}
}

func TestQuietReturnsAtOnceWithoutConnections(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	require.Error(t, m.pod.Quiet(t.Context()), "nothing is known before there is a policy")
	m.policy(policytest.LimitTo("shard=a"))
	require.NoError(t, m.pod.Quiet(t.Context()))
}
