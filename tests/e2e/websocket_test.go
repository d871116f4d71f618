package e2e

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/gorilla/websocket"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
)

// Java clients open watches by WebSocket, and read on by HTTP if they get 200. A log is
// really upgraded.
func (m *members) testWebSocket(t *testing.T) {
	config := from(t, m.pods[0])
	trusted, err := rest.TLSConfigFor(config)
	require.NoError(t, err)
	dialer := websocket.Dialer{NetDialContext: config.Dial, TLSClientConfig: trusted, Subprotocols: []string{"binary.k8s.io"}}
	ask := func(path string) (*websocket.Conn, *http.Response) {
		header := http.Header{"Authorization": {"Bearer " + config.BearerToken}}
		conn, resp, err := dialer.DialContext(t.Context(), strings.Replace(config.Host, "https://", "wss://", 1)+path, header)
		if conn != nil {
			t.Cleanup(func() { _ = conn.Close() })
		}
		require.NotNil(t, resp, "%s: %v", path, err)
		return conn, resp
	}

	conn, resp := ask("/api/v1/configmaps?watch=true&timeoutSeconds=1")
	require.Nil(t, conn)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	body, err := io.ReadAll(resp.Body) // the dialer keeps its beginning
	require.NoError(t, err)
	seen := regexp.MustCompile(`"namespace":"([^"]+)"`).FindAllSubmatch(body, -1)
	require.NotEmpty(t, seen, "%s", body)
	for _, of := range seen {
		require.Contains(t, m.owned[0], string(of[1]))
	}

	conn, resp = ask(fmt.Sprintf("/api/v1/namespaces/%s/pods/%s/log", m.home, m.pods[0].Name))
	require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
	require.Equal(t, "binary.k8s.io", conn.Subprotocol())
}
