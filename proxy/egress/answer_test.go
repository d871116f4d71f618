package egress

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// A server may collude with the pod.
func TestAnswerHeadsAreAccountedFor(t *testing.T) {
	for name, test := range map[string]struct {
		request string
		bound   func(*world)
	}{
		"read":              {"GET / HTTP/1.1\r\nHost: a\r\n\r\n", func(w *world) { w.conns.Unserved.Own = 256 << 10 }},
		"held":              {"GET / HTTP/1.1\r\nHost: a\r\n\r\n", func(w *world) { w.held.Own = requestWeight + 16<<10 }},
		"read of a CONNECT": {"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", func(w *world) { w.conns.Unserved.Own = 256 << 10 }},
		"held of a CONNECT": {"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", func(w *world) { w.held.Own = requestWeight + 16<<10 }},
		"at most":           {"GET / HTTP/1.1\r\nHost: a\r\n\r\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			fields := 3000
			if test.bound != nil {
				test.bound(w)
			} else {
				fields = 8000
			}
			w.listen(plainAt, func(c net.Conn, b *bufio.Reader) {
				headOf(b)
				var head strings.Builder
				head.WriteString("HTTP/1.1 200 OK\r\n")
				for i := range fields {
					fmt.Fprintf(&head, "X-%d: x\r\n", i)
				}
				_, _ = io.WriteString(c, head.String()+"\r\n")
				headOf(b)
				_ = c.Close()
			})
			w.set(rules(&meshv1.Egress{}, deny(&meshv1.HttpMatch{Path: exactly("/no")})))
			c, b := w.dial(plainAt)
			_, err := io.WriteString(c, test.request)
			require.NoError(t, err)
			status, err := b.ReadString('\n')
			require.NoError(t, err)
			require.Equal(t, "HTTP/1.1 502 Bad Gateway\r\n", status)
		})
	}
}

func decrypting(t *testing.T, config ...func(*httptest.Server)) *world {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200), config...)
	w.set(rules(&meshv1.Egress{Decrypt: true}, deny(&meshv1.HttpMatch{Path: exactly("/no")})))
	return w
}

func TestServerHandshakeBytesAreBounded(t *testing.T) {
	w := decrypting(t, func(s *httptest.Server) {
		leaf := &s.TLS.Certificates[0]
		for range 200 {
			leaf.Certificate = append(leaf.Certificate, leaf.Certificate[0])
		}
	})
	code, body := w.get(w.client(secureAt), "https://api.example.com/")
	require.Equal(t, http.StatusBadGateway, code)
	require.Contains(t, body, "too many bytes")
}

// A server that does not answer keeps no handshake slot from others.
func TestServerHandshakesTakeTurns(t *testing.T) {
	w := decrypting(t)
	asked := make(chan struct{})
	w.listen(otherAt, func(_ net.Conn, b *bufio.Reader) {
		_, _ = b.Peek(1)
		asked <- struct{}{}
	})
	silent := w.client(otherAt)
	ask := func() {
		if resp, err := silent.Get("https://api.example.com/"); err == nil {
			_ = resp.Body.Close()
		}
	}
	for range 2 * downstream.MaxHandshakes {
		go ask()
		<-asked
	}
	code, _ := w.get(w.client(secureAt), "https://api.example.com/")
	require.Equal(t, http.StatusOK, code)

	for range downstream.MaxHandshakes {
		w.conns.Handshakes <- struct{}{}
	}
	go ask()
	early := false
	select {
	case <-asked:
		early = true
	case <-time.After(300 * time.Millisecond):
	}
	for range downstream.MaxHandshakes {
		<-w.conns.Handshakes
	}
	require.False(t, early, "it took no turn")
	<-asked
}
