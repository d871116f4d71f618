package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// BenchmarkReconcile is what an operator does for a change: it writes a status of 5 KB,
// and sees two events of it. The cost of client and apiserver is in every row.
func BenchmarkReconcile(b *testing.B) {
	object := `{"kind":"Deployment","apiVersion":"apps/v1","metadata":{"name":"d","namespace":"ns-0","uid":"00000000-0000-0000-0000-000000000000","resourceVersion":"7"},` +
		`"spec":{"k":"` + strings.Repeat("x", 5000) + `"}}`
	event := []byte(`{"type":"MODIFIED","object":` + object + "}\n")
	written := make(chan struct{}, 2)
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method == "PUT" {
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = io.WriteString(w, object)
			written <- struct{}{}
			written <- struct{}{}
			return
		}
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		for {
			select {
			case <-written:
			case <-r.Context().Done():
				return
			}
			if _, err := w.Write(event); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		}
	})
	via := func(policy *meshv1.Sharding) func(testing.TB, http.Handler) *http.Client {
		return func(b testing.TB, api http.Handler) *http.Client {
			m := newMesh(b, api)
			quiet, err := New(Config{Leaf: m.server.config.Leaf, Registerer: prometheus.NewRegistry()})
			require.NoError(b, err)
			m.server.log = quiet.log
			m.policy(policy)
			return m.client(true)
		}
	}
	for _, s := range []struct {
		name string
		via  func(testing.TB, http.Handler) *http.Client
	}{
		{"direct", direct},
		{"ctrlmesh", via(nil)},
		{"ctrlmesh-filters", via(policytest.Divided(sharding.Keys("ns-0"), meshv1.Method_METHOD_FILTER))},
		{"reverseproxy", viaReverseProxy},
	} {
		b.Run(s.name, func(b *testing.B) {
			c := s.via(b, api)
			const deployments = "https://kubernetes.default.svc/apis/apps/v1/"
			watch, err := c.Get(deployments + "deployments?watch=1")
			require.NoError(b, err)
			defer watch.Body.Close()
			require.Equal(b, 200, watch.StatusCode)
			events := bufio.NewReaderSize(watch.Body, 16<<10)
			reconcile := func() error {
				req, err := http.NewRequest("PUT", deployments+"namespaces/ns-0/deployments/d/status", bytes.NewReader([]byte(object)))
				if err != nil {
					return err
				}
				resp, err := c.Do(req)
				if err != nil {
					return err
				}
				_, err = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				if err == nil && resp.StatusCode != 200 {
					err = fmt.Errorf("answered %d", resp.StatusCode)
				}
				for range 2 {
					if err == nil {
						_, err = events.ReadSlice('\n')
					}
				}
				return err
			}
			require.NoError(b, reconcile())
			b.ReportAllocs()
			cpu := processCPU()
			for b.Loop() {
				if err := reconcile(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((processCPU()-cpu).Microseconds())/float64(b.N), "cpu-us/op")
		})
	}
}
