package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/certs"
)

// The benchmarks compare this proxy with httputil.ReverseProxy in the same run,
// TLS and HTTP/2 on both sides of it, the same fake apiserver behind both. The
// cost of client and apiserver is in every row, "direct" is they alone.
func BenchmarkProxy(b *testing.B) {
	item := `{"metadata":{"name":"config-%04d","namespace":"default","uid":"00000000-0000-0000-0000-000000000000"},"data":{"k":"` + strings.Repeat("x", 1000) + `"}}`
	var list strings.Builder
	list.WriteString(`{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[`)
	for i := range 5000 {
		if i > 0 {
			list.WriteByte(',')
		}
		fmt.Fprintf(&list, item, i)
	}
	list.WriteString("]}")
	big, small := []byte(list.String()), []byte(fmt.Sprintf(item, 0))
	event := []byte(`{"type":"MODIFIED","object":` + string(small) + "}\n")

	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.URL.Query().Get("watch") == "paced":
			w.WriteHeader(200)
			tick := time.NewTicker(time.Second / 500)
			defer tick.Stop()
			for range 1000 {
				<-tick.C
				if _, err := w.Write(event); err != nil {
					return
				}
				w.(http.Flusher).Flush()
			}
		case r.URL.Query().Get("watch") != "":
			w.WriteHeader(200)
			for range 5000 {
				if _, err := w.Write(event); err != nil {
					return
				}
				w.(http.Flusher).Flush()
			}
		case strings.HasSuffix(r.URL.Path, "configmaps"):
			for p := big; len(p) > 0; { // as the apiserver does: no length, pieces
				n := min(len(p), 128<<10)
				_, _ = w.Write(p[:n])
				p = p[n:]
			}
		default:
			_, _ = w.Write(small)
		}
	})
	const one, all = "/api/v1/namespaces/default/configmaps/config-0000", "/api/v1/namespaces/default/configmaps"
	rows := []struct {
		name, path string
		bytes      int
		parallel   bool
	}{
		{"get-1KB", one, len(small), false},
		{"get-1KB-parallel", one, len(small), true},
		{"list-6MB", all, len(big), false},
		{"watch-5000-events", all + "?watch=1", 5000 * len(event), false},
		{"watch-500-per-second", all + "?watch=paced", 1000 * len(event), false},
	}
	for _, row := range rows {
		for _, s := range []struct {
			name string
			via  func(testing.TB, http.Handler) *http.Client
		}{{"direct", direct}, {"ctrlmesh", viaMesh}, {"reverseproxy", viaReverseProxy}} {
			b.Run(row.name+"/"+s.name, func(b *testing.B) {
				c := s.via(b, api)
				b.SetBytes(int64(row.bytes))
				b.ReportAllocs()
				get := func() error {
					resp, err := c.Get("https://kubernetes.default.svc" + row.path)
					if err != nil {
						return err
					}
					defer resp.Body.Close()
					n, err := io.Copy(io.Discard, resp.Body)
					if err == nil && n != int64(row.bytes) {
						err = fmt.Errorf("got %d bytes", n)
					}
					return err
				}
				require.NoError(b, get())
				cpu := processCPU()
				b.ResetTimer()
				if row.parallel {
					b.SetParallelism(16)
					b.RunParallel(func(pb *testing.PB) {
						for pb.Next() {
							if err := get(); err != nil {
								b.Error(err)
							}
						}
					})
				} else {
					for b.Loop() {
						if err := get(); err != nil {
							b.Fatal(err)
						}
					}
				}
				b.ReportMetric(float64((processCPU()-cpu).Microseconds())/float64(b.N), "cpu-us/op")
			})
		}
	}
}

func viaMesh(b testing.TB, api http.Handler) *http.Client {
	m := newMesh(b, api)
	quiet, err := New(Config{Leaf: m.server.config.Leaf, Registerer: prometheus.NewRegistry()})
	require.NoError(b, err)
	m.server.log = quiet.log
	m.policy(nil)
	return m.client(true)
}

func direct(b testing.TB, api http.Handler) *http.Client {
	ca := certs.New()
	return clientOf(b, ca, serveTLS(b, ca, api))
}

func viaReverseProxy(b testing.TB, api http.Handler) *http.Client {
	ca := certs.New()
	addr := serveTLS(b, ca, api)
	target := &url.URL{Scheme: "https", Host: "kubernetes.default.svc"}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     clientOf(b, ca, addr).Transport,
		FlushInterval: -1,
	}
	return clientOf(b, ca, serveTLS(b, ca, proxy))
}

func serveTLS(b testing.TB, ca *certs.Authority, h http.Handler) string {
	s := httptest.NewUnstartedServer(h)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{*ca.Leaf("kubernetes.default.svc")}}
	s.EnableHTTP2 = true
	s.StartTLS()
	b.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

func clientOf(b testing.TB, ca *certs.Authority, addr string) *http.Client {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca.PEM())
	tr := &http.Transport{
		TLSClientConfig:    &tls.Config{RootCAs: pool, ServerName: "kubernetes.default.svc"},
		ForceAttemptHTTP2:  true,
		DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, network, addr)
		},
	}
	b.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func BenchmarkFaultsCounted(b *testing.B) {
	m := newMesh(b, &recorder{})
	var pods atomic.Int32
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		p := m.server.Pod(PodInfo{UID: "uid", Namespace: fmt.Sprint("ns-", pods.Add(1)), Name: "p"}, m.dial)
		_, err := p.Apply(&meshv1.PodPolicy{Uid: "uid", Workload: "operator", Version: "v", Traffic: &meshv1.Traffic{
			Injections: []*meshv1.Injection{{Name: "chaos", Rules: []*meshv1.FaultRule{{Name: "r0", Key: "k"}}}},
		}})
		if err != nil {
			b.Error(err)
			return
		}
		pol := p.env.Policy.Load()
		for pb.Next() {
			pol.CountFault(fault.Injected{Injection: "chaos", Rule: "r0", Kind: fault.Delay})
		}
	})
}
