package egress

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// listen serves each connection that is meant for an address.
func (w *world) listen(to string, serve func(c net.Conn, b *bufio.Reader)) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w, err)
	w.Cleanup(func() { l.Close() })
	w.mu.Lock()
	w.backends[to] = l.Addr().String()
	w.mu.Unlock()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.Cleanup(func() { c.Close() })
			go serve(c, bufio.NewReader(c))
		}
	}()
}

// dial returns a connection of a client that is meant for an address.
func (w *world) dial(to string) (net.Conn, *bufio.Reader) {
	c, err := net.Dial("tcp", w.redirect(to))
	require.NoError(w, err)
	w.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(soon))
	return c, bufio.NewReader(c)
}

// headOf reads a head.
func headOf(b *bufio.Reader) string {
	var head strings.Builder
	for {
		line, err := b.ReadString('\n')
		head.WriteString(line)
		if err != nil || line == "\r\n" {
			return head.String()
		}
	}
}

func TestDeclinedConnectEndsWithItsClient(t *testing.T) {
	for name, end := range map[string]func(*world, net.Conn){
		"the client leaves": func(_ *world, c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); c.Close() },
		"the server is cut": func(w *world, _ net.Conn) { w.server.Stop(); w.server.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			ended := make(chan struct{})
			w.listen(proxyAt, func(c net.Conn, b *bufio.Reader) {
				headOf(b)
				_, _ = io.WriteString(c, "HTTP/1.1 407 Who Are You\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n")
				_, _ = io.Copy(io.Discard, b)
				close(ended)
			})
			c, b := w.dial(proxyAt)
			_, err := io.WriteString(c, "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n")
			require.NoError(t, err)
			resp, err := http.ReadResponse(b, &http.Request{Method: "CONNECT"})
			require.NoError(t, err, "the head comes before the body ends")
			require.Equal(t, 407, resp.StatusCode)
			some := make([]byte, 2)
			_, err = io.ReadFull(resp.Body, some)
			require.NoError(t, err)
			require.Equal(t, "no", string(some))
			end(w, c)
			select {
			case <-ended:
			case <-time.After(soon):
				t.Fatal("the proxy is still asked")
			}
			require.Eventually(t, func() bool { return w.held.Taken() == 0 && w.conns.Open.Taken() == 0 }, soon, time.Millisecond)
		})
	}
}

func TestTruncatedDeclineLooksTruncated(t *testing.T) {
	w := newWorld(t)
	w.listen(proxyAt, func(c net.Conn, b *bufio.Reader) {
		headOf(b)
		_, _ = io.WriteString(c, "HTTP/1.1 503 Away\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n")
		c.Close()
	})
	c, b := w.dial(proxyAt)
	_, err := io.WriteString(c, "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n")
	require.NoError(t, err)
	resp, err := http.ReadResponse(b, &http.Request{Method: "CONNECT"})
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestNestedConnectGoesThroughTheOuterTunnel(t *testing.T) {
	w := newWorld(t)
	w.set(rules(&meshv1.Egress{}, deny(host("denied.example.com"))))
	got := make(chan string, 16)
	w.listen(proxyAt, func(c net.Conn, b *bufio.Reader) {
		for depth := 0; ; depth++ {
			head := headOf(b)
			target, _, _ := strings.Cut(head, "\r\n")
			if head == "" {
				return
			}
			got <- fmt.Sprint(depth, " ", target, " ", strings.Contains(head, "secret"))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n"+map[bool]string{true: "Content-Length: 0\r\n"}[strings.HasPrefix(target, "GET")]+"\r\n")
		}
	})
	c, b := w.dial(proxyAt)
	ask := func(request string) string {
		_, err := io.WriteString(c, request+"\r\n\r\n")
		require.NoError(t, err)
		return headOf(b)
	}
	require.Contains(t, ask("CONNECT inner.example.com:3128 HTTP/1.1\r\nHost: inner.example.com:3128"), " 200 ")
	require.Contains(t, ask("CONNECT last.example.com:80 HTTP/1.1\r\nHost: last.example.com:80\r\nProxy-Authorization: secret"), " 200 ")
	require.Contains(t, ask("GET / HTTP/1.1\r\nHost: last.example.com"), " 200 ")
	require.Equal(t, "0 CONNECT inner.example.com:3128 HTTP/1.1 false", <-got)
	require.Equal(t, "1 CONNECT last.example.com:80 HTTP/1.1 true", <-got, "the credential goes to the inner one alone")
	require.Equal(t, "2 GET / HTTP/1.1 false", <-got)

	// The rules apply to the hosts of all CONNECTs.
	w.set(rules(&meshv1.Egress{}, deny(host("inner.example.com"))))
	require.Contains(t, ask("GET / HTTP/1.1\r\nHost: last.example.com"), " 403 ")
}

func TestNestedConnectsAreBounded(t *testing.T) {
	w := newWorld(t)
	w.set(rules(&meshv1.Egress{}, deny(host("denied.example.com"))))
	w.listen(proxyAt, func(c net.Conn, b *bufio.Reader) {
		for headOf(b) != "" {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		}
	})
	c, b := w.dial(proxyAt)
	for i := range maxVia + 1 {
		_, err := fmt.Fprintf(c, "CONNECT p%d.example.com:80 HTTP/1.1\r\nHost: p%d.example.com:80\r\n\r\n", i, i)
		require.NoError(t, err)
		require.Contains(t, headOf(b), map[bool]string{true: " 200 ", false: " 400 "}[i < maxVia])
	}
}

func TestRefusedTLSIsNotConnectedForDecryption(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	w.backend(proxyAt, forwardProxy(w))
	path := &meshv1.HttpMatch{Path: exactly("/x")}
	w.set(strict(&meshv1.Egress{Decrypt: true}, deny(path), deny(host("api.example.com"))))
	_, err := w.client(secureAt).Get("https://api.example.com/")
	require.ErrorContains(t, err, "access denied")
	require.Contains(t, w.raw(w.redirect(proxyAt), "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\nConnection: close\r\n\r\n"), " 403 ")
	require.Empty(t, w.dials)
	require.Equal(t, []string{"tls denied", "connect denied"}, w.got())
}

func TestInvalidStatusIsAnswered502(t *testing.T) {
	w := newWorld(t)
	var answer string
	w.listen(plainAt, func(c net.Conn, b *bufio.Reader) {
		headOf(b)
		_, _ = io.WriteString(c, answer)
		_, _ = io.Copy(io.Discard, b)
	})
	at := w.redirect(plainAt)
	for _, request := range []string{
		"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
		"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\nConnection: close\r\n\r\n",
	} {
		for _, answer = range []string{"HTTP/1.1 099 x\r\n\r\n", "HTTP/1.1 000 x\r\n\r\n", "HTTP/1.1 101 x\r\n\r\n"} {
			require.Contains(t, w.raw(at, request), " 502 ", request+answer)
		}
	}
	answer = "HTTP/1.1 103 soon\r\n\r\nHTTP/1.1 100 go on\r\n\r\nHTTP/1.1 407 no\r\nContent-Length: 0\r\n\r\n"
	require.Contains(t, w.raw(at, "CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\nConnection: close\r\n\r\n"), " 407 ")
}

func TestUnrequestedProtocolSwitchIsAnswered502(t *testing.T) {
	w := newWorld(t)
	w.listen(plainAt, func(c net.Conn, b *bufio.Reader) {
		head := headOf(b)
		if strings.Contains(head, "h2c") {
			_, _ = io.WriteString(c, "HTTP/1.1 200 no\r\nContent-Length: 0\r\n\r\n")
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n")
	})
	c, b := w.dial(plainAt)
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	require.NoError(t, err)
	resp, err := http.ReadResponse(b, nil)
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 502, resp.StatusCode)
	for _, of := range w.conns.List() {
		require.False(t, of.Upgraded.Load(), "its bounds apply again")
	}
}

func TestUpgradeToH2CIsNotForwarded(t *testing.T) {
	w := newWorld(t)
	got := make(chan string, 1)
	w.listen(plainAt, func(c net.Conn, b *bufio.Reader) {
		got <- headOf(b)
		_, _ = io.WriteString(c, "HTTP/1.1 200 no\r\nContent-Length: 0\r\n\r\n")
	})
	at := w.redirect(plainAt)
	for _, upgrade := range []string{"h2c", "H2C", "h2c, x", "x, h2c"} {
		w.set(rules(&meshv1.Egress{}))
		require.Contains(t, w.raw(at, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: "+upgrade+"\r\n\r\n"), " 200 ")
		require.NotContains(t, strings.ToLower(<-got), "h2c", upgrade)
	}
}

func TestRefusedConnectTakesNoTokens(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(hello200))
	w.listen(proxyAt, func(c net.Conn, b *bufio.Reader) {
		headOf(b)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		for headOf(b) != "" {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		}
	})
	limited := func(name string, burst uint32, m *meshv1.HttpMatch) *meshv1.LimitRule {
		return &meshv1.LimitRule{Name: name, Key: name, Http: []*meshv1.HttpMatch{m}, Trigger: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
			Bucket: &meshv1.Bucket{Burst: burst, Limit: 1, IntervalNs: int64(time.Hour)}}
	}
	w.whole(&meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{
		limited("own", 2, host("own")),
		limited("way", 1, host("way")),
		limited("deep", 1, &meshv1.HttpMatch{Host: exactly("way"), Path: exactly("/never")}),
	}}}})
	w.mu.Lock()
	w.policy.decrypt = true // so that what goes through decides
	w.mu.Unlock()
	c, b := w.dial(proxyAt)
	ask := func(request string) string {
		_, err := io.WriteString(c, request+"\r\n\r\n")
		require.NoError(t, err)
		head := headOf(b)
		if length := strings.Index(head, "Content-Length: "); length >= 0 {
			var n int
			_, err = fmt.Sscanf(head[length:], "Content-Length: %d", &n)
			require.NoError(t, err)
			_, err = b.Discard(n)
			require.NoError(t, err)
		}
		return head
	}
	require.Contains(t, ask("CONNECT way:80 HTTP/1.1\r\nHost: way:80"), " 200 ")
	require.Contains(t, ask("GET / HTTP/1.1\r\nHost: own"), " 200 ")
	require.Contains(t, ask("GET / HTTP/1.1\r\nHost: own"), " 429 ")
	at := w.redirect(plainAt)
	const direct = "GET / HTTP/1.1\r\nHost: own\r\nConnection: close\r\n\r\n"
	require.Contains(t, w.raw(at, direct), " 200 ", "the refused one took none")
	require.Contains(t, w.raw(at, direct), " 429 ")
}

func TestPolicyChangeDuringConnectCutsNothingAllowed(t *testing.T) {
	w := newWorld(t)
	asked := make(chan struct{}, 1)
	goOn := make(chan struct{})
	w.listen(proxyAt, func(c net.Conn, b *bufio.Reader) {
		headOf(b)
		asked <- struct{}{}
		<-goOn
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		_, _ = io.Copy(io.Discard, b)
	})
	deep := strict(&meshv1.Egress{Decrypt: true}, deny(&meshv1.HttpMatch{Host: exactly("api.example.com"), Path: exactly("/x")}))
	w.set(deep)
	c, b := w.dial(proxyAt)
	_, err := io.WriteString(c, "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n")
	require.NoError(t, err)
	<-asked
	w.set(deep)
	require.Len(t, w.server.flows.List(), 1)
	close(goOn)
	require.Contains(t, headOf(b), " 200 ", "what goes through is seen later")
}

func TestPolicyChangeCutsRefusedConnect(t *testing.T) {
	w := newWorld(t)
	asked, ended := make(chan struct{}, 1), make(chan struct{})
	w.listen(proxyAt, func(_ net.Conn, b *bufio.Reader) {
		headOf(b)
		asked <- struct{}{}
		_, _ = io.Copy(io.Discard, b)
		close(ended)
	})
	deep := deny(&meshv1.HttpMatch{Host: exactly("api.example.com"), Path: exactly("/x")})
	w.set(rules(&meshv1.Egress{Decrypt: true}, deep))
	c, b := w.dial(proxyAt)
	_, err := io.WriteString(c, "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n")
	require.NoError(t, err)
	<-asked
	w.set(rules(&meshv1.Egress{Decrypt: true}, deep, deny(host("api.example.com"))))
	<-ended
	require.Empty(t, headOf(b))
	require.Eventually(t, func() bool { return len(w.got()) == 1 && w.got()[0] == "connect cut" }, soon, time.Millisecond)
}

// asAProxy accepts CONNECTs, and answers the requests within them.
func asAProxy(c net.Conn, b *bufio.Reader) {
	defer c.Close()
	for {
		target, _, _ := strings.Cut(headOf(b), " ")
		switch target {
		case "CONNECT":
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		case "GET":
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		default:
			_, _ = io.Copy(io.Discard, b)
			return
		}
	}
}

// connect sends a CONNECT that is accepted.
func (w *world) connect(c net.Conn, b *bufio.Reader, to string) {
	w.Helper()
	_, err := fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", to)
	require.NoError(w, err)
	require.Contains(w, headOf(b), " 200 ")
}

// Between a CONNECT and its first bytes nothing is in progress: they are refused when they
// arrive.
func TestForceOpenedAppliesWithinConnects(t *testing.T) {
	get := []byte("GET / HTTP/1.1\r\nHost: other.example.com\r\n\r\n")
	for name, m := range map[string]*meshv1.HttpMatch{"any host": {}, "the host of the CONNECT": host("api.example.com")} {
		for what, first := range map[string][]byte{
			"tls":             clientHello(t, &tls.Config{InsecureSkipVerify: true}),
			"tls by the name": clientHello(t, &tls.Config{ServerName: "api.example.com"}),
			"tls by another":  clientHello(t, &tls.Config{ServerName: "other.example.com"}),
			"other":           []byte("SSH-2.0-x\r\n"),
			"http":            get,
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				w := newWorld(t)
				w.listen(proxyAt, asAProxy)
				force := func(by meshv1.Trigger) {
					w.whole(&meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{
						{Name: "rule", Key: "rule", Trigger: by, Http: []*meshv1.HttpMatch{m}},
					}}}})
				}
				force(meshv1.Trigger_TRIGGER_FORCE_CLOSED)
				c, b := w.dial(proxyAt)
				w.connect(c, b, "api.example.com:443")
				force(meshv1.Trigger_TRIGGER_FORCE_OPENED)
				protocol, _, _ := strings.Cut(what, " ")
				switch _, err := c.Write(first); protocol {
				case "http":
					require.NoError(t, err)
					resp, err := http.ReadResponse(b, nil)
					require.NoError(t, err)
					_, err = io.Copy(io.Discard, resp.Body)
					require.NoError(t, err)
					require.Equal(t, 503, resp.StatusCode)
					_, err = c.Write(get)
					require.NoError(t, err)
					require.Contains(t, headOf(b), " 503 ")
				default:
					require.NoError(t, err)
					got, _ := io.ReadAll(b)
					require.Equal(t, map[string]string{"tls": string(accessDenied)}[protocol], string(got))
				}
				require.Eventually(t, func() bool { return slices.Contains(w.got(), protocol+" opened") }, soon, time.Millisecond)
			})
		}
	}
}

func oneOf(name string, m ...*meshv1.HttpMatch) *meshv1.LimitRule {
	return &meshv1.LimitRule{Name: name, Key: name, Http: m, Trigger: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
		Bucket: &meshv1.Bucket{Burst: 1, Limit: 1, IntervalNs: int64(time.Hour)}}
}

// A rule counts a CONNECT and its tunnel as one, for any of their hosts, and only if it
// counted the CONNECT.
func TestLimitsCountConnectAndTunnelOnce(t *testing.T) {
	for name, test := range map[string]struct {
		rules   []*meshv1.LimitRule
		decrypt bool
		through []string // CONNECTs, one within the other
		within  string   // the name of TLS
		first   string   // what becomes of the tunnel
		second  string   // and of another one, or of its CONNECT
	}{
		"any host": {
			rules: []*meshv1.LimitRule{oneOf("any", &meshv1.HttpMatch{})}, through: []string{"api.example.com:443"}, within: "other.example.com",
			first: "tls passed", second: "connect limited",
		},
		"hosts of a rule": {
			rules: []*meshv1.LimitRule{oneOf("two", host("other.example.com"), host("api.example.com"))}, through: []string{"api.example.com:443"}, within: "other.example.com",
			first: "tls passed", second: "connect limited",
		},
		"a rule for each": {
			rules: []*meshv1.LimitRule{oneOf("api", host("api.example.com")), oneOf("any", &meshv1.HttpMatch{})}, through: []string{"api.example.com:443"}, within: "other.example.com",
			first: "tls passed", second: "connect limited",
		},
		"a rule for the name": {
			rules: []*meshv1.LimitRule{oneOf("other", host("other.example.com"))}, through: []string{"api.example.com:443"}, within: "other.example.com",
			first: "tls passed", second: "tls limited",
		},
		"another port before": {
			rules: []*meshv1.LimitRule{oneOf("any", &meshv1.HttpMatch{Port: 443})}, decrypt: true, through: []string{"api.example.com:80", "api.example.com:443"},
			first: "tls passed", second: "tls limited",
		},
		"another port before, of the host": {
			rules: []*meshv1.LimitRule{oneOf("api", &meshv1.HttpMatch{Host: exactly("api.example.com"), Port: 443})}, decrypt: true, through: []string{"api.example.com:80", "api.example.com:443"},
			first: "tls passed", second: "tls limited",
		},
		"another port before, of a pod that does not trust": {
			rules: []*meshv1.LimitRule{oneOf("any", &meshv1.HttpMatch{Port: 443})}, through: []string{"api.example.com:80", "api.example.com:443"},
			first: "tls passed", second: "connect limited",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.listen(proxyAt, asAProxy)
			w.whole(&meshv1.Traffic{Egress: &meshv1.Egress{Decrypt: test.decrypt}, Breakers: []*meshv1.Breaker{{Name: "cb", Rules: test.rules}}})
			for _, expected := range []string{test.first, test.second} {
				c, b := w.dial(proxyAt)
				for i, to := range test.through {
					if i == len(test.through)-1 && expected == "connect limited" {
						_, err := fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", to)
						require.NoError(t, err)
						require.Contains(t, headOf(b), " 429 ")
					} else {
						w.connect(c, b, to)
					}
				}
				if expected != "connect limited" {
					_, err := c.Write(clientHello(t, &tls.Config{ServerName: test.within, InsecureSkipVerify: true}))
					require.NoError(t, err)
				}
				tunnels := func() []string {
					return slices.DeleteFunc(w.got(), func(v string) bool { return v == "connect passed" })
				}
				require.Eventually(t, func() bool { return len(tunnels()) > 0 }, soon, time.Millisecond)
				require.Equal(t, []string{expected}, tunnels())
				c.Close()
				require.Eventually(t, func() bool { return w.conns.Open.Taken() == 0 }, soon, time.Millisecond)
				w.mu.Lock()
				w.verdicts = nil
				w.mu.Unlock()
			}
		})
	}
}

// Requests that are seen within a CONNECT are counted on their own.
func TestRequestsWithinConnectsAreLimitedByHost(t *testing.T) {
	w := newWorld(t)
	w.listen(proxyAt, asAProxy)
	rule := oneOf("two", host("api.example.com"))
	rule.Bucket.Burst = 2
	w.whole(&meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{rule}}}})
	c, b := w.dial(proxyAt)
	w.connect(c, b, "api.example.com:80")
	for _, expected := range []string{" 200 ", " 429 "} {
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: other.example.com\r\n\r\n")
		require.NoError(t, err)
		require.Contains(t, headOf(b), expected)
	}
}

// A CONNECT is not in flight while requests are read within it, but is while its tunnel
// is opaque.
func TestConnectIsInFlightUntilItsTunnelEnds(t *testing.T) {
	w := newWorld(t)
	w.listen(proxyAt, asAProxy)
	served, count := make(chan struct{}, 8), w.server.Count
	w.server.Count = func(protocol, verdict string) {
		count(protocol, verdict)
		if protocol == ProtocolHTTP {
			served <- struct{}{}
			return
		}
		select { // whether or not requests within are served before the CONNECT is over
		case <-served:
		case <-time.After(50 * time.Millisecond):
		}
	}
	w.whole(&meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{
		{Name: "one", Key: "one", Http: []*meshv1.HttpMatch{host("api.example.com")}, MaxInFlight: 1},
	}}}})
	c, b := w.dial(proxyAt)
	w.connect(c, b, "api.example.com:80")
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: other.example.com\r\n\r\n")
	require.NoError(t, err)
	require.Contains(t, headOf(b), " 200 ")

	w.connect(c, b, "other.example.com:443")
	_, err = c.Write(clientHello(t, &tls.Config{InsecureSkipVerify: true}))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return slices.Contains(w.got(), "tls passed") }, soon, time.Millisecond)
	another, b := w.dial(proxyAt)
	_, err = io.WriteString(another, "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n")
	require.NoError(t, err)
	require.Contains(t, headOf(b), " 429 ")
	c.Close()
	require.Eventually(t, func() bool {
		_, err = io.WriteString(another, "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n")
		require.NoError(t, err)
		return strings.Contains(headOf(b), " 200 ")
	}, soon, time.Millisecond)
}
