package egress

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/listen"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

func TestMissingCertificateRefusesWhatMayBeDenied(t *testing.T) {
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

// A client may offer no HTTP in ALPN, and the server may speak it nevertheless.
func TestOtherALPNRefusesWhatMayBeDenied(t *testing.T) {
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

// Bytes above the bounds are lost, so the rest must not be forwarded.
func TestTunnelAboveBoundsForwardsNothing(t *testing.T) {
	w := newWorld(t)
	w.conns.Unserved.Own = 100
	conn, err := net.Dial("tcp", w.redirect(plainAt))
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "SSH")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return w.conns.Unserved.Taken() == 3*downstream.UnservedWeight }, soon, time.Millisecond)
	_, err = io.WriteString(conn, "-2.0-client\r\n")
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(soon)))
	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Empty(t, w.got())
}

// TestUnreadStreamsTakeLittleMemory counts what the server could send, most of
// which is in the sockets' buffers.
func TestUnreadStreamsTakeLittleMemory(t *testing.T) {
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

// The proxy's own answers wait for the client like those of a server.
func TestStalledStreamsAreReset(t *testing.T) {
	w := newWorld(t)
	w.server.http.Stall = 300 * time.Millisecond
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
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(soon)))
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

// faultsUntil injects a fault into the answers of slow.example.com until a time.
func faultsUntil(f *meshv1.FaultRule, expires time.Time) *meshv1.Traffic {
	f.Name, f.Key, f.Http = "slow", "slow", []*meshv1.HttpMatch{host("slow.example.com")}
	return &meshv1.Traffic{Injections: []*meshv1.Injection{{Name: "fi", Expires: expires.Unix(), Rules: []*meshv1.FaultRule{f}}}}
}

func TestFaultsEndWithTheirRule(t *testing.T) {
	slow := func() *meshv1.FaultRule {
		return &meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 20, Percent: 100}}
	}
	for name, begin := range map[string]func(w *world) (end func()){
		"the rule goes": func(w *world) func() {
			w.whole(faultsUntil(slow(), time.Now().Add(time.Hour)))
			return func() { w.whole(&meshv1.Traffic{}) }
		},
		"its time ends": func(w *world) func() {
			w.whole(faultsUntil(slow(), time.Now().Add(2*time.Second)))
			return func() {}
		},
		"a delay's time ends": func(w *world) func() {
			w.whole(faultsUntil(&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}}, time.Now().Add(2*time.Second)))
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
			c.Timeout = soon
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

// Faults that were not injected are not reported.
func TestSlowBodyLiftedBeforeTheAnswer(t *testing.T) {
	w := newWorld(t)
	injected := make(chan string, 2)
	w.server.Injected = func(of fault.Injected) { injected <- of.Injection }
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/lifted" {
			w.whole(&meshv1.Traffic{})
		}
		_, _ = io.WriteString(rw, "done")
	}))
	c := w.client(plainAt)
	for _, name := range []string{"lifted", "stays"} {
		m := faultsUntil(&meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 1000, Percent: 100}}, time.Now().Add(time.Hour))
		m.Injections[0].Name = name
		w.whole(m)
		_, body := w.get(c, "http://slow.example.com/"+name)
		require.Equal(t, "done", body)
	}
	require.Equal(t, "stays", <-injected)
}

func TestDelayedRequestEndsWithItsClient(t *testing.T) {
	for name, end := range map[string]func(*world, net.Conn){
		"the client leaves": func(_ *world, c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); c.Close() },
		// Not after Stop: the delay may not have begun yet, and a draining server has none.
		"the server is cut": func(w *world, _ net.Conn) { w.server.Close() },
	} {
		for _, length := range []int{2, 1 << 20} { // of which all is sent, or not
			if length > 2 && name == "the client leaves" {
				continue // that is seen when the delay ends
			}
			t.Run(fmt.Sprint(name, length), func(t *testing.T) {
				w := newWorld(t)
				w.backend(plainAt, http.HandlerFunc(hello200))
				w.whole(faultsUntil(&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}}, time.Now().Add(2*time.Hour)))
				c, _ := w.dial(plainAt)
				_, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: slow.example.com\r\nContent-Length: %d\r\n\r\n{}", length)
				require.NoError(t, err)
				require.Eventually(t, func() bool { return w.held.Taken() > 0 }, soon, time.Millisecond)
				end(w, c)
				require.Eventually(t, func() bool { return w.held.Taken() == 0 && w.conns.Open.Taken() == 0 }, soon, time.Millisecond)
				w.mu.Lock()
				defer w.mu.Unlock()
				require.Empty(t, w.dials, "nobody is asked for who is gone")
			})
		}
	}
}

func TestDrainingServerInjectsNoDelays(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(hello200))
	rule := faultsUntil(&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(time.Hour), Percent: 100}}, time.Now().Add(2*time.Hour))
	w.whole(rule)
	c, b := w.dial(plainAt)
	const request = "GET / HTTP/1.1\r\nHost: slow.example.com\r\n\r\n"
	_, err := io.WriteString(c, request)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return w.held.Taken() > 0 }, soon, time.Millisecond)
	w.server.Stop()
	require.Contains(t, headOf(b), " 200 ")
	require.NoError(t, w.server.Drain(t.Context()))
}

func TestRemovedRuleDoesNotTruncateAnswers(t *testing.T) {
	w := newWorld(t)
	answer := make(chan struct{})
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(200)
		rw.(http.Flusher).Flush()
		<-answer
		_, _ = io.WriteString(rw, "whole")
	}))
	w.whole(faultsUntil(&meshv1.FaultRule{Truncate: &meshv1.Truncate{AfterBytes: 1, Percent: 100}}, time.Now().Add(time.Hour)))
	resp, err := w.client(plainAt).Get("http://slow.example.com/")
	require.NoError(t, err)
	defer resp.Body.Close()
	w.whole(&meshv1.Traffic{})
	close(answer)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "whole", string(b))
}

// The host that a server reads is taken from the bytes that it receives, as strictly as in
// RFC 9112: it is in the target, or else in the only Host field.
func TestServersReadTheHostThatRulesRead(t *testing.T) {
	w := newWorld(t)
	heard := make(chan string, 1)
	w.listen(plainAt, func(c net.Conn, b *bufio.Reader) {
		heard <- headOf(b)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
		c.Close()
	})
	w.set(strict(&meshv1.Egress{}, allow(host("good"))))
	at := w.redirect(plainAt)
	for request, passes := range map[string]bool{
		"GET x:http://evil/ HTTP/1.1\r\nHost: good":                               false,
		"GET x:evil HTTP/1.1\r\nHost: good":                                       false,
		"GET x://good/ HTTP/1.1\r\nHost: good":                                    false,
		"GET http:///y HTTP/1.1\r\nHost: good":                                    true,
		"GET http://good?http://evil/ HTTP/1.1\r\nHost: evil":                     true,
		"GET http://good:8080/ HTTP/1.1\r\nHost: evil":                            true,
		"OPTIONS http://good HTTP/1.1\r\nHost: evil":                              true,
		"OPTIONS * HTTP/1.1\r\nHost: good":                                        true,
		"GET / HTTP/1.1\r\nHost: good\r\nConnection: Host":                        true,
		"GET / HTTP/1.1\r\nHost: good\r\nX: a\r\n Host: evil":                     true,
		"GET / HTTP/1.1\nHost: good\nX: a":                                        true,
		"GET / HTTP/1.1\r\nHost: good\r\nX: a\rHost: evil":                        false,
		"GET / HTTP/1.1\r\n Host: evil\r\nHost: good":                             false,
		"GET / HTTP/1.1\r\nHost: good\r\n\tHost: evil":                            false,
		"GET / HTTP/1.1\r\nHost: good:80@evil":                                    false,
		"GET / HTTP/1.1\r\nHost: [fe80::1%25good]":                                false,
		"GET / HTTP/1.1\r\nHost: good,evil":                                       false,
		"GET / HTTP/1.1\r\nHost: GOOD.":                                           true,
		"GET / HTTP/1.0":                                                          false,
		"PRI * HTTP/2.0\r\nHost: good":                                            true,
		"GET / HTTP/1.0\r\nHost: good\r\nTransfer-Encoding: chunked":              true,
		"GET / HTTP/1.1\r\nHost: good\r\nUpgrade: websocket\r\nUpgrade: h2c":      true,
		"CONNECT evil:443@good:443 HTTP/1.1\r\nHost: evil:443":                    true,
		"CONNECT good:443?evil HTTP/1.1\r\nHost: evil:443\r\nContent-Length: 5":   true,
		"CONNECT http://evil:443 HTTP/1.1\r\nHost: good:443":                      false,
		"CONNECT /evil:443 HTTP/1.1\r\nHost: good:443":                            false,
		"POST / HTTP/1.1\r\nHost: good\r\nConnection: Content-Length, Keep-Alive": true,
	} {
		c, err := net.Dial("tcp", at)
		require.NoError(t, err)
		_ = c.SetDeadline(time.Now().Add(soon))
		_, err = io.WriteString(c, request+"\r\n\r\n")
		require.NoError(t, err)
		answer := headOf(bufio.NewReader(c))
		require.Equal(t, passes, strings.Contains(answer, " 200 "), "%q: %s", request, answer)
		c.Close()
		if !passes {
			require.Empty(t, heard, request)
			continue
		}
		head := <-heard
		line, fields, _ := strings.Cut(head, "\r\n")
		target := strings.Fields(line)[1]
		hosts := regexp.MustCompile(`(?im)^host:\s*(\S*)\r$`).FindAllStringSubmatch(fields, -1)
		require.Len(t, hosts, 1, head)
		asked := hosts[0][1]
		if u, err := url.Parse(target); err == nil && u.Host != "" {
			asked = u.Host
		} else if strings.HasPrefix(line, "CONNECT ") {
			asked = target
		} else {
			require.Regexp(t, `^(/|\*$)`, target)
		}
		name, _, ok := authority(asked)
		require.True(t, ok, head)
		require.Equal(t, "good", name, head)
	}
}

// The port of a target is for forward proxies; other servers ignore it.
func TestDeniedPortIsDeniedForAnyTarget(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(hello200))
	at := w.redirect(plainAt)
	const direct, proxied = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", "GET http://a:8080/ HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
	w.set(rules(&meshv1.Egress{}, deny(&meshv1.HttpMatch{Port: 80})))
	require.Contains(t, w.raw(at, direct), " 403 ")
	require.Contains(t, w.raw(at, proxied), " 403 ")
	w.set(rules(&meshv1.Egress{}, allow(&meshv1.HttpMatch{Host: exactly("a"), Port: 8080})))
	require.Contains(t, w.raw(at, direct), " 403 ")
	require.Contains(t, w.raw(at, proxied), " 200 ", "a proxy is at another port than it is asked for")
}

func TestAnnouncedHelloTakesNoMemory(t *testing.T) {
	w := newWorld(t)
	announced := []byte{recordHandshake, 3, 1, maxRecord >> 8, 0, messageClientHello, 0, 0xf0, 0}
	c := newConn(w.server, w.conns.Accept(&script{in: bytes.NewReader(announced)}, false), netip.AddrPort{})
	c.sniff()
	require.LessOrEqual(t, cap(c.early), 1<<10)
	require.NoError(t, c.Close())
}

// The bytes within a CONNECT and the head of the CONNECT are accounted for like others.
func TestConnectsAreAccountedFor(t *testing.T) {
	w := newWorld(t)
	w.listen(proxyAt, func(c net.Conn, b *bufio.Reader) {
		headOf(b)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		_, _ = io.Copy(io.Discard, b)
		c.Close()
	})
	w.set(strict(&meshv1.Egress{}, allow(host("good"))))
	hello := clientHello(t, &tls.Config{ServerName: "good"})
	const fields = 1000
	c, b := w.dial(proxyAt)
	_, err := io.WriteString(c, "CONNECT good:443 HTTP/1.1\r\nHost: good:443\r\n"+strings.Repeat("X:\r\n", fields)+"\r\n")
	require.NoError(t, err)
	require.Contains(t, headOf(b), " 200 ")
	_, err = c.Write(hello[:len(hello)-1])
	require.NoError(t, err)
	require.Eventually(t, func() bool { return w.conns.Unserved.Taken() == int64(downstream.UnservedWeight*(len(hello)-1)) }, soon, time.Millisecond)
	_, err = c.Write(hello[len(hello)-1:])
	require.NoError(t, err)
	require.Eventually(t, func() bool { return w.conns.Unserved.Taken() == 0 }, soon, time.Millisecond)
	require.Greater(t, w.held.Taken(), int64(fields*listen.FieldWeight), "the head is there to ask again with")
	require.Less(t, w.held.Taken(), int64(requestWeight)+fields*2*listen.FieldWeight)
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return w.held.Taken() == 0 }, soon, time.Millisecond)
}

// Few refusals wait for clients that do not read them, because each keeps a head.
func TestRefusalsAboveBoundsAreBounded(t *testing.T) {
	w := newWorld(t)
	both := &http.Protocols{}
	both.SetUnencryptedHTTP2(true)
	w.backend(plainAt, http.HandlerFunc(hello200), func(s *httptest.Server) { s.Config.Protocols = both })
	w.held.Own = 0
	conn, err := net.Dial("tcp", w.redirect(plainAt))
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, http2.ClientPreface)
	require.NoError(t, err)
	f := http2.NewFramer(conn, conn)
	require.NoError(t, f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
	var head bytes.Buffer
	h := hpack.NewEncoder(&head)
	const streams = maxStreams / 2
	for i := range streams {
		head.Reset()
		for _, field := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "a"}, {":path", "/"}} {
			require.NoError(t, h.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}))
		}
		require.NoError(t, f.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1), BlockFragment: head.Bytes(), EndStream: true, EndHeaders: true}))
	}
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(soon)))
	for reset := 0; reset < streams-maxRefusing; {
		frame, err := f.ReadFrame()
		require.NoError(t, err)
		if _, ok := frame.(*http2.RSTStreamFrame); ok {
			reset++
		}
	}
	require.NoError(t, conn.Close())
	require.Eventually(t, func() bool { return w.server.refusing.Load() == 0 }, soon, time.Millisecond)
}
