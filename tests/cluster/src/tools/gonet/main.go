// gonet is a network client for containers: busybox-static has no working resolver and no TLS.
//
//	gonet get [-X METHOD] [-d BODY] [-H "K: V"]... [-token FILE] [-ca FILE | -k] [-t TIMEOUT] URL
//	gonet lookup NAME
//	gonet tcp HOST:PORT
//
// The status goes to stderr, the body to stdout; exit code 1: no answer, 22: an HTTP error.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "gonet get|lookup|tcp ...")
		os.Exit(2)
	}
	ctx := context.Background()
	switch os.Args[1] {
	case "get":
		get(os.Args[2:])
	case "lookup":
		a, err := (&net.Resolver{PreferGo: true}).LookupHost(ctx, os.Args[2])
		check(err)
		fmt.Println(strings.Join(a, " "))
	case "tcp":
		c, err := (&net.Dialer{Timeout: 8 * time.Second}).DialContext(ctx, "tcp", os.Args[2])
		check(err)
		fmt.Println(c.LocalAddr(), "->", c.RemoteAddr())
		c.Close()
	}
}

func get(args []string) {
	f := flag.NewFlagSet("get", flag.ExitOnError)
	method := f.String("X", "GET", "method")
	body := f.String("d", "", "body")
	token := f.String("token", "", "file with a bearer token")
	ca := f.String("ca", "", "file with the authorities to trust, and no others")
	insecure := f.Bool("k", false, "trust anybody")
	timeout := f.Duration("t", 8*time.Second, "give up after this long")
	header := http.Header{}
	f.Func("H", "header", func(s string) error {
		k, v, ok := strings.Cut(s, ":")
		if !ok {
			return errors.New("want \"Key: value\"")
		}
		header.Add(k, strings.TrimSpace(v))
		return nil
	})
	f.Parse(args)
	r, err := http.NewRequest(*method, f.Arg(0), strings.NewReader(*body))
	check(err)
	r.Header = header
	if *token != "" {
		b, err := os.ReadFile(*token)
		check(err)
		r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(b)))
	}
	conf := &tls.Config{InsecureSkipVerify: *insecure}
	if *ca != "" {
		b, err := os.ReadFile(*ca)
		check(err)
		conf.RootCAs = x509.NewCertPool()
		conf.RootCAs.AppendCertsFromPEM(b)
	}
	c := http.Client{Timeout: *timeout, Transport: &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true}}
	resp, err := c.Do(r)
	check(err)
	fmt.Fprintln(os.Stderr, resp.Proto, resp.Status)
	_, err = io.Copy(os.Stdout, resp.Body)
	check(err)
	if resp.StatusCode >= 400 {
		os.Exit(22)
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
