package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// client is one HTTP/2 connection, configured like client-go's.
type client struct {
	http        *http.Client
	base, token string
}

func newClients(addr string, ca []byte, token string) []*client {
	return newClientsBy((&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext, addr, ca, token)
}

func newClientsBy(dial func(ctx context.Context, network, addr string) (net.Conn, error), addr string, ca []byte, token string) []*client {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	all := make([]*client, connections)
	for i := range all {
		all[i] = &client{base: "https://" + addr, token: token, http: &http.Client{
			Transport: utilnet.SetTransportDefaults(&http.Transport{
				TLSHandshakeTimeout: 10 * time.Second,
				TLSClientConfig:     &tls.Config{RootCAs: roots, ServerName: serverName, MinVersion: tls.VersionTLS12},
				MaxIdleConnsPerHost: 25,
				DialContext:         dial,
				DisableCompression:  true, // the row with gzip requests it itself, and does not decompress
			}),
		}}
	}
	return all
}

// request is the request that a row measures.
type request struct {
	method, path, accept string
	gzip                 bool
	body                 []byte
}

// send returns the answer's head, or an error unless its status is a success.
func (c *client) send(ctx context.Context, r request) (*http.Response, error) {
	method, body := cmp.Or(r.method, http.MethodGet), io.Reader(nil)
	if r.body != nil {
		body = bytes.NewReader(r.body)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+r.path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("User-Agent", "ctrlmesh-bench")
	req.Header.Set("Accept", r.accept)
	if r.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.gzip {
		req.Header.Set("Accept-Encoding", "gzip")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	err = check(resp, r)
	if err != nil {
		_ = resp.Body.Close()
		return nil, fmt.Errorf("%s %s: %w", method, r.path, err)
	}
	return resp, nil
}

func check(resp *http.Response, r request) error {
	switch {
	case resp.StatusCode/100 != 2:
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return fmt.Errorf("%s: %s", resp.Status, text)
	case resp.ProtoMajor != 2:
		return errors.New("not HTTP/2 but " + resp.Proto)
	case resp.Header.Get("Content-Type") != r.accept && r.accept != anyType:
		return errors.New("not " + r.accept + " but " + resp.Header.Get("Content-Type"))
	case (resp.Header.Get("Content-Encoding") == "gzip") != r.gzip:
		return fmt.Errorf("gzip asked: %v, content encoding: %q", r.gzip, resp.Header.Get("Content-Encoding"))
	}
	return nil
}

// do sends r, reads the whole answer and returns its length.
func (c *client) do(ctx context.Context, r request) (int64, error) {
	resp, err := c.send(ctx, r)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	n, err := io.Copy(io.Discard, resp.Body)
	return n, failure.Wrap(err, "reading the answer to %s", r.path)
}
