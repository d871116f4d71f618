package egress

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// FuzzRequest sends any bytes as HTTP. The rules must allow each request that reaches the
// server.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{
		"GET / HTTP/1.1\r\nHost: good\r\n\r\n",
		"POST /x HTTP/1.1\r\nHost: good\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: bad\r\n\r\n",
		"GET http://good/a HTTP/1.1\r\nHost: bad\r\n\r\n",
		"GET x:http://bad/ HTTP/1.1\r\nHost: good\r\n\r\n",
		"CONNECT good:443 HTTP/1.1\r\nHost: bad\r\n\r\n",
		"GET / HTTP/1.0\r\nUpgrade: x\r\nConnection: upgrade\r\nHost: good\r\n\r\n",
		"GET /bad/../x HTTP/1.1\r\nHost: good\r\nExpect: 100-continue\r\n\r\n",
		preface,
	} {
		f.Add([]byte(s))
	}
	w := newWorld(f)
	var wrong atomic.Pointer[string]
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		host, _, _ := authority(r.Host)
		if host != "good" || strings.HasPrefix(r.URL.Path, "/bad") {
			s := r.Method + " " + r.Host + " " + r.RequestURI
			wrong.Store(&s)
		}
		_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 1<<20))
	}))
	w.set(strict(&meshv1.Egress{}, allow(host("good")), deny(&meshv1.HttpMatch{Path: startsWith("/bad")})))
	at := w.redirect(plainAt)
	f.Fuzz(func(t *testing.T, b []byte) {
		if k, _, _ := recognise(b); k != speaksHTTP && k != speaksHTTP2 {
			return
		}
		c, err := net.Dial("tcp", at)
		require.NoError(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		_, _ = c.Write(b)
		_ = c.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<20))
		if s := wrong.Load(); s != nil {
			t.Fatalf("%q let %q pass", b, *s)
		}
	})
}
