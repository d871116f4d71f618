package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
)

// servePlain runs a simple reverse proxy of Go's standard library, with TLS and HTTP/2 on both
// sides.
func servePlain(ctx context.Context, o options) error {
	ca, err := os.ReadFile(o.ca)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return errors.New("no certificate in the CA")
	}
	target := &url.URL{Scheme: "https", Host: o.api}
	server := &http.Server{Handler: &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		FlushInterval: -1,
		Transport: &http.Transport{
			TLSClientConfig:   &tls.Config{RootCAs: roots, ServerName: serverName},
			ForceAttemptHTTP2: true,
			// Otherwise it would request gzip where the client did not, and decompress it.
			DisableCompression: true,
		},
	}}
	l, err := inherited()
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	if err := server.ServeTLS(l, o.cert, o.cert); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
