package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	rm "runtime/metrics"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// siege is a mesh whose pod attacks, with another pod beside it that goes about
// its business. Clients, proxy and apiserver are one process: what an attack is
// said to cost has the attacker's own share in it.
type siege struct {
	*mesh
	victim *http.Client // of the other pod
	direct *http.Client // of the apiserver, past the proxy
	before live
}

// held is what the pod's requests hold.
func (s *siege) held() int64 {
	return s.pod.budgets.Held.Taken() + s.pod.budgets.Long.Taken() + s.pod.budgets.Lock.Taken()
}

type live struct {
	heap       int64 // and stacks, after collection
	goroutines int
}

func measure() live {
	runtime.GC()
	runtime.GC() // what was in pools
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return live{int64(s.HeapAlloc + s.StackInuse), runtime.NumGoroutine()}
}

func newSiege(t *testing.T, h http.Handler) *siege {
	m := newMesh(t, h)
	m.server.log = mustNew(t, m).log // as in production: no access lines
	m.policy(nil)
	other := m.server.Pod(PodInfo{UID: "uid-2", Namespace: "ns", Name: "victim"}, m.dial)
	_, err := other.Apply(&meshv1.PodPolicy{Uid: "uid-2", Workload: "victim", Version: "v"})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = other.Serve(l) }()
	t.Cleanup(func() { _ = other.Shutdown(context.Background()) })
	s := &siege{mesh: m, victim: m.client(true), direct: clientOf(t, m.ca, m.api.Listener.Addr().String())}
	s.victim.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, l.Addr().String())
	}
	return s
}

func mustNew(t *testing.T, m *mesh) *Server {
	quiet, err := New(Config{Leaf: m.server.config.Leaf})
	require.NoError(t, err)
	return quiet
}

// under attacks while the other pod makes requests, and reports what it cost: the
// attack is mounted, its live memory measured, and lifted. Then all must be as
// before.
func (s *siege) under(name string, maxHeap int64, mount func() (lift func(), figures string)) {
	s.t.Helper()
	var calm, pressed, direct []time.Duration
	both := func(victim *[]time.Duration, f func()) {
		*victim = s.latencies(s.victim, func() { direct = s.latencies(s.direct, f) })
	}
	both(&calm, func() { time.Sleep(200 * time.Millisecond) })
	s.before = measure()
	peak := make(chan int64)
	stop := make(chan struct{})
	go func() {
		sample := []rm.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		var top uint64
		for {
			rm.Read(sample)
			top = max(top, sample[0].Value.Uint64())
			select {
			case <-stop:
				peak <- int64(top)
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	var during live
	var figures string
	both(&pressed, func() {
		var lift func()
		lift, figures = mount()
		during = measure()
		for start := time.Now(); during.heap-s.before.heap > maxHeap && time.Since(start) < soon; {
			during = measure() // what was refused may be on its way out
		}
		lift()
	})
	close(stop)
	require.EventuallyWithT(s.t, func(c *assert.CollectT) {
		require.LessOrEqual(c, runtime.NumGoroutine(), s.before.goroutines+10)
		for _, a := range []*bounds.Account{&s.pod.budgets.Held, &s.pod.budgets.Long, &s.pod.budgets.Lock, &s.pod.accepting.conns.Unserved, &s.pod.accepting.conns.HTTP2} {
			require.Zero(c, a.Taken())
		}
		require.Zero(c, s.pod.accepting.conns.Open.Taken())
		require.Zero(c, s.pod.budgets.Refusing.Load())
	}, soon, 20*time.Millisecond)
	grown := during.heap - s.before.heap
	s.t.Logf("hostile: attack=%s %s heap_kib=%d peak_kib=%d goroutines=%d after=%+d victim_n=%d victim_p50=%v victim_max=%v direct_max=%v calm_p50=%v calm_max=%v",
		name, figures, grown>>10, (<-peak-s.before.heap)>>10, during.goroutines-s.before.goroutines, runtime.NumGoroutine()-s.before.goroutines,
		len(pressed), middle(pressed), slices.Max(pressed), slices.Max(direct), middle(calm), slices.Max(calm))
	require.LessOrEqual(s.t, grown, maxHeap, "live heap and stacks")
	// On a busy machine, direct requests to the apiserver wait too.
	require.Less(s.t, slices.Max(pressed), 5*time.Second+slices.Max(direct), "the other pod waits")
	require.Zero(s.t, testutil.ToFloat64(s.server.metrics.Panics))
}

func middle(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// latencies of a client's requests while f runs; each must succeed.
func (s *siege) latencies(c *http.Client, f func()) (all []time.Duration) {
	s.t.Helper()
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			start := time.Now()
			resp, err := c.Get("https://kubernetes.default.svc/api/v1/namespaces/victim/secrets/a")
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				if resp.StatusCode != 200 {
					err = fmt.Errorf("answered %d", resp.StatusCode)
				}
			}
			all = append(all, time.Since(start))
			select {
			case <-stop:
				stopped <- err
				return
			default:
			}
			if err != nil {
				stopped <- err
				return
			}
		}
	}()
	f()
	close(stop)
	require.NoError(s.t, <-stopped, "not the attacker's")
	return all
}

// quick answers at once, but for what is listed: that is large.
func quick(size int) http.Handler {
	large := bytes.Repeat([]byte("x"), size)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/victim/") || size == 0 {
			_, _ = io.WriteString(w, "{}")
			return
		}
		_, _ = w.Write(large)
	})
}

func (s *siege) tcp() net.Conn {
	s.t.Helper()
	c, err := net.Dial("tcp", s.addr)
	require.NoError(s.t, err)
	return c
}

func (s *siege) tls(protocols ...string) *tls.Conn {
	s.t.Helper()
	c, err := tls.Dial("tcp", s.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: protocols})
	require.NoError(s.t, err)
	return c
}

// frames is an HTTP/2 client that keeps to no rule.
type frames struct {
	*http2.Framer
	conn *tls.Conn
	w    *bufio.Writer
	head bytes.Buffer
	enc  *hpack.Encoder
	id   uint32
}

func (s *siege) frames() *frames {
	f := &frames{conn: s.tls("h2"), id: 1}
	f.w = bufio.NewWriter(f.conn)
	f.Framer = http2.NewFramer(f.w, f.conn)
	f.enc = hpack.NewEncoder(&f.head)
	_, err := io.WriteString(f.w, http2.ClientPreface)
	require.NoError(s.t, err)
	require.NoError(s.t, f.WriteSettings())
	return f
}

// ask begins a stream.
func (f *frames) ask(method, path string, end bool, fields ...[2]string) (id uint32, err error) {
	f.head.Reset()
	for _, h := range append([][2]string{{":method", method}, {":scheme", "https"}, {":authority", "x"}, {":path", path}}, fields...) {
		_ = f.enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	id = f.id
	f.id += 2
	const most = 16 << 10 // of a frame
	head := f.head.Bytes()
	first := head[:min(len(head), most)]
	err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndStream: end, EndHeaders: len(head) == len(first)})
	for head = head[len(first):]; err == nil && len(head) > 0; {
		piece := head[:min(len(head), most)]
		head = head[len(piece):]
		err = f.WriteContinuation(id, len(head) == 0, piece)
	}
	return id, err
}

// end reads what the server sends until it closes, and says how it ended.
func (f *frames) end() (code http2.ErrCode, err error) {
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return code, err
		}
		if away, ok := frame.(*http2.GoAwayFrame); ok {
			code = away.ErrCode
		}
	}
}

// served reports when the answer, or the end, of each stream arrives first. It is
// closed with the connection.
func (f *frames) served() <-chan bool {
	out := make(chan bool)
	go func() {
		defer close(out)
		heard := map[uint32]bool{}
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			if id := frame.Header().StreamID; id != 0 && !heard[id] {
				heard[id] = true
				out <- true
			}
		}
	}()
	return out
}

func closeAll[C io.Closer](all []C) func() {
	return func() {
		for _, c := range all {
			_ = c.Close()
		}
	}
}

// Accept goes on beyond the bound: a probe of the listener succeeds.
func TestHostileConnections(t *testing.T) {
	s := newSiege(t, quick(0))
	const extra = 500
	s.under("connections", 64<<20, func() (func(), string) {
		var conns []net.Conn
		for range downstream.MaxConnections + extra {
			conns = append(conns, s.tcp())
		}
		closed := s.server.metrics.Bounds.WithLabelValues("ns", "operator", "", "connections")
		require.Eventually(t, func() bool { return testutil.ToFloat64(closed) == extra }, soon, time.Millisecond)
		require.EqualValues(t, downstream.MaxConnections, s.pod.accepting.conns.Open.Taken())
		return closeAll(conns), fmt.Sprintf("opened=%d held=%d", len(conns), downstream.MaxConnections)
	})
	require.Equal(t, 200, s.do("GET", "/version", "").StatusCode, "it is served again")
}

func TestHostileSilence(t *testing.T) {
	t.Parallel()
	s := newSiege(t, quick(0))
	silent, head, preface := s.tcp(), s.tls("http/1.1"), s.tls("h2")
	_, err := io.WriteString(head, "GET /version HTTP/1.1\r\nHost: x\r\nX: ")
	require.NoError(t, err)
	start := time.Now()
	for _, c := range []net.Conn{silent, head, preface} {
		require.NoError(t, c.SetReadDeadline(start.Add(3*downstream.HeadTimeout)))
		_, err := io.Copy(io.Discard, c)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	t.Logf("hostile: attack=silence closed_after=%v", time.Since(start).Round(time.Second))
	require.Eventually(t, func() bool { return s.pod.accepting.conns.Open.Taken() == 0 }, soon, time.Millisecond)
}

// Heads that do not end, of fields that hold many times what they are on the way.
func TestHostileHeads(t *testing.T) {
	s := newSiege(t, quick(0))
	const most = downstream.MaxUnserved / 4 // parsing all of it takes minutes with the race detector
	s.pod.accepting.conns.Unserved.Pool = bounds.NewPool(most, downstream.OwnUnserved)
	var pieces []string
	for i := 0; i < 20_000; { // 120 KB of 128 KiB
		var lines strings.Builder
		for range 1000 {
			fmt.Fprintf(&lines, "%04x:\n", i)
			i++
		}
		pieces = append(pieces, lines.String())
	}
	s.under("heads", 28<<20, func() (func(), string) {
		var conns []*tls.Conn
		var sent atomic.Int64
		bounds := s.server.metrics.Bounds.WithLabelValues("ns", "operator", "", "unserved bytes")
		full := func() bool {
			return testutil.ToFloat64(bounds) > 0 && s.pod.accepting.conns.Unserved.Taken() > most*3/4
		}
		for start := time.Now(); !full(); { // a busy machine takes longer for all than each may
			require.Less(t, time.Since(start), 2*time.Minute)
			closeAll(conns)()
			conns = nil
			for range 13 { // 1.6 MB, of which 1 MiB is within the bound
				conns = append(conns, s.tls("http/1.1"))
			}
			var wg sync.WaitGroup
			for _, c := range conns {
				wg.Go(func() {
					_, _ = io.WriteString(c, "GET /version HTTP/1.1\r\nHost: x\r\n")
					for _, lines := range pieces {
						n, err := io.WriteString(c, lines)
						sent.Add(int64(n))
						if err != nil {
							return
						}
					}
				})
			}
			wg.Wait()
			for written := time.Now(); !full() && time.Since(written) < time.Second; {
				time.Sleep(time.Millisecond)
			}
		}
		// Who goes beyond it by what it read last is on its way out.
		require.Eventually(t, func() bool { return s.pod.accepting.conns.Unserved.Taken() <= most }, soon, time.Millisecond)
		return closeAll(conns), fmt.Sprintf("connections=%d sent_kib=%d held_kib=%d", len(conns), sent.Load()>>10, s.pod.accepting.conns.Unserved.Taken()>>10)
	})
}

// Answers that no window is open for, to requests with large heads: they wait
// inside the budget, and not for ever.
func TestHostileWindows(t *testing.T) {
	var tiny [][2]string
	for i := range 3000 {
		tiny = append(tiny, [2]string{fmt.Sprintf("%03x", i), ""})
	}
	for name, of := range map[string]struct {
		path string
		head [][2]string
	}{
		"one large field answered": {"/api/v1/namespaces/a/secrets/b", [][2]string{{"x", strings.Repeat("~", 100<<10)}}}, // which HPACK leaves as it is
		"tiny fields refused":      {"/api/v1//secrets", tiny},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSiege(t, quick(0))
			s.pod.http.Stall = 6 * time.Second // more than it takes to get there
			s.policy(nil)
			s.under("windows "+name, 64<<20, func() (func(), string) {
				var conns []*tls.Conn
				const connections, streams, ahead = 4, 40, 5 // ahead: 2 MiB in all
				var most int64
				for range connections {
					f := s.frames()
					conns = append(conns, f.conn)
					require.NoError(t, f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
					served := f.served()
					for i := range streams {
						// Heads that are not served yet have a bound of their own, and
						// end the connection beyond it.
						if i >= ahead {
							require.True(t, <-served, "the connection stays")
						}
						_, err := f.ask("GET", of.path, true, of.head...)
						require.NoError(t, err)
						require.NoError(t, f.w.Flush())
						most = max(most, s.pod.budgets.Held.Taken())
					}
					go func() {
						for range served {
						}
					}()
				}
				// On a slow machine the first are given up before the last are sent.
				require.Eventually(t, func() bool { return max(most, s.pod.budgets.Held.Taken()) > pipeline.MaxHeld/24 }, soon, time.Millisecond)
				grown := measure().heap - s.before.heap
				held := s.pod.budgets.Held.Taken()
				// The connections stay, and nothing of the streams.
				require.Eventually(t, func() bool { return s.pod.budgets.Held.Taken() == 0 }, soon, 10*time.Millisecond)
				s.pod.inForce.clients.Load().main.Close() // idle ones are not of the streams
				return closeAll(conns), fmt.Sprintf("streams=%d held_kib=%d waiting_heap_kib=%d left_heap_kib=%d", connections*streams, held>>10, grown>>10, (measure().heap-s.before.heap)>>10)
			})
		})
	}
}

// What is being answered when a stream's window does not open is reset, be it
// short or a watch; a quiet watch is not.
func TestHostileStalledStreams(t *testing.T) {
	t.Parallel()
	event := bytes.Repeat([]byte("x"), 1<<10)
	quiet := make(chan struct{})
	speak := sync.OnceFunc(func() { close(quiet) })
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "quiet") {
			w.(http.Flusher).Flush()
			<-quiet
		}
		_, _ = w.Write(event)
	}))
	t.Cleanup(speak) // before the apiserver is closed
	m.pod.http.Stall = 300 * time.Millisecond
	m.policy(nil)
	s := &siege{mesh: m}
	f := s.frames()
	defer f.conn.Close()
	require.NoError(t, f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
	var stalled [2]uint32
	for i, path := range []string{"/api/v1/namespaces/a/secrets/b", "/api/v1/secrets?watch=1"} {
		id, err := f.ask("GET", path, true)
		require.NoError(t, err)
		stalled[i] = id
	}
	watch, err := f.ask("GET", "/api/v1/namespaces/quiet/secrets?watch=1", true)
	require.NoError(t, err)
	require.NoError(t, f.w.Flush())
	require.NoError(t, f.conn.SetReadDeadline(time.Now().Add(soon)))
	reset := map[uint32]bool{}
	for len(reset) < len(stalled) {
		frame, err := f.ReadFrame()
		require.NoError(t, err)
		if r, ok := frame.(*http2.RSTStreamFrame); ok {
			reset[r.StreamID] = true
		}
	}
	require.Equal(t, map[uint32]bool{stalled[0]: true, stalled[1]: true}, reset)
	time.Sleep(2 * m.pod.http.Stall) // the quiet one is not given up for being quiet
	require.NoError(t, f.WriteWindowUpdate(watch, 4<<10))
	require.NoError(t, f.w.Flush())
	speak()
	for {
		frame, err := f.ReadFrame()
		require.NoError(t, err)
		require.NotEqual(t, http2.FrameRSTStream, frame.Header().Type)
		if frame.Header().StreamID == watch && frame.Header().Flags.Has(http2.FlagDataEndStream) {
			break
		}
	}
}

// Targets and selectors that become many times what they were when they are read.
func TestHostileTargetsThatGrow(t *testing.T) {
	s := newSiege(t, quick(0))
	s.policy(policytest.LimitTo("shard=a"))
	s.under("growing targets", 112<<20, func() (func(), string) {
		var conns []*tls.Conn
		for i := range 4 {
			f := s.frames()
			conns = append(conns, f.conn)
			go func() { _, _ = f.end() }()
			query := []string{"labelSelector=" + strings.Repeat("a,", 50<<10), strings.Repeat("a&", 50<<10)}[i%2]
			for range 20 {
				if _, err := f.ask("GET", "/api/v1/secrets?"+query, true); err != nil {
					break
				}
			}
			_ = f.w.Flush()
		}
		refused := s.server.metrics.Bounds.WithLabelValues("ns", "operator", "s1", "requests")
		require.Eventually(t, func() bool { return testutil.ToFloat64(refused) > 0 }, soon, time.Millisecond)
		return closeAll(conns), fmt.Sprintf("refused=%v", testutil.ToFloat64(refused))
	})
}

// Whatever else this pod and others take, the lock is renewed; and watches leave
// short requests what they need.
func TestHostileNeighboursOfALock(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(policytest.Locked("s1"))
	c := m.client(true)
	const lease = "/apis/coordination.k8s.io/v1/namespaces/leases/leases"
	body := `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"leases","namespace":"leases"},"spec":{"holderIdentity":"a"}}`
	fill := func(a *bounds.Account) { // as pods without number, and this one
		(&bounds.Account{Pool: a.Pool}).Take(1 << 40)
		for a.Take(1 << 10) {
		}
	}
	get := func() int { return m.with(c, "GET", "/api/v1/namespaces/a/secrets/b", "").StatusCode }
	watch := func() int { return m.with(c, "GET", "/api/v1/namespaces/a/secrets?watch=1", "").StatusCode }

	fill(&m.pod.budgets.Long)
	require.Equal(t, 429, watch())
	require.Equal(t, 200, get(), "watches leave short requests their own")
	fill(&m.pod.budgets.Held)
	require.Equal(t, 429, get())
	for range 20 {
		require.Equal(t, 200, m.with(c, "PUT", lease+"/leases", body, "Content-Type", "application/json").StatusCode)
		require.Equal(t, 200, m.with(c, "GET", lease+"/leases", "").StatusCode)
		require.Equal(t, 200, m.with(c, "POST", lease, body, "Content-Type", "application/json").StatusCode)
	}
	other := strings.Replace(body, `"name":"leases"`, `"name":"other"`, 1)
	require.Equal(t, 429, m.with(c, "POST", lease, other, "Content-Type", "application/json").StatusCode, "not the lock")
	require.Equal(t, 429, m.with(c, "GET", lease+"/other", "").StatusCode)
	require.Eventually(t, func() bool { return m.pod.budgets.Lock.Taken() == 0 }, soon, time.Millisecond, "nothing else is in the reserve")
}

// Refusals are bounded too: beyond so many the streams are reset.
func TestHostileRefusals(t *testing.T) {
	s := newSiege(t, quick(0))
	s.pod.http.Stall = 6 * time.Second // more than it takes to get there
	s.policy(nil)
	s.pod.budgets.Held.Own = -1 << 40 // nothing is left
	s.under("refusals", 32<<20, func() (func(), string) {
		f := s.frames()
		require.NoError(t, f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
		resets := make(chan struct{}, 1000)
		go func() {
			for {
				frame, err := f.ReadFrame()
				if err != nil {
					return
				}
				if _, ok := frame.(*http2.RSTStreamFrame); ok {
					resets <- struct{}{}
				}
			}
		}()
		for range 300 {
			_, err := f.ask("GET", "/version", true, [2]string{"x", strings.Repeat("x", 100<<10)})
			require.NoError(t, err)
		}
		require.NoError(t, f.w.Flush())
		for range 300 - pipeline.MaxRefusing {
			<-resets
		}
		return closeAll([]io.Closer{f.conn}), fmt.Sprintf("refusing=%d", s.pod.budgets.Refusing.Load())
	})
}

func TestHostileHeadSizes(t *testing.T) {
	s := newSiege(t, quick(0))
	long := strings.Repeat("x", downstream.MaxHeaderBytes+8<<10)
	for _, http2 := range []bool{true, false} {
		req, err := http.NewRequest("GET", "https://kubernetes.default.svc/version", nil)
		require.NoError(t, err)
		req.Header.Set("X", long)
		resp, err := s.client(http2).Do(req)
		if err == nil {
			require.Equal(t, 431, resp.StatusCode)
			_ = resp.Body.Close()
		} // or the connection was closed under the head
	}
	require.Empty(t, s.dialed())
}

// A head without end, in frames.
func TestHostileContinuation(t *testing.T) {
	s := newSiege(t, quick(0))
	s.under("continuation", 16<<20, func() (func(), string) {
		f := s.frames()
		var head bytes.Buffer
		enc := hpack.NewEncoder(&head)
		_ = enc.WriteField(hpack.HeaderField{Name: ":method", Value: "GET"})
		require.NoError(t, f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes()}))
		sent, start := 0, time.Now()
		done := make(chan struct{})
		go func() { defer close(done); _, _ = f.end() }()
		for n := 0; ; n++ {
			head.Reset()
			_ = enc.WriteField(hpack.HeaderField{Name: fmt.Sprintf("x-%d", n), Value: strings.Repeat("x", 12<<10), Sensitive: true})
			if f.WriteContinuation(1, false, head.Bytes()) != nil || f.w.Flush() != nil {
				break
			}
			sent += head.Len()
			require.Less(t, sent, 64<<20, "nobody stops it")
		}
		<-done
		return closeAll([]io.Closer{f.conn}), fmt.Sprintf("sent_kib=%d closed_after=%v", sent>>10, time.Since(start).Round(time.Millisecond))
	})
}

// Streams that are cancelled as soon as they are made. Each may have cost a
// handshake with the apiserver.
func TestHostileRapidReset(t *testing.T) {
	s := newSiege(t, quick(0))
	s.under("rapid-reset", 64<<20, func() (func(), string) {
		f := s.frames()
		done := make(chan http2.ErrCode, 1)
		go func() { code, _ := f.end(); done <- code }()
		start, n := time.Now(), 0
		for time.Since(start) < 2*time.Second && n < 50_000 {
			id, err := f.ask("GET", "/api/v1/namespaces/a/secrets/b", true)
			if err != nil || f.WriteRSTStream(id, http2.ErrCodeCancel) != nil {
				break
			}
			n++
		}
		_ = f.w.Flush()
		code := <-done
		took := time.Since(start)
		require.Less(t, len(s.dialed()), 2*abandonedBurst+abandonedRate*int(took.Seconds()+1), "connections to the apiserver")
		return closeAll([]io.Closer{f.conn}), fmt.Sprintf("streams=%d took=%v upstream_connections=%d goaway=%v", n, took.Round(time.Millisecond), len(s.dialed()), code)
	})
}

// Frames that must be answered, from a client that does not read.
func TestHostileControlFrames(t *testing.T) {
	for name, write := range map[string]func(*frames) error{
		"ping":     func(f *frames) error { return f.WritePing(false, [8]byte{}) },
		"settings": func(f *frames) error { return f.WriteSettings() },
	} {
		s := newSiege(t, quick(0))
		s.under(name+"-flood", 16<<20, func() (func(), string) {
			f := s.frames()
			require.NoError(t, f.conn.SetWriteDeadline(time.Now().Add(20*time.Second)))
			start, n := time.Now(), 0
			for write(f) == nil && n < 5_000_000 {
				n++
			}
			require.Less(t, n, 5_000_000, "nobody stops it")
			return closeAll([]io.Closer{f.conn}), fmt.Sprintf("frames=%d closed_after=%v", n, time.Since(start).Round(time.Millisecond))
		})
	}
}

// Answers that nobody reads, many on each connection.
func TestHostileReadingNothing(t *testing.T) {
	s := newSiege(t, quick(4<<20))
	s.under("reading-nothing", 256<<20, func() (func(), string) {
		var conns []*tls.Conn
		asked := 0
		for range 3 {
			f := s.frames()
			conns = append(conns, f.conn)
			for range maxStreams {
				_, err := f.ask("GET", "/api/v1/namespaces/a/secrets", true)
				require.NoError(t, err)
				asked++
			}
			require.NoError(t, f.w.Flush())
		}
		refused := s.server.metrics.Bounds.WithLabelValues("ns", "operator", "", "requests")
		require.Eventually(t, func() bool { return testutil.ToFloat64(refused) > 0 }, soon, time.Millisecond)
		opened := 0
		require.Eventually(t, func() bool { // until no more connections are opened
			before := opened
			opened = len(s.dialed())
			return opened == before
		}, 60*time.Second, time.Second)
		// A request counts until it is refused, also one that exceeded the bound.
		const most = pipeline.MaxHeld + pipeline.MaxRefusing*(pipeline.RequestWeight+upstream.BufferSize+pipeline.PartWeight*10)
		require.Eventually(t, func() bool { return s.held() <= most }, soon, time.Millisecond)
		return closeAll(conns), fmt.Sprintf("asked=%d refused=%v held_kib=%d upstream_connections=%d", asked, testutil.ToFloat64(refused), s.held()>>10, opened)
	})
	require.Equal(t, 200, s.do("GET", "/version", "").StatusCode, "it is served again")
}

// Bodies that the apiserver does not read: a proxied backend of the pod's own.
func TestHostileBodies(t *testing.T) {
	hold := make(chan struct{})
	s := newSiege(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "/victim/") {
			select {
			case <-hold:
			case <-r.Context().Done():
			}
		}
		_, _ = io.WriteString(w, "{}")
	}))
	var once sync.Once
	release := func() { once.Do(func() { close(hold) }) }
	t.Cleanup(release)
	s.under("unread-bodies", 128<<20, func() (func(), string) {
		var conns []*tls.Conn
		var sent atomic.Int64
		var wg sync.WaitGroup
		chunk := bytes.Repeat([]byte("x"), 16<<10)
		for range 8 {
			f := s.frames()
			conns = append(conns, f.conn)
			require.NoError(t, f.conn.SetWriteDeadline(time.Now().Add(4*time.Second)))
			go func() { _, _ = f.end() }()
			wg.Go(func() {
				for range 60 {
					id, err := f.ask("POST", "/api/v1/namespaces/a/services/b/proxy/x", false)
					if err != nil {
						return
					}
					for range pipeline.ReceivePerStream / len(chunk) { // all that its window allows
						if f.WriteData(id, false, chunk) != nil {
							return
						}
						sent.Add(int64(len(chunk)))
					}
					_ = f.w.Flush()
				}
			})
		}
		wg.Wait()
		return func() { closeAll(conns)(); release() }, fmt.Sprintf("connections=%d sent_kib=%d held_kib=%d", len(conns), sent.Load()>>10, s.held()>>10)
	})
}

// Bodies that hardly come. Each may last; there may only be so many.
func TestHostileSlowBodies(t *testing.T) {
	s := newSiege(t, quick(0))
	s.under("slow-bodies", 160<<20, func() (func(), string) {
		var conns []*tls.Conn
		for range 2 {
			f := s.frames()
			conns = append(conns, f.conn)
			go func() { _, _ = f.end() }()
			for range maxStreams {
				id, err := f.ask("POST", "/api/v1/namespaces/a/secrets", false)
				require.NoError(t, err)
				require.NoError(t, f.WriteData(id, false, []byte("{")))
			}
			require.NoError(t, f.w.Flush())
		}
		const most = pipeline.MaxHeld / (pipeline.RequestWeight + upstream.BufferSize + pipeline.ReceivePerStream)
		refused := s.server.metrics.Bounds.WithLabelValues("ns", "operator", "", "requests")
		require.Eventually(t, func() bool { return testutil.ToFloat64(refused) >= 2*maxStreams-most }, soon, time.Millisecond)
		return closeAll(conns), fmt.Sprintf("bodies=%d refused=%v held_kib=%d", 2*maxStreams, testutil.ToFloat64(refused), s.held()>>10)
	})
}

// A body that hardly comes has no place at the apiserver before it is there, small
// as it is; one that is larger than a buffer goes up as it comes.
func TestBodiesAreAwaited(t *testing.T) {
	t.Parallel()
	var posts atomic.Int32 // whose heads have come
	bodies := make(chan string, 1)
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" {
			posts.Add(1)
			b, _ := io.ReadAll(r.Body)
			bodies <- string(b)
		}
		_, _ = io.WriteString(w, "{}")
	}))
	m.policy(nil)
	for _, http2 := range []bool{true, false} {
		before := posts.Load()
		c := m.client(http2)
		send := func(body io.Reader) chan error {
			done := make(chan error, 1)
			r, err := http.NewRequest("POST", "https://kubernetes.default.svc/api/v1/namespaces/a/secrets", body)
			require.NoError(t, err)
			go func() {
				resp, err := c.Do(r)
				if err == nil {
					err = resp.Body.Close()
				}
				done <- err
			}()
			return done
		}
		r, w := io.Pipe()
		done := send(r)
		_, err := io.WriteString(w, "{")
		require.NoError(t, err)
		require.Equal(t, 200, m.with(c, "GET", "/api/v1/namespaces/a/pods/x", "").StatusCode)
		require.Equal(t, before, posts.Load(), "the body has not come")
		_, err = io.WriteString(w, "}")
		require.NoError(t, err)
		require.NoError(t, w.Close())
		require.Equal(t, "{}", <-bodies)
		require.NoError(t, <-done)

		large := strings.Repeat("x", 3*upstream.BufferSize+7)
		done = send(io.MultiReader(strings.NewReader(large)))
		require.Equal(t, large, <-bodies)
		require.NoError(t, <-done)
	}
}

// Bodies that are read whole, for the lock's name in them, and never end.
func TestHostileLockBodies(t *testing.T) {
	s := newSiege(t, quick(0))
	s.policy(policytest.Locked("s1"))
	s.under("lock-bodies", 256<<20, func() (func(), string) {
		var conns []*tls.Conn
		var wg sync.WaitGroup
		chunk := fmt.Sprintf("%x\r\n%s\r\n", 64<<10, strings.Repeat("x", 64<<10))
		for range 40 {
			c := s.tls("http/1.1")
			conns = append(conns, c)
			require.NoError(t, c.SetWriteDeadline(time.Now().Add(soon)))
		}
		for _, c := range conns {
			wg.Go(func() {
				_, _ = io.WriteString(c, "POST /apis/coordination.k8s.io/v1/namespaces/leases/leases HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
				for range 45 { // of 48
					if _, err := io.WriteString(c, chunk); err != nil {
						return
					}
				}
			})
		}
		wg.Wait()
		refused := s.server.metrics.Bounds.WithLabelValues("ns", "operator", "s1", "requests")
		require.Eventually(t, func() bool { return testutil.ToFloat64(refused) > 0 }, soon, time.Millisecond)
		require.Eventually(t, func() bool { return s.held() <= pipeline.MaxHeld+16<<20 }, soon, time.Millisecond)
		return closeAll(conns), fmt.Sprintf("bodies=%d refused=%v held_kib=%d", len(conns), testutil.ToFloat64(refused), s.held()>>10)
	})
}

// Handshakes without end: few are computed at once, so that others get their turn.
func TestHostileHandshakes(t *testing.T) {
	s := newSiege(t, quick(0))
	s.under("handshakes", 32<<20, func() (func(), string) {
		var n atomic.Int64
		var wg sync.WaitGroup
		start := time.Now()
		for range 64 {
			wg.Go(func() {
				for time.Since(start) < 2*time.Second {
					if c, err := tls.Dial("tcp", s.addr, &tls.Config{InsecureSkipVerify: true}); err == nil {
						n.Add(1)
						_ = c.Close()
					}
				}
			})
		}
		wg.Wait()
		require.Positive(t, n.Load())
		require.LessOrEqual(t, len(s.pod.accepting.conns.Handshakes), downstream.MaxHandshakes)
		return func() {}, fmt.Sprintf("clients=64 handshakes=%d", n.Load())
	})
	require.Empty(t, s.pod.accepting.conns.Handshakes)
}

// Certificates that are asked for, but not of this size.
func TestHostileCertificates(t *testing.T) {
	s := newSiege(t, quick(0))
	s.under("certificates", 96<<20, func() (func(), string) {
		cert := *s.ca.Leaf("admin")
		for len(cert.Certificate)*len(cert.Certificate[0]) < 200<<10 {
			cert.Certificate = append(cert.Certificate, cert.Certificate[0])
		}
		var conns []*tls.Conn
		for range 80 { // 16 MiB
			c, err := tls.Dial("tcp", s.addr, &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{cert}})
			if err == nil {
				conns = append(conns, c)
			}
		}
		require.Eventually(t, func() bool {
			return testutil.ToFloat64(s.server.metrics.Bounds.WithLabelValues("ns", "operator", "", "unserved bytes")) > 0
		}, soon, time.Millisecond)
		// A read counts until its connection is closed, also one that exceeded the bound.
		require.Eventually(t, func() bool { return s.pod.accepting.conns.Unserved.Taken() <= downstream.MaxUnserved }, soon, time.Millisecond)
		return closeAll(conns), fmt.Sprintf("chain_kib=200 connections=%d held_kib=%d", len(conns), s.pod.accepting.conns.Unserved.Taken()>>10)
	})
}

func TestHostileTLS(t *testing.T) {
	s := newSiege(t, quick(0))
	s.under("garbage-tls", 32<<20, func() (func(), string) {
		noise := make([]byte, 64<<10)
		_, _ = rand.Read(noise)
		n := 0
		for _, b := range [][]byte{
			noise, noise[:1], {0x16, 3, 1, 0xff, 0xff}, {0x16, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff}, {0x80, 0x80, 1, 3, 1},
			bytes.Repeat([]byte{0x16, 3, 1, 0, 0}, 1000), bytes.Repeat([]byte{0x15, 3, 1, 0, 2, 1, 0}, 1000),
			[]byte("GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"),
			[]byte(http2.ClientPreface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
		} {
			for range 20 {
				c := s.tcp()
				_, _ = c.Write(b)
				_ = c.(*net.TCPConn).CloseWrite()
				require.NoError(t, c.SetReadDeadline(time.Now().Add(5*time.Second)))
				answer, _ := io.ReadAll(c)
				require.NotContains(t, string(answer), "200 OK")
				_ = c.Close()
				n++
			}
		}
		return func() {}, fmt.Sprintf("connections=%d", n)
	})
	for _, version := range []uint16{tls.VersionTLS10, tls.VersionTLS11} {
		_, err := tls.Dial("tcp", s.addr, &tls.Config{InsecureSkipVerify: true, MinVersion: version, MaxVersion: version})
		require.ErrorContains(t, err, "protocol version")
	}
}

// A renegotiation costs the server a handshake for a byte.
func TestHostileRenegotiation(t *testing.T) {
	openssl := needs.Program(t, "openssl")
	s := newSiege(t, quick(0))
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	cmd := exec.CommandContext(ctx, openssl, "s_client", "-tls1_2", "-legacy_renegotiation", "-connect", s.addr)
	cmd.Stdin = strings.NewReader("R\n")
	out, _ := cmd.CombinedOutput()
	require.Contains(t, string(out), "RENEGOTIATING")
	require.Contains(t, string(out), "alert unexpected message")
}

// Requests that two parsers could cut apart differently. The apiserver sees those
// that the proxy answered as such, and nothing of one inside another.
func TestHostileSmuggling(t *testing.T) {
	const hidden = "GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
	post := "POST /api/v1/namespaces/a/secrets HTTP/1.1\r\nHost: x\r\n"
	for _, c := range []struct{ name, request string }{
		{"length and chunks", post + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 5+len(hidden)) + hidden},
		{"two lengths", post + fmt.Sprintf("Content-Length: 0\r\nContent-Length: %d\r\n\r\n", len(hidden)) + hidden},
		{"a list of lengths", post + fmt.Sprintf("Content-Length: 0, %d\r\n\r\n", len(hidden)) + hidden},
		{"a signed length", post + fmt.Sprintf("Content-Length: +%d\r\n\r\n", len(hidden)) + hidden},
		{"a hexadecimal length", post + "Content-Length: 0x0\r\n\r\n" + hidden},
		{"two encodings", post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + hidden},
		{"an unknown encoding", post + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + hidden},
		{"an encoding with a tab", post + "Transfer-Encoding:\tchunked, gzip\r\n\r\n0\r\n\r\n" + hidden},
		{"a space before the colon", post + fmt.Sprintf("Content-Length : %d\r\n\r\n", len(hidden)) + hidden},
		{"a folded header", post + "X: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n"},
		{"a bare line feed in a value", post + "X: a\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"},
		{"a bare return in a value", post + "X: a\rTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n"},
		{"a null", post + "X: a\x00b\r\nContent-Length: 0\r\n\r\n"},
		{"chunk extensions", post + "Transfer-Encoding: chunked\r\n\r\n2;a=\"\r\n\"\r\n{}\r\n0\r\n\r\n"},
		{"a chunk's bare line feed", post + "Transfer-Encoding: chunked\r\n\r\n2;\n{}\r\n0\r\n\r\n"},
		{"a chunk too long", post + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n"},
		{"a trailer that is a length", post + "Transfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n2\r\n{}\r\n0\r\nContent-Length: 99\r\n\r\n"},
		{"an HTTP/1.0 with chunks", "POST /api/v1/namespaces/a/secrets HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden},
		{"two hosts", "GET /version HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"},
		{"no host", "GET /version HTTP/1.1\r\n\r\n"},
		{"a request line of two", "GET /version HTTP/1.1\r\n GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"},
		{"a target with spaces", "GET /version HTTP/1.1 /hidden HTTP/1.1\r\nHost: x\r\n\r\n"},
		{"the preface of HTTP/2", http2.ClientPreface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00"},
		{"HTTP/2.0 in words", "GET /version HTTP/2.0\r\nHost: x\r\n\r\n"},
		{"a connection option that hides a header", "GET /version HTTP/1.1\r\nHost: x\r\nConnection: close, Host, Content-Length\r\n\r\n"},
	} {
		var mu sync.Mutex
		var got []seen
		s := newSiege(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return // cut short: no request
			}
			mu.Lock()
			defer mu.Unlock()
			got = append(got, seen{URI: r.RequestURI, Header: r.Header.Clone(), Body: string(body)})
		}))
		conn := s.tls("http/1.1")
		_, err := io.WriteString(conn, c.request)
		require.NoError(t, err)
		var answers []byte
		require.Eventually(t, func() bool { // it is quiet, and what the apiserver saw was answered
			require.NoError(t, conn.SetReadDeadline(time.Now().Add(500*time.Millisecond)))
			more, _ := io.ReadAll(conn)
			answers = append(answers, more...)
			mu.Lock()
			defer mu.Unlock()
			return len(more) == 0 && len(answers) > 0 && len(got) == strings.Count(string(answers), " 200 OK\r\n")
		}, soon, time.Millisecond, c.name)
		_ = conn.Close()
		mu.Lock()
		defer mu.Unlock()
		for i, r := range got {
			require.False(t, strings.Contains(r.URI, "hidden") && i == 0, c.name)
			for _, v := range r.Header {
				require.NotContains(t, strings.Join(v, ""), "hidden", c.name)
			}
			require.NotContains(t, r.Body, "hidden", c.name)
			require.Empty(t, r.Header.Get("Transfer-Encoding"), c.name)
		}
		t.Logf("hostile: attack=smuggling case=%q requests=%d answer=%q", c.name, len(got), strings.SplitN(string(answers), "\r\n", 2)[0])
	}
}

func TestHostileTargets(t *testing.T) {
	api := &recorder{}
	s := newSiege(t, api)
	for _, c := range []struct {
		target string
		want   int
	}{
		{"https://evil.example.com/version", 200}, // as RFC 9112 has it: the path counts
		{"http://169.254.169.254/latest/meta-data", 200},
		{"evil.example.com:443", 400},
		{"//evil.example.com/version", 400},
		{"*", 400},
		{"https:version", 400},
	} {
		a := s.raw("GET " + c.target + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		require.Equal(t, c.want, a.StatusCode, c.target)
	}
	for _, r := range api.requests() {
		require.True(t, strings.HasPrefix(r.URI, "/"), r.URI)
	}
	for _, addr := range s.dialed() {
		require.Equal(t, s.api.Listener.Addr().String(), addr)
	}
}
