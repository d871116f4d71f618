package proxy

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/certs"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// BenchmarkOpenWatches measures the memory of an open watch in the proxy after its first event.
// The client and the apiserver are another process. -benchtime=4000x opens 4,000 watches;
// HTTP/1.1 opens no more than the proxy accepts connections.
func BenchmarkOpenWatches(b *testing.B) {
	if os.Getenv(peersVariable) != "" {
		servePeers()
	}
	for _, protocol := range []string{"HTTP/2", "HTTP/1.1"} {
		for _, row := range []struct {
			name   string
			policy *meshv1.Sharding
		}{{"passed", nil}, {"filtered", policytest.Divided(sharding.Keys("ns-0"), meshv1.Method_METHOD_FILTER)}} {
			b.Run(protocol+"/"+row.name, func(b *testing.B) {
				n := b.N
				if protocol == "HTTP/1.1" {
					n = min(n, downstream.MaxConnections-1)
				}
				m := newMesh(b, http.NotFoundHandler())
				m.server.log = slog.New(slog.DiscardHandler) // as in production: no access lines
				m.policy(row.policy)
				p := startPeers(b, m)
				p.watch(protocol, 1)
				before := measure()
				p.watch(protocol, n)
				after := measure()
				b.ReportMetric(float64(after.heap-before.heap)/float64(n), "B/watch")
				b.ReportMetric(float64(after.goroutines-before.goroutines)/float64(n), "goroutines/watch")
				b.ReportMetric(float64(m.pod.budgets.Long.Taken())/float64(n+1), "charged-B/watch")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// peersVariable is set in the process of peers.
const peersVariable = "CTRLMESH_BENCHMARK_PEERS"

// peers are a client and an apiserver in a process of their own.
type peers struct {
	b   *testing.B
	m   *mesh
	in  *json.Encoder
	out *bufio.Scanner
}

// opening is a request to open watches.
type opening struct {
	Proxy, Protocol string
	Watches         int
}

// startPeers makes m forward to the apiserver of a new process.
func startPeers(b *testing.B, m *mesh) *peers {
	cmd := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkOpenWatches$")
	cmd.Env, cmd.Stderr = append(os.Environ(), peersVariable+"=1"), os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(b, err)
	out, err := cmd.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	b.Cleanup(func() {
		_ = in.Close() // it exits
		require.NoError(b, cmd.Wait())
	})
	p := &peers{b, m, json.NewEncoder(in), bufio.NewScanner(out)}
	var cluster meshv1.Cluster
	require.NoError(b, json.Unmarshal(p.line(), &cluster))
	require.NoError(b, m.server.SetCluster(&cluster))
	return p
}

func (p *peers) line() []byte {
	require.True(p.b, p.out.Scan(), "the peers have exited")
	return p.out.Bytes()
}

// watch returns when more watches are open and have had an event.
func (p *peers) watch(protocol string, more int) {
	require.NoError(p.b, p.in.Encode(opening{p.m.addr, protocol, more}))
	require.Equal(p.b, "open", string(p.line()))
}

// servePeers is the process of peers. It exits when its standard input ends.
func servePeers() {
	ca := certs.New()
	api := httptest.NewUnstartedServer(http.HandlerFunc(watchOneEvent))
	api.TLS = &tls.Config{Certificates: []tls.Certificate{*ca.Leaf("kubernetes.default.svc")}}
	api.Config.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 100} // as kube-apiserver
	api.EnableHTTP2 = true
	api.StartTLS()
	out := json.NewEncoder(os.Stdout)
	_ = out.Encode(&meshv1.Cluster{ServiceAddresses: []string{api.Listener.Addr().String()}, Ca: ca.PEM()})
	in := json.NewDecoder(os.Stdin)
	for {
		var o opening
		if in.Decode(&o) != nil {
			os.Exit(0)
		}
		if err := o.open(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("open")
	}
}

// usualEvent is an event of a usual size.
var usualEvent = []byte(`{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"namespace":"ns-0","name":"c","resourceVersion":"7"},"data":{"k":"` +
	strings.Repeat("x", 3000) + "\"}}}\n")

func watchOneEvent(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", jsonType)
	_, _ = w.Write(usualEvent)
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

// open opens watches as client-go does.
func (o opening) open() error {
	tr := &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
		ForceAttemptHTTP2: o.Protocol == "HTTP/2",
	}
	if o.Protocol != "HTTP/2" {
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	for i := range o.Watches {
		req, err := http.NewRequest("GET", "https://"+o.Proxy+"/api/v1/configmaps?allowWatchBookmarks=true&resourceVersion=0&timeoutSeconds=431&watch=true", nil)
		if err != nil {
			return err
		}
		req.Header.Set("Accept", "application/json, */*")
		req.Header.Set("User-Agent", "operator/v0.0.0 (linux/amd64) kubernetes/$Format")
		req.Header.Set("Authorization", "Bearer "+strings.Repeat("x", 1100))
		resp, err := tr.RoundTrip(req)
		if err != nil {
			return err
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, len(usualEvent))); err != nil {
			return fmt.Errorf("watch %d: status %d: %w", i, resp.StatusCode, err)
		}
	}
	return nil
}
