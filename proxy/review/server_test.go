package review

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/webhook"
)

const soon = 30 * time.Second

var otherPod = netip.MustParseAddr("192.0.2.1")

// world is a Server between a client, the application and a pod of another shard.
type world struct {
	*testing.T
	*Server
	application, other *httptest.Server
	client             *http.Client
	url                string
	decisions          map[string]*atomic.Int64
}

func newWorld(t *testing.T, application, other http.Handler) *world {
	w := &world{T: t, application: httptest.NewUnstartedServer(application), other: httptest.NewUnstartedServer(other), decisions: map[string]*atomic.Int64{}}
	for _, s := range []*httptest.Server{w.application, w.other} {
		s.EnableHTTP2 = true
		s.StartTLS()
		t.Cleanup(s.Close)
	}
	for _, d := range []string{Local, Forwarded, Unreachable, Allowed} {
		w.decisions[d] = &atomic.Int64{}
	}
	w.Server = NewServer(Config{
		Pod: "ns/one",
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			to := w.application.Listener.Addr().String()
			if netip.MustParseAddrPort(addr).Addr() == otherPod {
				to = w.other.Listener.Addr().String()
			}
			return (&net.Dialer{}).DialContext(ctx, network, to)
		},
		Conns: downstream.NewPools().Conns(func(string) {}),
		Held:  &bounds.Account{Pool: bounds.NewPool(1<<30, 1<<20), Own: 1 << 20},
		Log:   slog.New(slog.DiscardHandler),
		Count: func(decision string) { w.decisions[decision].Add(1) },
	})
	w.SetCertificate(&w.application.TLS.Certificates[0])
	pool := x509.NewCertPool()
	pool.AddCert(w.application.Certificate())
	w.SetRoutes(&Routes{
		Routes: webhook.Routes{Shard: "one", Owners: []webhook.Owner{{Shard: "one", Scope: sharding.Keys("a")}, {Shard: "two", Scope: sharding.Keys("b")}}},
		Pods:   map[string][]netip.Addr{"two": {otherPod}}, Authorities: map[string]*x509.CertPool{"example.com": pool},
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w.url = "https://" + l.Addr().String() + "/mutate"
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "example.com"}, ForceAttemptHTTP2: true}
	w.client = &http.Client{Transport: transport, Timeout: soon}
	served := make(chan error, 1)
	go func() { served <- w.Serve(l) }()
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		w.Stop()
		w.Cut()
		require.NoError(t, <-served)
	})
	return w
}

func (w *world) post(body io.Reader) (int, string) {
	w.Helper()
	resp, err := w.client.Post(w.url, "application/json", body)
	require.NoError(w, err)
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	require.NoError(w, err)
	return resp.StatusCode, string(got)
}

// reviewOf returns a review about a namespace with an object of some size.
func reviewOf(namespace string, size int) string {
	return `{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":"u","kind":{"group":"","version":"v1","kind":"Pod"},` +
		`"resource":{"group":"","version":"v1","resource":"pods"},"name":"x","namespace":"` + namespace + `","operation":"CREATE","object":{"x":"` + strings.Repeat("y", size) + `"}}}`
}

// echo answers with a name and the size of the body.
func echo(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, name+" "+http.StatusText(http.StatusOK)+" "+strings.Repeat("x", int(n%7)))
	})
}

func TestReviewsOfAnySizeArriveWhole(t *testing.T) {
	sizes := []int{0, 1000, maxRead - 300, maxRead, 3 * maxRead}
	got := make(chan string, 1)
	record := func(name string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			got <- string(body)
			_, _ = io.WriteString(w, name)
		})
	}
	w := newWorld(t, record("one"), record("two"))
	for _, size := range sizes {
		for namespace, want := range map[string]string{"a": "one", "b": "two"} {
			sent := reviewOf(namespace, size)
			for name, body := range map[string]io.Reader{"length": strings.NewReader(sent), "chunked": io.MultiReader(strings.NewReader(sent))} {
				code, who := w.post(body)
				require.Equal(t, http.StatusOK, code, "%d %s", size, name)
				require.Equal(t, want, who, "%d %s", size, name)
				require.True(t, sent == <-got, "%d %s", size, name)
			}
		}
	}
}

func TestBodiesThatAreNoReviewReachTheApplication(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	for _, body := range []string{"", "{", "\x00", `{"kind":"Pod"}`, strings.Repeat("x", 2*maxRead)} {
		code, who := w.post(strings.NewReader(body))
		require.Equal(t, http.StatusOK, code)
		require.True(t, strings.HasPrefix(who, "one"), who)
	}
	resp, err := w.client.Get(w.url)
	require.NoError(t, err)
	_ = resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.EqualValues(t, 6, w.decisions[Local].Load())
}

func TestStartedForwardIsRepeatedLocally(t *testing.T) {
	abort := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		panic(http.ErrAbortHandler)
	})
	w := newWorld(t, echo("one"), abort)
	w.other.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	code, who := w.post(strings.NewReader(reviewOf("b", 1000)))
	require.Equal(t, http.StatusOK, code)
	require.True(t, strings.HasPrefix(who, "one"), who)
	require.EqualValues(t, 1, w.decisions[Unreachable].Load())

	code, why := w.post(strings.NewReader(reviewOf("b", 3*maxRead)))
	require.Equal(t, http.StatusBadGateway, code, "it cannot be repeated")
	require.Contains(t, why, "did not answer")
}

func TestReviewsAboveTheBoundReachTheApplication(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	w.Held.Own, w.Held.Pool = 1000, bounds.NewPool(1000, 1000)
	code, who := w.post(strings.NewReader(reviewOf("b", 3*maxRead)))
	require.Equal(t, http.StatusOK, code)
	require.True(t, strings.HasPrefix(who, "one"), who)
	require.Zero(t, w.Held.Taken())
}

func TestDrainAnswersReviewsInProgress(t *testing.T) {
	started, finish := make(chan struct{}), make(chan struct{})
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(started)
		<-finish
		_, _ = io.WriteString(w, "one")
	}), echo("two"))
	answered := make(chan string, 1)
	go func() {
		_, who := w.post(strings.NewReader(reviewOf("a", 10)))
		answered <- who
	}()
	<-started
	w.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	drained := make(chan error, 1)
	go func() { drained <- w.Drain(ctx) }()
	close(finish)
	require.Equal(t, "one", <-answered)
	w.client.CloseIdleConnections()
	require.NoError(t, <-drained)
}

func TestPodsThatFailedAreTriedLast(t *testing.T) {
	var a avoided
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	failed := netip.MustParseAddr("192.0.2.2")
	a.add(failed)
	for range 20 {
		require.Equal(t, []netip.Addr{v4, v6, failed}, a.order([]netip.Addr{failed, v6, v4}, v4))
		require.Equal(t, []netip.Addr{v6, v4, failed}, a.order([]netip.Addr{failed, v6, v4}, v6))
	}
	require.Len(t, a.order([]netip.Addr{v4, v4.Next(), v6, v6.Next(), failed}, v4), maxAttempts)
}

// A client that sends slowly, and one that ends, keep nothing.
func TestClientsThatEndKeepNothing(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	ctx, cancel := context.WithCancel(t.Context())
	slow, end := io.Pipe()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, slow)
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if resp, err := w.client.Do(r); err == nil {
			_ = resp.Body.Close()
		}
	}()
	_, err = io.Copy(end, bytes.NewReader([]byte(`{"kind":`)))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return w.Held.Taken() > 0 }, soon, time.Millisecond)
	cancel()
	_ = end.Close()
	<-done
	require.Eventually(t, func() bool { return w.Held.Taken() == 0 }, soon, time.Millisecond)
}
