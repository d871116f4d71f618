package upstream

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/rawio"
)

// maxAlone is how many streams of a client may have a connection of their own. An event
// costs a third there of its cost on a shared connection. Above this number the cost of
// sockets, and of memory in the apiserver, is higher.
const maxAlone = 32

// maxHandshakes is how many handshakes may be in progress at once: a pod whose requests each
// need one must leave processor time to others.
const maxHandshakes = 8

// Client is one pod's connections to one Cluster.
type Client struct {
	cluster *Cluster
	dial    Dial
	cache   tls.ClientSessionCache
	short   pool
	streams *http.Transport
	alone   atomic.Int32 // streams on connections of their own
	// handshakes contains a token for each handshake in progress.
	handshakes chan struct{}
}

// NewClient returns a client that connects when it is used.
func NewClient(cluster *Cluster, dial Dial) *Client {
	c := &Client{cluster: cluster, dial: dial, cache: tls.NewLRUClientSessionCache(sessionCacheSize), handshakes: make(chan struct{}, maxHandshakes)}
	c.short.connect = func(ctx context.Context) (*tls.Conn, error) {
		conn, err := c.connect(ctx, protocolHTTP11)
		if err == nil {
			// Not for upgrades, whose far end need not read.
			boundUnanswered(conn.NetConn(), unanswered)
		}
		return conn, err
	}
	c.streams = &http.Transport{
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return c.connect(ctx, protocolHTTP2, protocolHTTP11)
		},
		ForceAttemptHTTP2:      true,
		DisableCompression:     true,
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: maxHead,
		HTTP2: &http.HTTP2Config{
			// A stream whose client does not read takes no more than this. The
			// window of the connection is larger, so that other streams go on.
			MaxReceiveBufferPerStream:     64 << 10,
			MaxReceiveBufferPerConnection: 1 << 20,
			SendPingTimeout:               30 * time.Second,
			PingTimeout:                   15 * time.Second,
		},
	}
	return c
}

// connect returns a verified connection that speaks one of the protocols.
func (c *Client) connect(ctx context.Context, protocols ...string) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	raw, err := c.cluster.open(ctx, c.dial)
	if err != nil {
		return nil, err
	}
	select {
	case c.handshakes <- struct{}{}:
		defer func() { <-c.handshakes }()
	case <-ctx.Done():
		_ = raw.Close()
		return nil, ctx.Err()
	}
	conn := tls.Client(rawio.Ahead(raw), &tls.Config{
		RootCAs:            c.cluster.roots,
		ServerName:         ServerName,
		NextProtos:         protocols,
		ClientSessionCache: c.cache,
		MinVersion:         tls.VersionTLS12,
	})
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("handshake: %w", err)
	}
	return conn, nil
}

// Short sends a request that ends soon. The body is sent before the answer is
// read. Writes are never sent twice.
func (c *Client) Short(ctx context.Context, r *Request) (Response, error) {
	return c.short.roundTrip(ctx, r)
}

// Stream sends a request whose bodies may last, in both directions at once.
func (c *Client) Stream(ctx context.Context, r *Request) (Response, error) {
	if r.hasBody() {
		return responseOf(c.shared(ctx, r))
	}
	if c.alone.Add(1) > maxAlone {
		c.alone.Add(-1)
		return responseOf(c.shared(ctx, r))
	}
	resp, err := c.short.roundTrip(ctx, r)
	if err != nil {
		c.alone.Add(-1)
		return Response{}, err
	}
	body := resp.Body
	resp.Body = wrapped{body, closer(sync.OnceValue(func() error {
		c.alone.Add(-1)
		return body.Close()
	}))}
	return resp, nil
}

type closer func() error

func (c closer) Close() error { return c() }

// shared sends r as one stream of the HTTP/2 connection.
func (c *Client) shared(ctx context.Context, r *Request) (*http.Response, error) {
	path, query, _ := strings.Cut(r.Target, "?")
	req := (&http.Request{
		Method: r.Method,
		// Opaque keeps the path's bytes as they are.
		URL:        &url.URL{Scheme: "https", Host: ServerName, Opaque: path, RawQuery: query},
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Host:       r.Host,
		Header:     http.Header{},
	}).WithContext(ctx)
	r.Header.AddTo(req.Header)
	if r.hasBody() {
		req.Body, req.ContentLength = io.NopCloser(source{r.Body}), r.Length
	}
	if _, ok := req.Header["User-Agent"]; !ok {
		req.Header["User-Agent"] = []string{""} // else net/http adds its own
	}
	r.Sent = time.Now()
	return c.streams.RoundTrip(req)
}

// source is a client's body. Failures to read it are BodyErrors.
type source struct{ io.Reader }

func (s source) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = &BodyError{err}
	}
	return n, err
}

// Dial returns a TCP connection to the apiserver.
func (c *Client) Dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	return c.cluster.open(ctx, c.dial)
}

// Close closes the idle connections and keeps no more. Requests in progress go on.
func (c *Client) Close() {
	c.short.close()
	c.streams.CloseIdleConnections()
}
