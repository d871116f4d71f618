package egress

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestWhatMayBeDeniedIsNotPassedForWantOfACertificate(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	w.noLeaf = true
	w.set(rules(&meshv1.Egress{Decrypt: true}, deny(&meshv1.HttpMatch{Host: exactly("api.example.com"), Path: exactly("/x")})))
	_, err := w.client(secureAt).Get("https://api.example.com/x")
	require.ErrorContains(t, err, "access denied")
	_, err = w.client(secureAt).Get("https://other.example.com/x")
	require.NoError(t, err, "no rule may deny it")
	require.Equal(t, []string{"tls unseen", "tls passed"}, w.got())
}

// A client may say that it speaks no HTTP, and a server not care.
func TestWhatMayBeDeniedIsNotPassedAsAnotherProtocol(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	w.set(rules(&meshv1.Egress{Decrypt: true}, deny(&meshv1.HttpMatch{Host: exactly("api.example.com"), Path: exactly("/x")})))
	other := func(t *http.Transport) {
		t.ForceAttemptHTTP2 = false
		t.TLSClientConfig.NextProtos = []string{"other"}
	}
	_, err := w.client(secureAt, other).Get("https://api.example.com/x")
	require.ErrorContains(t, err, "access denied")
}

// TestStreamsThatNobodyReadsHoldLittle counts what the server could send, most of
// which is in the sockets' buffers.
func TestStreamsThatNobodyReadsHoldLittle(t *testing.T) {
	w := newWorld(t)
	var sent atomic.Int64
	w.backend(secureAt, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		for {
			n, err := rw.Write(make([]byte, 32<<10))
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	}))
	w.set(rules(&meshv1.Egress{Decrypt: true}, deny(&meshv1.HttpMatch{Path: exactly("/no")})))
	c := w.client(secureAt, func(t *http.Transport) {
		t.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10, MaxReceiveBufferPerConnection: 64 << 10}
	})
	for range 16 {
		resp, err := c.Get("https://api.example.com/")
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, 2, resp.ProtoMajor)
	}
	for last := int64(-1); sent.Load() != last; time.Sleep(300 * time.Millisecond) {
		last = sent.Load()
	}
	require.Less(t, sent.Load(), int64(16<<20))
}

// What the proxy says itself waits for the client like what the server says.
func TestStreamsThatStallAreGivenUp(t *testing.T) {
	w := newWorld(t)
	w.server.stall = 300 * time.Millisecond
	both := &http.Protocols{}
	both.SetUnencryptedHTTP2(true)
	quiet := make(chan struct{})
	defer close(quiet)
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.(http.Flusher).Flush()
		if r.URL.Path == "/quiet" {
			<-quiet
		}
		_, _ = rw.Write(make([]byte, 64<<10))
	}), func(s *httptest.Server) { s.Config.Protocols = both })
	w.set(rules(&meshv1.Egress{}, deny(&meshv1.HttpMatch{Path: exactly("/no")})))
	conn, err := net.Dial("tcp", w.redirect(plainAt))
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, http2.ClientPreface)
	require.NoError(t, err)
	f := http2.NewFramer(conn, conn)
	require.NoError(t, f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
	for i, path := range []string{"/quiet", "/", "/no"} {
		var head bytes.Buffer
		h := hpack.NewEncoder(&head)
		for _, field := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "a"}, {":path", path}} {
			require.NoError(t, h.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}))
		}
		require.NoError(t, f.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1), BlockFragment: head.Bytes(), EndStream: true, EndHeaders: true}))
	}
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
	reset := map[uint32]bool{}
	for len(reset) < 2 {
		frame, err := f.ReadFrame()
		require.NoError(t, err)
		if r, ok := frame.(*http2.RSTStreamFrame); ok {
			reset[r.StreamID] = true
		}
	}
	require.Equal(t, map[uint32]bool{3: true, 5: true}, reset, "none is given up for being quiet")
}

// harming has the answers to slow.example.com meet a fault for as long as told.
func harming(f *meshv1.FaultRule, expires time.Time) *meshv1.Traffic {
	f.Name, f.Key, f.Http = "slow", "slow", []*meshv1.HttpMatch{host("slow.example.com")}
	return &meshv1.Traffic{Injections: []*meshv1.Injection{{Name: "fi", Expires: expires.Unix(), Rules: []*meshv1.FaultRule{f}}}}
}

func TestFaultsEndWithTheirRuleAndItsTime(t *testing.T) {
	slow := func() *meshv1.FaultRule {
		return &meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 20, Percent: 100}}
	}
	for name, begin := range map[string]func(w *world) (end func()){
		"the rule goes": func(w *world) func() {
			w.whole(harming(slow(), time.Now().Add(time.Hour)))
			return func() { w.whole(&meshv1.Traffic{}) }
		},
		"its time ends": func(w *world) func() {
			w.whole(harming(slow(), time.Now().Add(2*time.Second)))
			return func() {}
		},
		"a delay's time ends": func(w *world) func() {
			w.whole(harming(&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}}, time.Now().Add(2*time.Second)))
			return func() {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(rw, strings.Repeat("x", 4000))
			}))
			end := begin(w)
			c := w.client(plainAt)
			c.Timeout = 10 * time.Second
			resp, err := c.Get("http://slow.example.com/")
			require.NoError(t, err)
			defer resp.Body.Close()
			end()
			b, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.Len(t, b, 4000)
		})
	}
}

func TestAnAnswerIsNotBrokenOffForARuleThatIsGone(t *testing.T) {
	w := newWorld(t)
	answer := make(chan struct{})
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(200)
		rw.(http.Flusher).Flush()
		<-answer
		_, _ = io.WriteString(rw, "whole")
	}))
	w.whole(harming(&meshv1.FaultRule{Truncate: &meshv1.Truncate{AfterBytes: 1, Percent: 100}}, time.Now().Add(time.Hour)))
	resp, err := w.client(plainAt).Get("http://slow.example.com/")
	require.NoError(t, err)
	defer resp.Body.Close()
	w.whole(&meshv1.Traffic{})
	close(answer)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "whole", string(b))
}
