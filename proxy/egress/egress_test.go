package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/certs"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/redirected"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

const (
	plainAt  = "192.0.2.1:80"
	secureAt = "192.0.2.2:443"
	otherAt  = "192.0.2.3:443"
	proxyAt  = "192.0.2.4:3128"
)

// soon bounds waits. It is long enough for a busy machine.
const soon = 30 * time.Second

// world is a pod, the Server of its egress, and the servers that it connects to.
type world struct {
	testing.TB
	server    *Server
	serversCA *certs.Authority
	egressCA  *certs.Authority
	conns     *downstream.Conns
	held      bounds.Account
	logs      syncBuffer

	mu       sync.Mutex
	policy   *Policy
	backends map[string]string
	dials    []string
	verdicts []string
	noLeaf   bool
}

func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func newWorld(t testing.TB) *world {
	w := &world{TB: t, serversCA: certs.New(), egressCA: certs.New(), backends: map[string]string{}}
	none := &bounds.Pool{}
	w.conns = (&downstream.Pools{Open: none, HTTP2: none, Unserved: none}).Conns(func(string) {})
	w.conns.Open.Own, w.conns.HTTP2.Own, w.conns.Unserved.Own = 1000, 32, 64<<20
	w.held.Pool, w.held.Own = none, 64<<20
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(w.serversCA.PEM())
	w.policy = &Policy{}
	w.server = NewServer(Config{
		Namespace: "ns", Pod: "ns/pod", UID: "uid",
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			w.mu.Lock()
			w.dials = append(w.dials, addr)
			to, ok := w.backends[addr]
			w.mu.Unlock()
			if !ok {
				return nil, errors.New("nobody there")
			}
			return (&net.Dialer{}).DialContext(ctx, network, to)
		},
		Policy: func() (*Policy, bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.policy, true
		},
		Forbidden: func(a netip.AddrPort) bool { return a.Addr().String() == "192.0.2.99" },
		Leaf: func(_ context.Context, host string) (*tls.Certificate, error) {
			if w.noLeaf {
				return nil, errors.New("the manager is away")
			}
			return w.egressCA.Leaf(host), nil
		},
		Roots: roots,
		Conns: w.conns, Held: &w.held,
		Log: slog.New(slog.NewJSONHandler(&w.logs, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Count: func(protocol, verdict string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.verdicts = append(w.verdicts, protocol+" "+verdict)
		},
		Limited:  func(*limit.Refusal) {},
		Injected: func(fault.Injected) {},
		Panicked: func() { t.Error("panic: " + w.logs.String()) },
	})
	t.Cleanup(func() {
		w.server.Stop()
		w.server.Close()
		require.Eventually(t, func() bool {
			return w.conns.Open.Taken() == 0 && w.conns.HTTP2.Taken() == 0 && w.conns.Unserved.Taken() == 0 && w.held.Taken() == 0
		}, soon, time.Millisecond, "accounts are even again")
		require.Eventually(t, func() bool { return len(w.server.flows.List()) == 0 }, soon, time.Millisecond)
	})
	return w
}

// set puts rules in force.
func (w *world) set(m *meshv1.Traffic) {
	p, err := Compile(m, nil, nil)
	require.NoError(w, err)
	w.mu.Lock()
	w.policy = p
	w.mu.Unlock()
	w.server.Changed()
}

func (w *world) got() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.verdicts...)
}

// redirect returns the address to which connections to another address are redirected.
func (w *world) redirect(to string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w, err)
	done := make(chan error, 1)
	go func() { done <- w.server.Serve(redirected.Listener{Listener: l, To: netip.MustParseAddrPort(to)}) }()
	w.Cleanup(func() {
		w.server.Stop()
		require.NoError(w, <-done)
	})
	return l.Addr().String()
}

// backend serves the connections that are meant for an address.
func (w *world) backend(to string, h http.Handler, config ...func(*httptest.Server)) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	if strings.HasSuffix(to, ":443") {
		s.TLS = &tls.Config{Certificates: []tls.Certificate{*w.serversCA.Leaf("api.example.com", "other.example.com")}}
		s.EnableHTTP2 = true
	}
	for _, c := range config {
		c(s)
	}
	if s.TLS != nil {
		s.StartTLS()
	} else {
		s.Start()
	}
	w.Cleanup(s.Close)
	w.mu.Lock()
	w.backends[to] = s.Listener.Addr().String()
	w.mu.Unlock()
	return s
}

// client returns a client whose connections are all meant for an address.
func (w *world) client(to string, config ...func(*http.Transport)) *http.Client {
	at := w.redirect(to)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(w.serversCA.PEM())
	roots.AppendCertsFromPEM(w.egressCA.PEM())
	t := &http.Transport{
		TLSClientConfig:    &tls.Config{RootCAs: roots},
		ForceAttemptHTTP2:  true,
		DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, at)
		},
	}
	for _, c := range config {
		c(t)
	}
	w.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (w *world) get(c *http.Client, url string) (int, string) {
	w.Helper()
	resp, err := c.Get(url)
	require.NoError(w, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(w, err)
	return resp.StatusCode, string(b)
}

func hello200(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "%s %s %s %s", r.Proto, r.Method, r.Host, r.RequestURI)
}

func exactly(s string) *meshv1.TextMatch {
	return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: s}}
}

func startsWith(s string) *meshv1.TextMatch {
	return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Prefix{Prefix: s}}
}

func rules(egress *meshv1.Egress, intercepts ...*meshv1.InterceptRule) *meshv1.Traffic {
	return &meshv1.Traffic{Egress: egress, Breakers: []*meshv1.Breaker{{Name: "cb", Intercepts: intercepts}}}
}

// strict returns rules that refuse what is not seen.
func strict(egress *meshv1.Egress, intercepts ...*meshv1.InterceptRule) *meshv1.Traffic {
	out := rules(egress, intercepts...)
	out.Breakers[0].RefuseUnseen = true
	return out
}

func allow(m ...*meshv1.HttpMatch) *meshv1.InterceptRule {
	return &meshv1.InterceptRule{Name: "allow", Http: m}
}

func deny(m ...*meshv1.HttpMatch) *meshv1.InterceptRule {
	return &meshv1.InterceptRule{Name: "deny", Deny: true, Http: m}
}

func host(name string) *meshv1.HttpMatch { return &meshv1.HttpMatch{Host: exactly(name)} }

func TestPlainHTTPIsDecidedByRequest(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(hello200))
	w.set(strict(&meshv1.Egress{},
		deny(&meshv1.HttpMatch{Host: exactly("api.example.com"), Path: startsWith("/secret"), Methods: []string{"GET"}}),
		deny(&meshv1.HttpMatch{Headers: []*meshv1.HeaderMatch{{Name: "x-tenant", Value: "b"}}}),
		allow(host("api.example.com"))))
	c := w.client(plainAt)

	code, body := w.get(c, "http://API.example.com:80/a%7Eb/c?q=1&x")
	require.Equal(t, 200, code)
	require.Equal(t, "HTTP/1.1 GET API.example.com:80 /a%7Eb/c?q=1&x", body)
	code, body = w.get(c, "http://api.example.com/secret/x")
	require.Equal(t, 403, code)
	require.JSONEq(t, `{"message":"CircuitBreaker ns/cb: rule deny denies this"}`, body)
	code, body = w.get(c, "http://api.example.com/%73ecret")
	require.Equal(t, 403, code, body)
	code, body = w.get(c, "http://elsewhere.example.com/")
	require.Equal(t, 403, code)
	require.JSONEq(t, `{"message":"CircuitBreaker ns/cb: none of its rules allows this"}`, body)
	resp, err := c.Post("http://api.example.com/secret", "text/plain", strings.NewReader("x"))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode, "another method")
	req, err := http.NewRequest("GET", "http://api.example.com/", nil)
	require.NoError(t, err)
	req.Header["X-Tenant"] = []string{"a", "b"}
	resp, err = c.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 403, resp.StatusCode)
	for _, path := range []string{"/a/%2e%2e/secret", "//secret", "/a%2fb", "/a%5Cb", "/x;y/secret", "/%252e%252e/x"} {
		code, body = w.get(c, "http://api.example.com"+path)
		require.Equal(t, 400, code, path+body)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range w.dials {
		require.Equal(t, plainAt, d)
	}
	require.NotContains(t, w.logs.String(), "secret")
	require.NotContains(t, w.logs.String(), "q=1")
}

func TestTargetsAndHeadsPassUnchanged(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header()["Date"], rw.Header()["Content-Type"] = nil, nil
		rw.Header()["X-Seen"] = []string{r.RequestURI}
		for _, k := range []string{"X-Forwarded-For", "User-Agent", "Accept-Encoding", "Proxy-Authorization", "Via"} {
			rw.Header().Add("X-Headers", k+"="+strings.Join(r.Header[k], ","))
		}
		_, _ = io.WriteString(rw, "<html>")
	}))
	at := w.redirect(plainAt)
	for _, target := range []string{"/a|b^{}\"?x=%zz;&y", "/a%2Fb/../c", "//double", "/?", "/a#b"} {
		answer := w.raw(at, "GET "+target+" HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: me\r\nProxy-Authorization: p\r\nConnection: close\r\n\r\n")
		require.Contains(t, answer, "X-Seen: "+target+"\r\n")
		require.Contains(t, answer, "X-Forwarded-For=me\r\n")
		require.Contains(t, answer, "Proxy-Authorization=p\r\n")
		require.Contains(t, answer, "User-Agent=\r\n")
		require.Contains(t, answer, "Accept-Encoding=\r\n")
		require.Contains(t, answer, "Via=\r\n")
		require.NotContains(t, answer, "Content-Type")
		require.NotContains(t, answer, "Date:")
	}
}

// raw sends bytes and reads until the end.
func (w *world) raw(at, request string) string {
	w.Helper()
	c, err := net.Dial("tcp", at)
	require.NoError(w, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	_, err = io.WriteString(c, request)
	require.NoError(w, err)
	b, _ := io.ReadAll(c)
	return string(b)
}

func TestPipelinedChunkedAndHalfClosedRequests(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		time.Sleep(20 * time.Millisecond) // the client's end comes first
		rw.Header().Set("Trailer", "X-Sum")
		fmt.Fprintf(rw, "[%s %s %s]", r.RequestURI, b, r.Trailer.Get("X-Check"))
		rw.Header().Set("X-Sum", "sum")
	}))
	c, err := net.Dial("tcp", w.redirect(plainAt))
	require.NoError(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	_, err = io.WriteString(c, "POST /1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: X-Check\r\n\r\n"+
		"3\r\nabc\r\n2\r\nde\r\n0\r\nX-Check: ok\r\n\r\n"+
		"GET /2 HTTP/1.1\r\nHost: a\r\n\r\nGET /3 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	require.NoError(t, c.(*net.TCPConn).CloseWrite())
	b, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Contains(t, string(b), "[/1 abcde ok]")
	require.Contains(t, string(b), "[/2  ]")
	require.Contains(t, string(b), "[/3  ]", w.logs.String())
	require.Equal(t, 3, strings.Count(string(b), "X-Sum: sum"))
}

// A server may answer, and end the connection, before the transport has read the names of the trailer, which it sends in
// the head. The proxy then ends the body of the request that came, which fills the trailer in.
func TestTrailersOfRequestsThatEndEarly(t *testing.T) {
	w := newWorld(t)
	w.listen(plainAt, func(c net.Conn, b *bufio.Reader) {
		_, _ = b.ReadByte()
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		_ = c.Close()
	})
	var names, fields strings.Builder
	for i := range 20_000 {
		name := strconv.FormatInt(int64(i), 36)
		names.WriteString(",X" + name)
		if i < 500 {
			fields.WriteString("X" + name + ": v\r\n")
		}
	}
	at := w.redirect(plainAt)
	for range 20 {
		answer := w.raw(at, "POST /"+strings.Repeat("x", 5000)+" HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nTrailer: "+names.String()[1:]+"\r\n\r\n0\r\n"+fields.String()+"\r\n")
		require.Contains(t, answer, "200 OK")
	}
}

func TestMalformedRequestsCloseTheConnection(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(hello200))
	w.set(rules(&meshv1.Egress{}, deny(&meshv1.HttpMatch{Path: exactly("/denied")})))
	at := w.redirect(plainAt)
	for name, request := range map[string]string{
		"two lengths":        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
		"unknown encoding":   "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		"two encodings":      "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
		"two hosts":          "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
		"no host":            "GET / HTTP/1.1\r\n\r\n",
		"a host that is no":  "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
		"a space too much":   "GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
		"HTTP/0.9":           "GET /denied\r\n",
		"a space in a name":  "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
		"a user in a target": "GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n",
		"an empty line":      "\r\nGET /denied HTTP/1.1\r\nHost: a\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			answer := w.raw(at, request+"GET / HTTP/1.1\r\nHost: smuggled\r\n\r\n")
			require.Regexp(t, `^HTTP/1\.[01] (400|501)`, answer)
			require.NotContains(t, answer, "smuggled")
		})
	}
	t.Run("of length and chunks the chunks count, and go on alone", func(t *testing.T) {
		answer := w.raw(at, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"+
			"GET /denied HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
		require.NotContains(t, answer, "GET a /denied")
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	require.LessOrEqual(t, len(w.dials), 1)
}

func TestExpectationsAndLongUploadsAreStreamed(t *testing.T) {
	w := newWorld(t)
	var asked atomic.Bool
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			rw.WriteHeader(413)
			return
		}
		asked.Store(r.Header.Get("Expect") != "")
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(rw, n, err)
	}))
	c := w.client(plainAt, func(t *http.Transport) { t.ExpectContinueTimeout = soon })
	const size = 64 << 20
	send := func(path string, body io.Reader) (*http.Response, error) {
		r, err := http.NewRequest("PUT", "http://a"+path, io.NopCloser(body))
		require.NoError(t, err)
		r.Header.Set("Expect", "100-continue")
		return c.Do(r)
	}
	resp, err := send("/", io.LimitReader(zeros{}, size))
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, strconv.Itoa(size)+" <nil>", string(b))
	require.True(t, asked.Load())
	sent := &counting{Reader: zeros{}}
	resp, err = send("/no", sent)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 413, resp.StatusCode)
	require.Less(t, sent.n.Load(), int64(1<<20), "the rest of the body is not sent")
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

type counting struct {
	io.Reader
	n atomic.Int64
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}

func TestStreamedAnswersEndWithTheirClient(t *testing.T) {
	w := newWorld(t)
	next, ended := make(chan struct{}), make(chan struct{})
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		defer close(ended)
		rw.Header().Set("Content-Type", "text/event-stream")
		for i := 0; ; i++ {
			fmt.Fprintf(rw, "data: %d\n", i)
			rw.(http.Flusher).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	}), func(s *httptest.Server) {})
	resp, err := w.client(plainAt).Get("http://a/")
	require.NoError(t, err)
	lines := bufio.NewReader(resp.Body)
	for i := range 3 {
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("data: %d\n", i), line)
		next <- struct{}{}
	}
	require.NoError(t, resp.Body.Close())
	go func() {
		for {
			select {
			case next <- struct{}{}: // a write finds out
			case <-ended:
				return
			}
		}
	}()
	<-ended
}

func TestWebsocketsAreRelayed(t *testing.T) {
	echo := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		c, err := (&websocket.Upgrader{}).Upgrade(rw, r, nil)
		if err != nil {
			return
		}
		defer c.Close()
		for {
			kind, m, err := c.ReadMessage()
			if err != nil || c.WriteMessage(kind, m) != nil {
				return
			}
		}
	})
	for _, tc := range []struct{ name, at, url string }{{"plain", plainAt, "ws://api.example.com/x"}, {"decrypted", secureAt, "wss://api.example.com/x"}, {"opaque", otherAt, "wss://other.example.com/x"}} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.backend(tc.at, echo)
			deep := &meshv1.HttpMatch{Host: exactly("api.example.com"), Path: exactly("/x")}
			egress := &meshv1.Egress{Decrypt: true}
			w.set(rules(egress, allow(deep, host("other.example.com"))))
			transport := w.client(tc.at).Transport.(*http.Transport)
			d := websocket.Dialer{NetDialContext: transport.DialContext, TLSClientConfig: transport.TLSClientConfig}
			c, _, err := d.Dial(tc.url, nil)
			require.NoError(t, err)
			defer c.Close()
			for _, m := range []string{"one", strings.Repeat("long", 1<<16)} {
				require.NoError(t, c.WriteMessage(websocket.TextMessage, []byte(m)))
				_, got, err := c.ReadMessage()
				require.NoError(t, err)
				require.Equal(t, m, string(got))
			}
			w.set(rules(egress, allow(deep, host("other.example.com")), deny(host("nobody.example.com"))))
			require.NoError(t, c.WriteMessage(websocket.TextMessage, []byte("still")))
			_, _, err = c.ReadMessage()
			require.NoError(t, err, "a change that does not touch it")
			w.set(rules(egress, allow(host("nobody.example.com"))))
			_ = c.SetReadDeadline(time.Now().Add(soon))
			_, _, err = c.ReadMessage()
			require.Error(t, err, "cut")
			require.False(t, isTimeout(err), err)
		})
	}
}

func TestTLSIsDecidedByServerName(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	w.set(strict(&meshv1.Egress{}, allow(host("api.example.com"))))
	for _, http2 := range []bool{true, false} {
		c := w.client(secureAt, func(t *http.Transport) { t.ForceAttemptHTTP2 = http2 })
		resp, err := c.Get("https://api.example.com/x")
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http2, resp.ProtoMajor == 2)
		issuer := resp.TLS.PeerCertificates[0]
		_, err = issuer.Verify(x509.VerifyOptions{Roots: w.server.Roots})
		require.NoError(t, err, "the server's own certificate")
		_, err = c.Get("https://other.example.com/")
		require.ErrorContains(t, err, "access denied")
		_, err = c.Get("https://192.0.2.2/")
		require.ErrorContains(t, err, "access denied", "no name, refused by default")
	}
	w.set(rules(&meshv1.Egress{}, deny(host("other.example.com"))))
	c := w.client(secureAt, func(t *http.Transport) { t.TLSClientConfig.InsecureSkipVerify = true })
	code, _ := w.get(c, "https://192.0.2.2/")
	require.Equal(t, 200, code, "no name, passed by default")
	require.Contains(t, w.got(), "tls unseen")
	require.Contains(t, w.got(), "tls denied")
	require.Contains(t, w.got(), "tls passed")
}

func TestDecryptedRequestsAreDecidedEach(t *testing.T) {
	for _, http2 := range []bool{true, false} {
		t.Run(fmt.Sprint("http2 ", http2), func(t *testing.T) {
			w := newWorld(t)
			w.backend(secureAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				rw.Header().Set("Trailer", "X-T")
				fmt.Fprintf(rw, "%d %s %s %s", r.ProtoMajor, r.Method, r.RequestURI, b)
				rw.Header().Set("X-T", r.Trailer.Get("X-Check"))
			}))
			w.set(strict(&meshv1.Egress{Decrypt: true},
				deny(&meshv1.HttpMatch{Host: exactly("api.example.com"), Path: startsWith("/admin")}),
				allow(host("api.example.com"), host("other.example.com"))))
			c := w.client(secureAt, func(t *http.Transport) { t.ForceAttemptHTTP2 = http2 })
			r, err := http.NewRequest("POST", "https://api.example.com/ok?x", io.NopCloser(strings.NewReader("body")))
			require.NoError(t, err)
			r.Trailer = http.Header{"X-Check": {"yes"}}
			resp, err := c.Do(r)
			require.NoError(t, err)
			b, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, map[bool]string{true: "2", false: "1"}[http2]+" POST /ok?x body", string(b))
			require.Equal(t, "yes", resp.Trailer.Get("X-T"))
			code, body := w.get(c, "https://api.example.com/admin/x")
			require.Equal(t, 403, code)
			require.Contains(t, body, "rule deny")
			resp, err = c.Get("https://other.example.com/admin")
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			_, err = resp.TLS.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: w.server.Roots})
			require.NoError(t, err, "what no rule is deep about is not opened")
			r, err = http.NewRequest("GET", "https://api.example.com/", nil)
			require.NoError(t, err)
			r.Host = "other.example.com"
			resp, err = c.Do(r)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, http.StatusMisdirectedRequest, resp.StatusCode)

			w.noLeaf = true
			c = w.client(secureAt)
			_, err = c.Get("https://api.example.com/ok")
			require.ErrorContains(t, err, "access denied", "what cannot be decrypted is unseen")
		})
	}
}

func TestUnverifiedServersAreAnswered502(t *testing.T) {
	w := newWorld(t)
	reached := false
	w.backend(secureAt, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }), func(s *httptest.Server) {
		s.TLS.Certificates = []tls.Certificate{*certs.New().Leaf("api.example.com")}
	})
	w.set(rules(&meshv1.Egress{Decrypt: true}, deny(&meshv1.HttpMatch{Path: exactly("/admin")})))
	code, body := w.get(w.client(secureAt), "https://api.example.com/")
	require.Equal(t, 502, code)
	require.Contains(t, body, "certificate")
	require.False(t, reached)
}

func TestOpaqueConnectionsAreDecidedByPort(t *testing.T) {
	w := newWorld(t)
	w.backends[otherAt] = tcptest.Serve(t, func(c net.Conn) {
		_, _ = io.WriteString(c, "220 ready\r\n")
		_, _ = io.Copy(c, c)
	})
	at := w.redirect(otherAt)
	talk := func(first string) (string, error) {
		c, err := net.Dial("tcp", at)
		require.NoError(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(soon))
		_, _ = io.WriteString(c, first)
		b := make([]byte, len("220 ready\r\n"+first))
		n, err := io.ReadFull(c, b)
		return string(b[:n]), err
	}
	w.set(rules(&meshv1.Egress{}, deny(host("x"))))
	for _, first := range []string{"", "SSH-2.0-x\r\n", "EHLO there\r\n", "\x00\x01binary", "\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00"} {
		got, err := talk(first)
		require.NoError(t, err)
		require.Equal(t, "220 ready\r\n"+first, got)
	}
	w.set(strict(&meshv1.Egress{}, deny(host("x"))))
	for _, first := range []string{"", "SSH-2.0-x\r\n"} {
		got, err := talk(first)
		require.Error(t, err)
		require.Empty(t, got)
	}
	w.set(strict(&meshv1.Egress{}, allow(&meshv1.HttpMatch{Port: 443})))
	got, err := talk("SSH-2.0-x\r\n")
	require.NoError(t, err, "a port is seen")
	require.Contains(t, got, "SSH")
}

func TestTunnelsPassBytesUnchangedUntilRefused(t *testing.T) {
	w := newWorld(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	w.backends[otherAt] = l.Addr().String()
	w.set(rules(&meshv1.Egress{}, deny(host("x"))))
	at := w.redirect(otherAt)
	open := func(first []byte) (client, server net.Conn) {
		client, err := net.Dial("tcp", at)
		require.NoError(t, err)
		_, err = client.Write(first)
		require.NoError(t, err)
		server, err = l.Accept()
		require.NoError(t, err)
		t.Cleanup(func() { client.Close(); server.Close() })
		return client, server
	}
	random := rand.New(rand.NewPCG(1, 2))
	blob := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return b
	}
	up, down := append([]byte{0}, blob(3<<20)...), blob(2<<20)
	client, server := open(up[:10])
	go func() {
		for rest := up[10:]; len(rest) > 0; {
			n := min(len(rest), 1+random.IntN(1<<16))
			_, _ = client.Write(rest[:n])
			rest = rest[n:]
		}
		_ = client.(*net.TCPConn).CloseWrite()
	}()
	go func() {
		_, _ = server.Write(down)
		_ = server.(*net.TCPConn).CloseWrite()
	}()
	var wg sync.WaitGroup
	wg.Go(func() {
		b, err := io.ReadAll(server)
		assert.NoError(t, err)
		assert.True(t, bytes.Equal(up, b))
	})
	wg.Go(func() {
		b, err := io.ReadAll(client)
		assert.NoError(t, err)
		assert.True(t, bytes.Equal(down, b))
	})
	wg.Wait()

	client, _ = open([]byte{0})
	w.set(nil) // goes on untouched
	_, err = client.Write([]byte{1})
	require.NoError(t, err)
	_ = client.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	_, err = client.Read(make([]byte, 1))
	require.True(t, isTimeout(err))
	w.set(strict(&meshv1.Egress{}, deny(host("x"))))
	_ = client.SetReadDeadline(time.Now().Add(soon))
	_, err = client.Read(make([]byte, 1))
	require.False(t, isTimeout(err))
}

func TestForbiddenDestinationsAreRefused(t *testing.T) {
	w := newWorld(t)
	for _, to := range []string{"192.0.2.99:443", "127.0.0.1:1", "[::1]:2", "0.0.0.0:3"} {
		for _, traffic := range []*meshv1.Traffic{nil, rules(&meshv1.Egress{})} {
			w.set(traffic)
			require.Empty(t, w.raw(w.redirect(to), ""))
		}
	}
	require.Empty(t, w.dials)
}

// forwardProxy is a forward proxy.
func forwardProxy(w *world) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Proxy-Authorization") != "Basic b" {
			rw.Header().Set("Proxy-Authenticate", "Basic")
			http.Error(rw, "who are you", http.StatusProxyAuthRequired)
			return
		}
		if r.Method != http.MethodConnect {
			fmt.Fprintf(rw, "proxied %s for %s", r.RequestURI, r.Host)
			return
		}
		w.mu.Lock()
		to := w.backends[secureAt]
		w.mu.Unlock()
		up, err := net.Dial("tcp", to)
		if err != nil {
			rw.WriteHeader(502)
			return
		}
		down, _, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		_, _ = io.WriteString(down, "HTTP/1.1 200 OK\r\n\r\n")
		go func() { _, _ = io.Copy(up, down); up.Close() }()
		_, _ = io.Copy(down, up)
		down.Close()
	})
}

func TestForwardProxyRequestsAreDecidedByTarget(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	w.backend(proxyAt, forwardProxy(w))
	through := func(t *http.Transport) {
		t.Proxy = func(*http.Request) (*url.URL, error) { return url.Parse("http://a:b@proxy:3128") }
		t.ProxyConnectHeader = http.Header{"Proxy-Authorization": {"Basic b"}}
		t.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy:3128"})
	}
	w.set(strict(&meshv1.Egress{}, allow(host("api.example.com"), host("plain.example.com"))))
	c := w.client(proxyAt, through)

	r, err := http.NewRequest("GET", "http://plain.example.com:8080/x?y", nil)
	require.NoError(t, err)
	r.Header.Set("Proxy-Authorization", "Basic b")
	resp, err := c.Do(r)
	require.NoError(t, err)
	b, _ := io.ReadAll(resp.Body)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, "proxied http://plain.example.com:8080/x?y for plain.example.com:8080", string(b))
	code, _ := w.get(c, "http://plain.example.com/")
	require.Equal(t, 407, code, "the proxy's own refusal")
	code, _ = w.get(c, "http://denied.example.com/")
	require.Equal(t, 403, code)

	code, body := w.get(c, "https://api.example.com/x")
	require.Equal(t, 200, code)
	require.Equal(t, "HTTP/2.0 GET api.example.com /x", body)
	_, err = c.Get("https://other.example.com/x")
	require.ErrorContains(t, err, "Forbidden")
	_, err = w.client(proxyAt, through, func(t *http.Transport) { t.ProxyConnectHeader = nil }).Get("https://api.example.com/x")
	require.ErrorContains(t, err, "Proxy Authentication Required")

	// Rules apply within the tunnel too.
	liar := w.client(proxyAt, through, func(t *http.Transport) { t.TLSClientConfig.ServerName = "other.example.com" })
	_, err = liar.Get("https://api.example.com/")
	require.ErrorContains(t, err, "access denied")

	w.set(strict(&meshv1.Egress{Decrypt: true}, allow(&meshv1.HttpMatch{Host: exactly("api.example.com"), Path: exactly("/x")})))
	c = w.client(proxyAt, through)
	code, body = w.get(c, "https://api.example.com/x")
	require.Equal(t, 200, code, body)
	code, body = w.get(c, "https://api.example.com/y")
	require.Equal(t, 403, code, body)
	_, err = w.client(proxyAt, through, func(t *http.Transport) { t.TLSClientConfig.ServerName = "other.example.com" }).Get("https://api.example.com/x")
	require.Error(t, err)
}

func TestHTTP2WithoutTLSIsDecidedByRequest(t *testing.T) {
	w := newWorld(t)
	both := &http.Protocols{}
	both.SetUnencryptedHTTP2(true)
	w.backend(plainAt, http.HandlerFunc(hello200), func(s *httptest.Server) { s.Config.Protocols = both })
	w.set(rules(&meshv1.Egress{}, deny(&meshv1.HttpMatch{Path: exactly("/no")})))
	c := w.client(plainAt, func(t *http.Transport) { t.Protocols = both })
	code, body := w.get(c, "http://a/x")
	require.Equal(t, 200, code)
	require.Equal(t, "HTTP/2.0 GET a /x", body)
	code, _ = w.get(c, "http://a/no")
	require.Equal(t, 403, code)
}

func TestRequestsAndConnectionsAboveBoundsAreRefused(t *testing.T) {
	bounded := func(t *testing.T) *world {
		w := newWorld(t)
		w.backend(plainAt, http.HandlerFunc(hello200))
		return w
	}
	t.Run("requests", func(t *testing.T) {
		w := bounded(t)
		w.held.Own = requestWeight / 2
		code, body := w.get(w.client(plainAt), "http://a/")
		require.Equal(t, 429, code)
		var m map[string]string
		require.NoError(t, json.Unmarshal([]byte(body), &m))
		require.Contains(t, m["message"], "too many requests")
	})
	t.Run("unserved bytes", func(t *testing.T) {
		w := bounded(t)
		w.conns.Unserved.Own = 1 << 20
		require.NotContains(t, w.raw(w.redirect(plainAt), "GET / HTTP/1.1\r\nHost: a\r\nX: "+strings.Repeat("x", 100<<10)+"\r\n\r\n"), "200 OK")
	})
	t.Run("connections", func(t *testing.T) {
		w := bounded(t)
		w.conns.Open.Own = 0
		require.Empty(t, w.raw(w.redirect(plainAt), ""))
	})
}

func TestDrainLetsConnectionsEnd(t *testing.T) {
	w := newWorld(t)
	started, end := make(chan struct{}), make(chan struct{})
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		close(started)
		<-end
		_, _ = io.WriteString(rw, "whole")
	}))
	c := w.client(plainAt)
	got := make(chan string, 1)
	go func() {
		resp, err := c.Get("http://a/")
		if err != nil {
			got <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		got <- string(b)
	}()
	<-started
	w.server.Stop()
	drained := make(chan error, 1)
	go func() { drained <- w.server.Drain(t.Context()) }()
	select {
	case err := <-drained:
		t.Fatal("drained too early", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(end)
	require.Equal(t, "whole", <-got)
	require.NoError(t, <-drained)
}

func TestDrainServesRequestsOnIdleConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	c := w.client(plainAt)
	ask := func() (last bool) {
		resp, err := c.Get("http://a/")
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp.Close
	}
	require.False(t, ask())
	w.server.Stop()
	drained := make(chan error, 1)
	go func() { drained <- w.server.Drain(t.Context()) }()
	time.Sleep(3 * time.Second)
	require.True(t, ask(), "no answer after it")
	require.NoError(t, <-drained)
}
