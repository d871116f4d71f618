package proxy

import (
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// A watch behind a proxy subresource, such as one of a member cluster, reaches the client event by
// event.
func TestWatchThroughAProxySubresource(t *testing.T) {
	const path = "/apis/cluster.karmada.io/v1alpha1/clusters/one/proxy/api/v1/configmaps?watch=true"
	for name, http2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", jsonType)
				_, _ = w.Write(usualEvent)
				w.(http.Flusher).Flush()
				<-r.Context().Done()
			}))
			m.policy(policytest.Divided(sharding.Keys("ns-0"), meshv1.Method_METHOD_FILTER))
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://kubernetes.default.svc"+path, nil)
			require.NoError(t, err)
			resp, err := m.client(http2).Do(r)
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Equal(t, http.StatusOK, resp.StatusCode)
			got := make([]byte, len(usualEvent))
			_, err = io.ReadFull(resp.Body, got)
			require.NoError(t, err)
			require.Equal(t, usualEvent, got)
		})
	}
}
