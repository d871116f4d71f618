package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
)

// The headers of a request of `probe visit`: when it was sent, and its id.
const (
	sentHeader = "X-Sent"
	idHeader   = "X-Id"
)

// visit is a request to another host, as client and server print it.
type visit struct {
	ID   string    `json:"id"`
	Sent time.Time `json:"sent"`
	Kind string    `json:"visit"`
	Host string    `json:"host"`
	// Printed by the client.
	Code  int    `json:"code,omitempty"`
	Error string `json:"error,omitempty"`
}

// host answers on ports 80 and 443, there with a self-signed certificate, and prints a line
// for each request.
func host(ctx context.Context) error {
	certificate, err := selfSigned()
	if err != nil {
		return err
	}
	out := &printer{out: json.NewEncoder(os.Stdout)}
	plain := &http.Server{Addr: ":80", ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent, _ := time.Parse(time.RFC3339Nano, r.Header.Get(sentHeader)) // the zero time if the header is missing
		kind := "http"
		if r.TLS != nil {
			kind = "https"
		}
		out.print(visit{ID: r.Header.Get(idHeader), Sent: sent, Kind: kind, Host: r.Host})
		_, _ = io.WriteString(w, "welcome\n")
	})}
	secure := &http.Server{Addr: ":443", ReadHeaderTimeout: plain.ReadHeaderTimeout, Handler: plain.Handler,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}}
	defer context.AfterFunc(ctx, func() { _ = errors.Join(plain.Close(), secure.Close()) })()
	ended := make(chan error, 2)
	go func() { ended <- plain.ListenAndServe() }()
	go func() { ended <- secure.ListenAndServeTLS("", "") }()
	for range 2 {
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			return err
		}
	}
	return nil
}

func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("making a key: %w", err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("making a certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// visits are the kinds of requests to each host: on new connections, and on a persistent one.
var visits = []struct {
	kind, scheme string
	keep         bool
}{{"http", "http", false}, {"kept", "http", true}, {"https", "https", false}}

// visitAll sends requests to hosts at a steady rate, without waiting for answers, and prints a
// line for each until ctx ends.
func visitAll(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("visit", flag.ContinueOnError)
	every := flags.Duration("every", 25*time.Millisecond, "the time from one request to the next")
	timeout := flags.Duration("timeout", 5*time.Second, "how long to wait for an answer")
	if err := flags.Parse(args); err != nil {
		return err
	}
	hosts := flags.Args()
	if len(hosts) == 0 {
		return errors.New("whom?")
	}
	clients := make([]*http.Client, len(visits))
	for i, v := range visits {
		clients[i] = &http.Client{Timeout: *timeout, Transport: &http.Transport{
			DisableKeepAlives: !v.keep,
			DialContext:       (&net.Dialer{Timeout: *timeout}).DialContext,
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}, // the tests' hosts have self-signed certificates
		}}
	}
	out := &printer{out: json.NewEncoder(os.Stdout)}
	return pace(ctx, *every, func(i int) {
		n := i / len(hosts) % len(visits)
		out.print(visitOne(ctx, clients[n], visits[n].scheme, visits[n].kind, hosts[i%len(hosts)]))
	})
}

func visitOne(ctx context.Context, c *http.Client, scheme, kind, host string) (v visit) {
	v = visit{ID: string(uuid.NewUUID()), Sent: time.Now(), Kind: kind, Host: host}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+host+"/", nil)
	if err != nil {
		v.Error = err.Error()
		return v
	}
	req.Header.Set(idHeader, v.ID)
	req.Header.Set(sentHeader, v.Sent.Format(time.RFC3339Nano))
	resp, err := c.Do(req)
	if err != nil {
		v.Error = err.Error()
		return v
	}
	defer func() { _ = resp.Body.Close() }()
	v.Code = resp.StatusCode
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1000))
	switch {
	case err != nil:
		v.Error = err.Error()
	case v.Code != http.StatusOK:
		v.Error = string(text)
	}
	return v
}

// printer prints lines of JSON.
type printer struct {
	mu  sync.Mutex
	out *json.Encoder
}

func (p *printer) print(line any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.out.Encode(line) // the reader may have exited
}
