package proxy

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"net"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
)

// rawAPI answers each request on a connection with the same bytes. It allocates what TLS does.
func rawAPI(t *testing.T, leaf *tls.Certificate, response []byte) (addr string) {
	config := &tls.Config{Certificates: []tls.Certificate{*leaf}}
	return tcptest.Serve(t, func(c net.Conn) {
		c = tls.Server(c, config)
		b := make([]byte, 16<<10)
		for {
			if _, err := c.Read(b); err != nil { // a request is one record
				return
			}
			if _, err := c.Write(response); err != nil {
				return
			}
		}
	})
}

// rawClient sends the same GET in HTTP/2 again and again. It allocates what TLS does.
type rawClient struct {
	t       *testing.T
	conn    net.Conn
	in      []byte
	request []byte // HEADERS
	stream  uint32
}

func newRawClient(t *testing.T, addr string, head ...hpack.HeaderField) *rawClient {
	conn, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	c := &rawClient{t: t, conn: conn, in: make([]byte, 0, 64<<10), stream: 1}
	var first, block bytes.Buffer
	first.WriteString(http2.ClientPreface)
	f := http2.NewFramer(&first, nil)
	require.NoError(t, f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})) // never closed
	require.NoError(t, f.WriteWindowUpdate(0, 1<<31-1<<16))
	enc := hpack.NewEncoder(&block)
	for range 2 { // the second time all is in the table
		block.Reset()
		for _, field := range head {
			require.NoError(t, enc.WriteField(field))
		}
		var out bytes.Buffer
		require.NoError(t, http2.NewFramer(&out, nil).WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndStream: true, EndHeaders: true}))
		if c.request == nil {
			first.Write(out.Bytes())
		}
		c.request = out.Bytes()
	}
	_, err = conn.Write(first.Bytes())
	require.NoError(t, err)
	c.await()
	return c
}

// get sends the request again, and reads the response.
func (c *rawClient) get() {
	c.stream += 2
	binary.BigEndian.PutUint32(c.request[5:], c.stream)
	if _, err := c.conn.Write(c.request); err != nil {
		c.t.Fatal(err)
	}
	c.await()
}

// await reads frames up to the end of the stream.
func (c *rawClient) await() {
	for {
		for len(c.in) >= 9 {
			n := 9 + (int(c.in[0])<<16 | int(c.in[1])<<8 | int(c.in[2]))
			if len(c.in) < n {
				break
			}
			ends := http2.FrameType(c.in[3]) <= http2.FrameHeaders && c.in[4]&1 != 0 && binary.BigEndian.Uint32(c.in[5:]) == c.stream
			c.in = c.in[:copy(c.in, c.in[n:])]
			if ends {
				return
			}
		}
		n, err := c.conn.Read(c.in[len(c.in):cap(c.in)])
		if err != nil {
			c.t.Fatal(err)
		}
		c.in = c.in[:len(c.in)+n]
	}
}

// What a GET allocates in the proxy, beside what reading records of TLS does at the client and at the apiserver.
func TestGetsAllocateLittle(t *testing.T) {
	m := newMesh(t, nil)
	quiet, err := New(Config{Leaf: m.server.config.Leaf, Registerer: prometheus.NewRegistry()})
	require.NoError(t, err)
	m.server.log = quiet.log // no access lines
	api := rawAPI(t, m.ca.Leaf("kubernetes.default.svc"), []byte("HTTP/1.1 200 OK\r\nAudit-Id: 1\r\nCache-Control: no-cache, private\r\nContent-Type: application/json\r\n"+
		"Date: Sun, 29 Nov 2026 00:00:00 GMT\r\nContent-Length: 1000\r\n\r\n"+strings.Repeat("x", 1000)))
	require.NoError(t, m.server.SetCluster(&meshv1.Cluster{ServiceAddresses: []string{api}, Ca: m.ca.PEM()}))
	m.policy(nil)

	records := func() float64 {
		conn, err := tls.Dial("tcp", api, &tls.Config{InsecureSkipVerify: true})
		require.NoError(t, err)
		defer conn.Close()
		request, response := []byte("GET"), make([]byte, 16<<10)
		return testing.AllocsPerRun(1000, func() {
			_, _ = conn.Write(request)
			_, _ = conn.Read(response)
		})
	}()
	c := newRawClient(t, m.addr,
		hpack.HeaderField{Name: ":method", Value: "GET"}, hpack.HeaderField{Name: ":scheme", Value: "https"},
		hpack.HeaderField{Name: ":authority", Value: "kubernetes.default.svc"}, hpack.HeaderField{Name: ":path", Value: "/api/v1/namespaces/ns-1/configmaps/one"},
		hpack.HeaderField{Name: "accept", Value: "application/json, */*"}, hpack.HeaderField{Name: "accept-encoding", Value: "gzip"},
		hpack.HeaderField{Name: "user-agent", Value: "operator/v0"}, hpack.HeaderField{Name: "authorization", Value: "Bearer opaque"})
	got := testing.AllocsPerRun(1000, c.get) - records
	t.Logf("%v allocations, and %v of reading records at both ends", got, records)
	require.LessOrEqual(t, got, mostAllocated)
}
