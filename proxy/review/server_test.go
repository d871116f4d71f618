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
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/review/route"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
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
	lost               atomic.Bool // the other pod is lost, without an end of its connections
	silent             atomic.Bool // other pods do not answer when they are dialled
	recovers           atomic.Bool // a lost node is back when it is dialled
	dialed, reached    atomic.Int32
}

// losable is a connection of which nothing arrives any more once its peer is lost.
type losable struct {
	net.Conn
	lost *atomic.Bool
}

func (c losable) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.lost.Load() {
			return n, err
		}
	}
}

func (c losable) Write(b []byte) (int, error) {
	if c.lost.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func newWorld(t *testing.T, application, other http.Handler) *world {
	w := &world{T: t, application: httptest.NewUnstartedServer(application), other: httptest.NewUnstartedServer(other), decisions: map[string]*atomic.Int64{}}
	for _, s := range []*httptest.Server{w.application, w.other} {
		s.EnableHTTP2 = true
		s.StartTLS()
		t.Cleanup(s.Close)
	}
	for _, d := range []string{Local, Forwarded, Unreachable, Allowed, Refused} {
		w.decisions[d] = &atomic.Int64{}
	}
	pools := downstream.NewPools()
	conns := pools.Conns(func(string) { w.reached.Add(1) })
	conns.Peers = pools.PerPeer()
	w.Server = NewServer(Config{
		Pod: "ns/one",
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if netip.MustParseAddrPort(addr).Addr().IsLoopback() {
				return (&net.Dialer{}).DialContext(ctx, network, w.application.Listener.Addr().String())
			}
			w.dialed.Add(1)
			if w.silent.Load() {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			if w.recovers.Load() {
				w.lost.Store(false)
			}
			c, err := (&net.Dialer{}).DialContext(ctx, network, w.other.Listener.Addr().String())
			return losable{c, &w.lost}, err
		},
		Conns: conns,
		Held:  &bounds.Peers{Pool: bounds.NewPool(1<<30, 1<<20), Own: 1 << 20},
		Log:   slog.New(slog.DiscardHandler),
		Count: func(decision string) { w.decisions[decision].Add(1) },
	})
	w.SetCertificate(&w.application.TLS.Certificates[0])
	pool := x509.NewCertPool()
	pool.AddCert(w.application.Certificate())
	w.SetRoutes(&Routes{
		Routes: route.Routes{Shard: "one", Owners: []route.Owner{{Shard: "one", Scope: sharding.Keys("a")}, {Shard: "two", Scope: sharding.Keys("b")}}},
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
		gone, cancel := context.WithCancel(context.Background())
		cancel()
		w.Shutdown(gone)
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

// A node is lost, or an agent is stopped: nothing ends the connections that are open.
func TestLostOwnerLeavesReviewsToTheApplication(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	_, who := w.post(strings.NewReader(reviewOf("b", 10)))
	require.True(t, strings.HasPrefix(who, "two"), who)
	w.lost.Store(true)
	const timeout = 10 * time.Second // of the apiserver
	w.client.Timeout = timeout
	code, who := w.post(strings.NewReader(reviewOf("b", 10)))
	require.Equal(t, http.StatusOK, code)
	require.True(t, strings.HasPrefix(who, "one"), who)
	require.EqualValues(t, 1, w.decisions[Unreachable].Load())
}

func TestReviewsAboveTheBoundAreRefused(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	for name, bound := range map[string]int64{"head": 1000, "body": weight + maxRead} {
		t.Run(name, func(t *testing.T) {
			w.Held.Own, w.Held.Pool = bound, bounds.NewPool(bound, bound)
			resp, err := w.client.Post(w.url, "application/json", strings.NewReader(reviewOf("b", maxRead/2)))
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Equal(t, http.StatusTooManyRequests, resp.StatusCode)
			require.Equal(t, "1", resp.Header.Get("Retry-After"), "the apiserver tries again")
			require.Eventually(t, func() bool { return w.Held.Taken() == 0 }, soon, time.Millisecond)
		})
	}
	require.EqualValues(t, 2, w.decisions[Refused].Load())
	require.Zero(t, w.decisions[Local].Load(), "the owner was not asked")
}

// slowly returns a body that announces its length and sends nothing more, until it is closed.
func (w *world) slowly(length int64) (end func()) {
	body, pipe := io.Pipe()
	r, err := http.NewRequestWithContext(w.Context(), http.MethodPost, w.url, body)
	require.NoError(w, err)
	r.ContentLength = length
	done := make(chan struct{})
	go func() {
		defer close(done)
		if resp, err := w.client.Do(r); err == nil {
			_ = resp.Body.Close()
		}
	}()
	_, err = io.WriteString(pipe, `{"kind":`)
	require.NoError(w, err)
	return func() {
		_ = pipe.CloseWithError(io.ErrUnexpectedEOF)
		<-done
	}
}

func TestAnnouncedLengthsTakeNothing(t *testing.T) {
	const clients = 10
	w := newWorld(t, echo("one"), echo("two"))
	most := int64((clients + 2) * 2 * weight)
	w.Held.Own, w.Held.Pool = most, bounds.NewPool(most, most)
	for range clients {
		defer w.slowly(maxRead)()
	}
	require.Eventually(t, func() bool { return w.Held.Taken() > clients*weight }, soon, time.Millisecond)
	_, who := w.post(strings.NewReader(reviewOf("b", 10)))
	require.True(t, strings.HasPrefix(who, "two"), who)
}

func TestOneClientCannotTakeAllConnections(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	at := strings.TrimSuffix(strings.TrimPrefix(w.url, "https://"), "/mutate")
	closed := make(chan struct{}, 1)
	for range 2 * maxPerPeer {
		c, err := net.Dial("tcp", at)
		require.NoError(t, err)
		defer c.Close()
		go func() {
			_, _ = c.Read(make([]byte, 1))
			select {
			case closed <- struct{}{}:
			default:
			}
		}()
	}
	<-closed
	require.Eventually(t, func() bool { return w.Conns.Open.Taken() == maxPerPeer }, soon, time.Millisecond)
	w.client.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		other := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
		return other.DialContext(ctx, network, at)
	}
	_, who := w.post(strings.NewReader(reviewOf("b", 10)))
	require.True(t, strings.HasPrefix(who, "two"), who)
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

// The agent of an overloaded node answers too late, and then again.
func TestReviewOfALostConnectionGoesByAnother(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	w.post(strings.NewReader(reviewOf("b", 10)))
	w.lost.Store(true)
	w.recovers.Store(true)
	const timeout = 10 * time.Second // of the apiserver
	w.client.Timeout = timeout
	w.url += "?timeout=" + timeout.String()
	code, who := w.post(strings.NewReader(reviewOf("b", 10)))
	require.Equal(t, http.StatusOK, code)
	require.True(t, strings.HasPrefix(who, "two"), who)
	require.Zero(t, w.decisions[Unreachable].Load())
}

func TestPodsThatFailedAreNotChosen(t *testing.T) {
	var a avoided
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	failed := netip.MustParseAddr("192.0.2.2")
	require.Len(t, a.choose([]netip.Addr{v4, v4.Next(), v6, v6.Next(), failed}, v4), maxAttempts)
	a.add(failed)
	for range 20 {
		require.Equal(t, []netip.Addr{v4, v6}, a.choose([]netip.Addr{failed, v6, v4}, v4))
		require.Equal(t, []netip.Addr{v6, v4}, a.choose([]netip.Addr{failed, v6, v4}, v6))
	}
	require.Empty(t, a.choose([]netip.Addr{failed}, v4))
}

func TestUnreachablePodsLeaveTimeToAnswer(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	w.silent.Store(true)
	more := *w.Routes()
	more.Pods = map[string][]netip.Addr{"two": {otherPod, otherPod.Next(), otherPod.Next().Next()}}
	w.SetRoutes(&more)
	const timeout = 10 * time.Second // of the apiserver
	w.client.Timeout = timeout
	w.url += "?timeout=" + timeout.String()
	began := time.Now()
	for range 2 {
		code, who := w.post(strings.NewReader(reviewOf("b", 10)))
		require.Equal(t, http.StatusOK, code)
		require.True(t, strings.HasPrefix(who, "one"), who)
	}
	require.EqualValues(t, 2, w.decisions[Unreachable].Load())
	if time.Since(began) < avoidFor { // else they may be dialled again
		require.EqualValues(t, 3, w.dialed.Load(), "pods that are avoided are dialled")
	}
}

func TestClientsCannotMakePodsAvoided(t *testing.T) {
	began := make(chan struct{}, 1)
	w := newWorld(t, echo("one"), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		began <- struct{}{}
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}))
	for name, size := range map[string]int{"short": 10, "streamed": 2 * maxRead} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, strings.NewReader(reviewOf("b", size)))
			require.NoError(t, err)
			go func() {
				<-began
				cancel()
			}()
			_, err = w.client.Do(r)
			require.ErrorIs(t, err, context.Canceled)
			require.Eventually(t, func() bool { return w.Held.Taken() == 0 }, soon, time.Millisecond)
			require.Len(t, w.avoided.choose([]netip.Addr{otherPod}, otherPod), 1)
		})
	}
}

func TestReachingPodsTakesAThirdOfTheTimeout(t *testing.T) {
	for timeout, want := range map[string]time.Duration{
		"": 10 * time.Second / 3, "x": 10 * time.Second / 3, "3s": time.Second, "1ms": time.Second / 3, "100h": 10 * time.Second,
	} {
		require.Equal(t, want, reachWithin(url.Values{"timeout": {timeout}}), timeout)
	}
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

// presentsAnother has the application's connections passed on unread.
func (w *world) presentsAnother(t *testing.T) {
	t.Helper()
	for range 2 {
		require.ErrorIs(t, w.certificate.judge(nil, false), errOther)
	}
}

// A certificate becomes usable after connections were passed on unread.
func TestUnreadConnectionsEndWhenTheyAreQuiet(t *testing.T) {
	const size = 16 << 10 // of reviews: HTTP/2 says that it has read them
	one := "one" + strings.Repeat(" ", leastAnswer)
	started, finish := make(chan struct{}), make(chan struct{})
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.RawQuery == "wait" {
			close(started)
			<-finish
		}
		_, _ = io.WriteString(w, one)
	}), echo("two"))
	w.presentsAnother(t)
	_, who := w.post(strings.NewReader(reviewOf("b", size)))
	require.Equal(t, one, who, "it was read")
	require.NoError(t, w.EndUnread(), "there is another problem")

	before, answered := w.url, make(chan string, 1)
	w.url += "?wait"
	go func() {
		defer close(answered) // if the review fails
		_, who := w.post(strings.NewReader(reviewOf("b", size)))
		answered <- who
	}()
	<-started
	require.NoError(t, w.certificate.judge(w.application.Certificate().Raw, false))
	time.Sleep(2 * quietAtFirst)
	require.ErrorIs(t, w.EndUnread(), errUnread)
	close(finish)
	require.Equal(t, one, <-answered, "the review in progress was cut off")
	require.Eventually(t, func() bool { return w.EndUnread() == nil }, soon, 10*time.Millisecond)
	w.url = before
	_, who = w.post(strings.NewReader(reviewOf("b", 10)))
	require.True(t, strings.HasPrefix(who, "two"), who)
	require.Eventually(t, func() bool { return w.Conns.Open.Taken() == 1 }, soon, 10*time.Millisecond, "the connection is still counted")
}

func TestUnreadConnectionsThatAreNeverQuietEnd(t *testing.T) {
	w := newWorld(t, echo("one"), echo("two"))
	w.presentsAnother(t)
	raw, err := net.Dial("tcp", w.application.Listener.Addr().String())
	require.NoError(t, err)
	defer raw.Close()
	busy := &tunnel{Conn: raw}
	busy.asked.Store(time.Now().UnixNano())
	w.tunnels.Add(busy)
	require.NoError(t, w.certificate.judge(w.application.Certificate().Raw, false))
	require.ErrorIs(t, w.EndUnread(), errUnread)
	require.NoError(t, raw.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
	_, err = raw.Read(make([]byte, 1))
	require.NotErrorIs(t, err, net.ErrClosed)
	w.certificate.since = time.Now().Add(-endWithin)
	require.ErrorIs(t, w.EndUnread(), errUnread)
	_, err = raw.Read(make([]byte, 1))
	require.ErrorIs(t, err, net.ErrClosed)
}

// Heads that anybody begins and does not finish leave room for the apiserver's.
func TestUnfinishedHeadsOfOneClientLeaveRoomForOthers(t *testing.T) {
	w := newWorld(t, echo("application"), echo("other"))
	at := strings.TrimSuffix(strings.TrimPrefix(w.url, "https://"), "/mutate")
	hostile := tls.Dialer{NetDialer: &net.Dialer{Timeout: soon, LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.0.66")}}, Config: &tls.Config{InsecureSkipVerify: true}}
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	for range 80 {
		clients.Go(func() {
			for ctx.Err() == nil {
				c, err := hostile.DialContext(ctx, "tcp", at)
				if err != nil {
					continue
				}
				_ = c.SetDeadline(time.Now().Add(soon))
				_, _ = c.Write([]byte("POST / HTTP/1.1\r\nHost: x\r\nX: "))
				for range 100 {
					if _, err := c.Write(make([]byte, 1<<10)); err != nil {
						break
					}
				}
				stop := context.AfterFunc(ctx, func() { _ = c.Close() })
				_, _ = c.Read(make([]byte, 1)) // until the server ends it
				stop()
				_ = c.Close()
			}
		})
	}
	t.Cleanup(clients.Wait)
	t.Cleanup(cancel)
	require.Eventually(t, func() bool { return w.reached.Load() > 0 }, soon, time.Millisecond)
	for range 20 {
		code, body := w.post(strings.NewReader(reviewOf("a", 0)))
		require.Equal(t, http.StatusOK, code, body)
		w.client.CloseIdleConnections()
	}
	require.Zero(t, w.Conns.Unserved.Taken(), "those of all clients")
}

func TestRecordsAreFoundHoweverTheyArrive(t *testing.T) {
	stream := slices.Concat([]byte{23, 3, 3, 0, 2, 1, 1}, []byte{23, 3, 3, 1, 0}, make([]byte, 256), []byte{23, 3, 3, 0, 0}, []byte{23, 3, 3, 0, 1, 1})
	for size := 1; size <= len(stream); size++ {
		var r records
		var lengths []int
		for part := range slices.Chunk(stream, size) {
			lengths = append(lengths, r.longest(part))
		}
		require.Equal(t, 256, slices.Max(lengths), size)
		require.Equal(t, records{head: r.head}, r, size)
	}
}
