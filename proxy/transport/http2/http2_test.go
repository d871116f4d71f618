package http2

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	xhttp2 "golang.org/x/net/http2"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
)

// The client of net/http gets what a handler sends, and handlers get what it sends.
func TestRequestsOfNetHTTP(t *testing.T) {
	t.Parallel()
	large := bytes.Repeat([]byte("0123456789abcdef"), 64<<10) // more than all windows
	at := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Sum")
		w.Header().Set("Target", r.RequestURI+" "+r.URL.Path+" "+r.URL.RawQuery+" "+r.Host)
		n, err := io.Copy(w, r.Body)
		w.Header().Set("Sum", fmt.Sprintf("%d %v %s", n, err, r.Trailer.Get("Mine")))
		w.Header().Set(http.TrailerPrefix+"Late", "yes")
	}))
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	for _, size := range []int{0, 1, 1 << 10, len(large)} {
		req, err := http.NewRequest("POST", "http://"+at.String()+"/a/b%2Fc?x=y", struct{ io.Reader }{bytes.NewReader(large[:size])})
		require.NoError(t, err)
		req.Trailer = http.Header{"Mine": {"!"}}
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, string(large[:size]), string(body))
		require.Equal(t, "HTTP/2.0", resp.Proto)
		require.Equal(t, "/a/b%2Fc?x=y /a/b/c x=y "+at.String(), resp.Header.Get("Target"))
		require.Equal(t, http.Header{"Sum": {fmt.Sprintf("%d <nil> !", size)}, "Late": {"yes"}}, resp.Trailer)
		require.NotEmpty(t, resp.Header.Get("Date"))
	}
}

func TestMalformedRequests(t *testing.T) {
	t.Parallel()
	without := func(name string) (out []string) {
		fields := request()
		for i := 0; i < len(fields); i += 2 {
			if fields[i] != name {
				out = append(out, fields[i], fields[i+1])
			}
		}
		return out
	}
	with := func(name, value string) []string { return append(without(name), name, value) }
	for name, fields := range map[string][]string{
		"no method":               without(":method"),
		"no path":                 without(":path"),
		"no scheme":               without(":scheme"),
		"other scheme":            with(":scheme", "ftp"),
		"two paths":               request(":path", "/other"),
		"late pseudo-header":      append([]string{"x", "y"}, request()...),
		"response pseudo-header":  request(":status", "200"),
		"unknown pseudo-header":   request(":protocol", "websocket"),
		"absolute path":           with(":path", "https://other.example.com/"),
		"relative path":           with(":path", "api"),
		"asterisk of a GET":       with(":path", "*"),
		"invalid escape":          with(":path", "/%zz"),
		"space in the path":       with(":path", "/a b"),
		"control in the query":    with(":path", "/?\x01"),
		"method with a space":     with(":method", "GET /x"),
		"capital letters":         request("X-Field", "y"),
		"name with a colon":       request("a:b", "c"),
		"empty name":              request("", "c"),
		"value with a line feed":  request("x", "a\nb: c"),
		"value with a zero":       request("x", "a\x00"),
		"connection":              request("connection", "close"),
		"transfer encoding":       request("transfer-encoding", "chunked"),
		"upgrade":                 request("upgrade", "h2c"),
		"te":                      request("te", "gzip"),
		"other host":              request("host", "other.example.com"),
		"two hosts":               append(without(":authority"), "host", "a", "host", "b"),
		"length without a body":   request("content-length", "5"),
		"two lengths":             request("content-length", "0", "content-length", "0"),
		"negative length":         request("content-length", "-1"),
		"length with a plus":      request("content-length", "+0"),
		"CONNECT with a path":     with(":method", "CONNECT"),
		"CONNECT to nobody":       {":method", "CONNECT"},
		"pseudo-headers as names": {":", "x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			called := atomic.Bool{}
			c := dial(t, testConfig(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { called.Store(true) })))
			c.ask(1, true, fields...)
			_, _, reset := c.answer(1)
			require.Equal(t, xhttp2.ErrCodeProtocol, reset)
			require.False(t, called.Load())
		})
	}
}

func TestHeads(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fields []string
		want   string
	}{
		"host":         {append(request()[:4:4], ":path", "/", "host", "h"), "GET h / / - map[]"},
		"asterisk":     {[]string{":method", "OPTIONS", ":scheme", "http", ":authority", "h", ":path", "*"}, "OPTIONS h * * - map[]"},
		"empty query":  {append(request()[:6:6], ":path", "/?"), "GET example.com /? / ? map[]"},
		"escaped":      {append(request()[:6:6], ":path", "/%41%2f?a=%20"), "GET example.com /%41%2f?a=%20 /A/ a=%20 map[]"},
		"cookies":      {request("cookie", "a=b", "x", "1", "cookie", "c=d", "x", "2"), "GET example.com / / - map[Cookie:[a=b; c=d] X:[1 2]]"},
		"connect":      {[]string{":method", "CONNECT", ":authority", "h:1"}, "CONNECT h:1 h:1  - map[]"},
		"known fields": {request("accept", "a", "te", "trailers"), "GET example.com / / - map[Accept:[a] Te:[trailers]]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				query := r.URL.RawQuery
				switch {
				case r.URL.ForceQuery:
					query = "?"
				case query == "":
					query = "-"
				}
				fmt.Fprintf(w, "%s %s %s %s %s %v", r.Method, r.Host, r.RequestURI, r.URL.Path, query, r.Header)
			})))
			c.ask(1, true, test.fields...)
			_, body, _ := c.answer(1)
			require.Equal(t, test.want, body)
		})
	}
}

func TestBodiesOfAnotherLengthAreReset(t *testing.T) {
	t.Parallel()
	for name, sent := range map[string]string{"shorter": "abcd", "longer": "abcdef"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			read := make(chan error, 1)
			c := dial(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				_, err := io.ReadAll(r.Body)
				read <- err
			})))
			c.ask(1, false, request("content-length", "5")...)
			require.NoError(t, c.WriteData(1, true, []byte(sent)))
			_, _, reset := c.answer(1)
			require.Equal(t, xhttp2.ErrCodeProtocol, reset)
			require.Error(t, <-read)
		})
	}
}

// A client that sends much of a body that its handler has not read is asked to stop, and the connection goes on.
func TestBodiesThatAreNotRead(t *testing.T) {
	t.Parallel()
	c := dial(t, testConfig(hello))
	c.ask(1, false, request()...)
	status, body, _ := c.answer(1)
	require.Equal(t, "200 hello", status+" "+body)
	for range 40 { // more than the window of the connection, which opens again
		require.NoError(t, c.WriteData(1, false, make([]byte, 16<<10)))
	}
	require.Equal(t, xhttp2.ErrCodeNo, c.next(xhttp2.FrameRSTStream).(*xhttp2.RSTStreamFrame).ErrCode)
	c.ask(1, true, "x", "y") // a trailer that was on its way
	c.ask(3, true, request()...)
	status, body, _ = c.answer(3)
	require.Equal(t, "200 hello", status+" "+body)
}

func TestBodiesThatEndAfterTheResponse(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(c *client) error{
		"DATA":    func(c *client) error { return c.WriteData(1, true, []byte("rest")) },
		"trailer": func(c *client) error { c.ask(1, true, "x", "y"); return nil },
		"never":   func(*client) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, testConfig(hello))
			c.ask(1, false, request()...)
			c.answer(1)
			require.NoError(t, end(c))
			if name == "never" {
				require.Equal(t, xhttp2.ErrCodeNo, c.next(xhttp2.FrameRSTStream).(*xhttp2.RSTStreamFrame).ErrCode)
			}
			c.ask(3, true, request()...)
			next := c.next(xhttp2.FrameHeaders, xhttp2.FrameRSTStream)
			require.Equal(t, xhttp2.FrameHeaders, next.Header().Type, "nothing is reset")
			require.EqualValues(t, 3, next.Header().StreamID)
		})
	}
}

func TestExpectContinue(t *testing.T) {
	t.Parallel()
	c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(body)
	})))
	c.ask(1, false, request("expect", "100-continue")...)
	require.Equal(t, "100", c.next(xhttp2.FrameHeaders).(*xhttp2.MetaHeadersFrame).PseudoValue("status"))
	require.NoError(t, c.WriteData(1, true, []byte("hello")))
	status, body, _ := c.answer(1)
	require.Equal(t, "200 hello", status+" "+body)
}

func TestStatusesWithoutBodies(t *testing.T) {
	t.Parallel()
	for method, code := range map[string]int{"HEAD": 200, "GET": 304, "DELETE": 204} {
		c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			n, err := w.Write([]byte("hello"))
			if code == 200 {
				require.NoError(t, err)
				require.Equal(t, 5, n)
			} else {
				require.ErrorIs(t, err, http.ErrBodyNotAllowed)
			}
		})))
		c.ask(1, true, ":method", method, ":scheme", "https", ":authority", "x", ":path", "/")
		head := c.next(xhttp2.FrameHeaders, xhttp2.FrameData).(*xhttp2.MetaHeadersFrame)
		require.True(t, head.StreamEnded())
		require.Equal(t, fmt.Sprint(code), head.PseudoValue("status"))
	}
}

// Headers of net/http are what they are with its own server.
func TestHeadersOfNetHTTP(t *testing.T) {
	t.Parallel()
	c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodDelete {
			w.Header()["Date"] = nil
		}
		w.Header()["Trailer"] = []string{"X-A, X-B", "X-A"}
		w.Header().Set("X-A", "late")
		w.Header()["X-Two"] = []string{"1", "2"}
		_, _ = io.WriteString(w, "hello")
	})))
	for i, method := range []string{"GET", "DELETE"} {
		c.ask(uint32(2*i+1), true, ":method", method, ":scheme", "https", ":authority", "x", ":path", "/")
		fields := map[string][]string{}
		for _, f := range c.next(xhttp2.FrameHeaders).(*xhttp2.MetaHeadersFrame).RegularFields() {
			fields[f.Name] = append(fields[f.Name], f.Value)
		}
		require.Equal(t, method == "GET", fields["date"] != nil)
		delete(fields, "date")
		require.Equal(t, map[string][]string{"trailer": {"X-A", "X-B"}, "x-two": {"1", "2"}}, fields)
		require.Equal(t, "late", c.next(xhttp2.FrameHeaders).(*xhttp2.MetaHeadersFrame).RegularFields()[0].Value)
	}
}

// A response and its end share one write, and one frame of DATA.
func TestResponsesAreOneWrite(t *testing.T) {
	t.Parallel()
	c, writes := recorded(t, hello)
	before := len(writes())
	require.NoError(t, c.WriteHeaders(get))
	c.next(xhttp2.FrameHeaders)
	require.True(t, c.next(xhttp2.FrameData).(*xhttp2.DataFrame).StreamEnded())
	require.Len(t, writes()[before:], 1)
}

// Each write of a long response fills its records of TLS, though a handler's writes do not.
func TestLongResponsesFillRecords(t *testing.T) {
	t.Parallel()
	const size, piece, record = 1 << 20, 64<<10 - 1, 16 << 10
	c, writes := recorded(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for rest := make([]byte, size); len(rest) > 0; rest = rest[min(piece, len(rest)):] {
			_, _ = w.Write(rest[:min(piece, len(rest))])
		}
	}))
	require.NoError(t, c.WriteSettings(xhttp2.Setting{ID: xhttp2.SettingInitialWindowSize, Val: size}))
	require.NoError(t, c.WriteWindowUpdate(0, size))
	c.next(xhttp2.FrameSettings)
	before := len(writes())
	require.NoError(t, c.WriteHeaders(get))
	for !c.next(xhttp2.FrameData).(*xhttp2.DataFrame).StreamEnded() {
	}
	sizes := writes()[before:]
	for _, n := range sizes[:len(sizes)-1] {
		require.Zero(t, n%record, sizes)
	}
}

// get is a GET of "/".
var get = xhttp2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x82, 0x84, 0x87}, EndStream: true, EndHeaders: true}

// recorded returns a client after its preface, and a function that returns how many bytes each write to it had.
func recorded(t *testing.T, h http.Handler) (*client, func() []int) {
	t.Helper()
	ours, theirs := tcptest.Pair(t)
	conn := &recordingConn{Conn: theirs}
	go NewServer(testConfig(h)).Serve(context.Background(), conn, nil, false)
	t.Cleanup(func() { _ = ours.Close() })
	c := &client{t: t, Framer: xhttp2.NewFramer(ours, ours), conn: ours}
	_, err := io.WriteString(ours, xhttp2.ClientPreface)
	require.NoError(t, err)
	require.NoError(t, c.WriteSettings())
	c.next(xhttp2.FrameSettings)
	for f := c.next(xhttp2.FrameSettings); !f.(*xhttp2.SettingsFrame).IsAck(); {
		f = c.next(xhttp2.FrameSettings)
	}
	return c, conn.sizes
}

type recordingConn struct {
	net.Conn
	mu     sync.Mutex
	writes []int
}

func (c *recordingConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.writes = append(c.writes, len(p))
	c.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *recordingConn) sizes() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.writes)
}

func TestWritesWaitForWindows(t *testing.T) {
	t.Parallel()
	config := testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(strings.Repeat("x", 10)))
	}))
	c := dial(t, config, xhttp2.Setting{ID: xhttp2.SettingInitialWindowSize, Val: 4})
	c.ask(1, true, request()...)
	require.Equal(t, 4, len(c.next(xhttp2.FrameData).(*xhttp2.DataFrame).Data()))
	require.NoError(t, c.WriteWindowUpdate(1, 1))
	require.Equal(t, 1, len(c.next(xhttp2.FrameData).(*xhttp2.DataFrame).Data()))
	require.NoError(t, c.WriteSettings(xhttp2.Setting{ID: xhttp2.SettingInitialWindowSize, Val: 100}))
	last := c.next(xhttp2.FrameData).(*xhttp2.DataFrame)
	require.Equal(t, 5, len(last.Data()))
}

// A client that reads nothing, or a little at a time, is given up.
func TestStalledStreamsAreReset(t *testing.T) {
	t.Parallel()
	failed := make(chan error, 1)
	config := testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := w.Write(make([]byte, 10))
		failed <- err
		<-r.Context().Done()
	}))
	config.Stall = func() time.Duration { return 200 * time.Millisecond }
	c := dial(t, config, xhttp2.Setting{ID: xhttp2.SettingInitialWindowSize, Val: 1})
	c.ask(1, true, request()...)
	_, _, reset := c.answer(1)
	require.Equal(t, xhttp2.ErrCodeInternal, reset)
	require.ErrorIs(t, <-failed, errStalled)
}

func TestResetsEndRequests(t *testing.T) {
	t.Parallel()
	ended := make(chan error, 1)
	c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		_, err := r.Body.Read(make([]byte, 1))
		<-r.Context().Done()
		ended <- err
	})))
	c.ask(1, false, request()...)
	c.next(xhttp2.FrameHeaders)
	require.NoError(t, c.WriteRSTStream(1, xhttp2.ErrCodeCancel))
	require.ErrorIs(t, <-ended, errReset)
}

// What a reset stream has not read is returned to the window of the connection.
func TestResetsReturnTheirWindows(t *testing.T) {
	t.Parallel()
	read := make(chan error, 20)
	c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			return
		}
		_, _ = r.Body.Read(make([]byte, 1))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		_, err := r.Body.Read(make([]byte, 1))
		read <- err
	})))
	id := uint32(1)
	for range cap(read) { // more than the window of the connection
		c.ask(id, false, ":method", "PUT", ":scheme", "https", ":authority", "x", ":path", "/")
		require.NoError(t, c.WriteData(id, false, make([]byte, 16<<10)))
		c.next(xhttp2.FrameHeaders)
		require.NoError(t, c.WriteRSTStream(id, xhttp2.ErrCodeCancel))
		require.ErrorIs(t, <-read, errReset)
		id += 2
	}
	c.ask(id, true, request()...)
	status, _, _ := c.answer(id)
	require.Equal(t, "200", status)
}

func TestPanicsResetStreams(t *testing.T) {
	t.Parallel()
	for name, v := range map[string]any{"abort": http.ErrAbortHandler, "other": "reason"} {
		var log strings.Builder
		config := testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "hel")
			panic(v)
		}))
		config.ErrorLog.SetOutput(&log)
		c := dial(t, config)
		c.ask(1, true, request()...)
		_, body, reset := c.answer(1)
		require.Equal(t, xhttp2.ErrCodeInternal, reset)
		require.Equal(t, "hel", body)
		require.Equal(t, name == "other", strings.Contains(log.String(), "reason"))
	}
}

func TestDeadlines(t *testing.T) {
	t.Parallel()
	read := make(chan error, 1)
	c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		require.NoError(t, control.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
		_, err := r.Body.Read(make([]byte, 1))
		read <- err
		require.NoError(t, control.SetWriteDeadline(time.Now()))
		<-r.Context().Done()
	})))
	c.ask(1, false, request()...)
	require.ErrorIs(t, <-read, os.ErrDeadlineExceeded)
	_, _, reset := c.answer(1)
	require.Equal(t, xhttp2.ErrCodeInternal, reset)
}

// After GOAWAY the client's last requests are answered, and further ones are left to its next connection.
func TestConnectionCloseSendsGoAway(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/last" {
			w.Header().Set("Connection", "close")
			return
		}
		<-release
	})))
	c.ask(1, true, request()...)
	c.ask(3, true, append(request()[:6:6], ":path", "/last")...)
	away := c.next(xhttp2.FrameGoAway).(*xhttp2.GoAwayFrame)
	require.Equal(t, xhttp2.ErrCodeNo, away.ErrCode)
	require.EqualValues(t, 3, away.LastStreamID)
	c.ask(5, false, request()...)
	require.NoError(t, c.WriteData(5, true, []byte("x")))
	close(release)
	status, _, _ := c.answer(1)
	require.Equal(t, "200", status)
	for {
		f, err := c.ReadFrame()
		if err != nil {
			break
		}
		require.NotEqualValues(t, 5, f.Header().StreamID)
	}
}

func TestIdleConnectionsEnd(t *testing.T) {
	t.Parallel()
	config := testConfig(hello)
	config.Idle = 50 * time.Millisecond
	c := dial(t, config)
	c.ask(1, true, request()...)
	c.answer(1)
	code, last := c.away()
	require.Equal(t, xhttp2.ErrCodeNo, code)
	require.EqualValues(t, 1, last)
}

func TestShutdownEndsIdleConnections(t *testing.T) {
	t.Parallel()
	ours, theirs := tcptest.Pair(t)
	s := NewServer(testConfig(hello))
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Serve(context.Background(), theirs, nil, true) // net/http has read the preface
	}()
	f := xhttp2.NewFramer(ours, ours)
	require.NoError(t, f.WriteSettings())
	_, err := f.ReadFrame() // it is served
	require.NoError(t, err)
	s.Shutdown()
	<-done
}

// Streams of which the client has heard an end do not count, their handlers do.
func TestStreamsAndHandlersAreBounded(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var running atomic.Int32
	config := testConfig(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		running.Add(1)
		<-release
	}))
	config.MaxStreams = 3
	c := dial(t, config)
	id := uint32(1)
	next := func() uint32 {
		c.ask(id, true, request()...)
		id += 2
		return id - 2
	}
	for range 3 {
		next()
	}
	refused := func() {
		t.Helper()
		_, _, reset := c.answer(next())
		require.Equal(t, xhttp2.ErrCodeRefusedStream, reset)
	}
	refused()
	for n := uint32(1); n <= 5; n += 2 {
		require.NoError(t, c.WriteRSTStream(n, xhttp2.ErrCodeCancel))
		next()
	}
	refused()
	for n := id - 8; n < id; n += 2 {
		require.NoError(t, c.WriteRSTStream(n, xhttp2.ErrCodeCancel))
	}
	refused()
	require.LessOrEqual(t, running.Load(), int32(6))
	close(release)
}

func TestLargeHeadsAreRefused(t *testing.T) {
	t.Parallel()
	config := testConfig(hello)
	config.MaxHeader = 1000
	c := dial(t, config)
	c.ask(1, true, request("x", strings.Repeat("y", 900))...)
	status, _, _ := c.answer(1)
	require.Equal(t, "431", status)
	c.ask(3, true, request()...) // the tables of both sides still agree
	status, body, _ := c.answer(3)
	require.Equal(t, "200 hello", status+" "+body)
}

func TestFloodsEndConnections(t *testing.T) {
	t.Parallel()
	const (
		open      = 7 // a stream with a body
		maxHeader = 1000
	)
	for name, flood := range map[string]func(c *client, n int) error{
		"PING":     func(c *client, _ int) error { return c.WritePing(false, [8]byte{}) },
		"acks":     func(c *client, _ int) error { return c.WritePing(true, [8]byte{}) },
		"SETTINGS": func(c *client, _ int) error { return c.WriteSettings() },
		"PRIORITY": func(c *client, _ int) error { return c.WritePriority(1001, xhttp2.PriorityParam{StreamDep: 3}) },
		"windows":  func(c *client, _ int) error { return c.WriteWindowUpdate(0, 1) },
		"DATA":     func(c *client, _ int) error { return c.WriteData(open, false, nil) },
		"unknown":  func(c *client, _ int) error { return c.WriteRawFrame(0x42, 0, 0, nil) },
		"resets":   func(c *client, _ int) error { return c.WriteRSTStream(1, xhttp2.ErrCodeCancel) },
		"malformed requests": func(c *client, n int) error {
			return c.WriteHeaders(xhttp2.HeadersFrameParam{StreamID: uint32(2*n + 9), BlockFragment: []byte{0x82}, EndStream: true, EndHeaders: true})
		},
		"rapid resets": func(c *client, n int) error {
			if err := c.try(uint32(2*n+9), true, request()...); err != nil {
				return err
			}
			return c.WriteRSTStream(uint32(2*n+9), xhttp2.ErrCodeCancel)
		},
		// Of a head that is in the table, a block has a byte for each field, and the answer is as long as to any.
		"large heads": func(c *client, n int) error {
			return c.try(uint32(2*n+9), true, request("x", strings.Repeat("y", maxHeader-100))...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
			config.MaxHeader = maxHeader
			c := dial(t, config)
			c.ask(open, false, request()...)
			go func() { _, _ = io.Copy(io.Discard, c.conn) }()
			for n := range 3 * futileBurst {
				if c.conn.SetWriteDeadline(time.Now().Add(soon)) != nil || flood(c, n) != nil {
					break
				}
			}
			<-c.done
			var err *connError
			require.ErrorAs(t, c.err, &err)
			require.Equal(t, codeCalm, err.code)
		})
	}
}

// A body takes the memory of what is unread of it, however long it is.
func TestUnreadBodiesDoNotGrow(t *testing.T) {
	t.Parallel()
	b := &body{s: &Stream{}, declared: -1}
	const unread, piece = 10_000, 1000
	require.NoError(t, b.append(make([]byte, unread)))
	for n := range 1000 {
		require.NoError(t, b.append(bytes.Repeat([]byte{byte(n)}, piece)))
		b.off += piece
	}
	require.Equal(t, unread, b.unread())
	require.EqualValues(t, 999%256, b.buf[len(b.buf)-1])
	require.EqualValues(t, 990%256, b.buf[b.off])
	require.Less(t, cap(b.buf), 4*unread)
}

func TestHeaderBlocksWithoutEnd(t *testing.T) {
	t.Parallel()
	for name, part := range map[string][]byte{"empty": nil, "one field": bytes.Repeat([]byte{0x82}, 10<<10)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, testConfig(hello))
			require.NoError(t, c.WriteHeaders(xhttp2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x82}}))
			for range maxBlockFrames {
				_ = c.WriteContinuation(1, false, part)
			}
			code, _ := c.away()
			require.Equal(t, xhttp2.ErrCodeEnhanceYourCalm, code)
		})
	}
}

// The request path of package http2 itself, without net/http's pieces of a request.
func TestAllocationsPerRequest(t *testing.T) {
	c := dial(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Date"] = []string{"today"}
		w.WriteHeader(http.StatusNoContent)
	})))
	c.ask(1, true, request("accept", "application/json", "user-agent", "x")...) // which fills the table
	c.answer(1)
	id := uint32(3)
	one := func() {
		f := appendFrame(nil, typeHeaders, flagEndStream|flagEndHeaders, id, 0)
		block := c.block(request("accept", "application/json", "user-agent", "x")...)
		f[2] = byte(len(block))
		_, err := c.conn.Write(append(f, block...))
		require.NoError(t, err)
		buf := make([]byte, 512)
		_, err = c.conn.Read(buf)
		require.NoError(t, err)
		id += 2
	}
	one()
	const own = 3 // of this function
	require.LessOrEqual(t, testing.AllocsPerRun(200, one)-own, 16.)
}

// A connection that can no longer be written to serves nothing more that was read from it.
func TestRequestsAfterAFailedWrite(t *testing.T) {
	t.Parallel()
	_, theirs := tcptest.Pair(t)
	var served atomic.Int32
	c := newConn(context.Background(), NewServer(testConfig(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served.Add(1) }))), theirs, nil)
	c.idle = time.NewTimer(time.Hour)
	get := frame{kind: typeHeaders, flags: flagEndStream | flagEndHeaders, stream: 1, payload: []byte{0x82, 0x84, 0x87}}
	require.NoError(t, c.receive(&get))
	require.Eventually(t, func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.waiting == 1 }, soon, time.Millisecond)
	c.close(io.ErrClosedPipe)
	get.stream, get.payload = 3, []byte{0x82, 0x84, 0x87}
	require.ErrorIs(t, c.receive(&get), io.ErrClosedPipe)
	require.EqualValues(t, 1, served.Load())
}
