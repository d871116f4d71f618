package main

import (
	"fmt"
	"strings"
)

// haproxyConfig is HAProxy's fastest configuration here: HTTP/2 for clients, persistent
// HTTP/1.1 connections to the apiserver, and the cipher that Go's TLS chooses, so that all
// subjects use the same encryption. global are further lines for the whole process.
func haproxyConfig(o options, global ...string) string {
	return fmt.Sprintf(`
global
  maxconn 2000
  %[6]s
  ssl-default-bind-ciphersuites TLS_AES_128_GCM_SHA256
  ssl-default-server-ciphersuites TLS_AES_128_GCM_SHA256
defaults
  mode http
  timeout connect 10s
  timeout client 1h
  timeout server 1h
  http-reuse always
frontend pods
  bind fd@3 ssl crt %[1]s alpn h2,http/1.1
  default_backend apiserver
backend apiserver
  server apiserver %[2]s ssl verify required ca-file %[3]s verifyhost %[4]s sni str(%[4]s) alpn %[5]s pool-purge-delay 60s
`, o.cert, o.api, o.ca, serverName, o.haproxyUpstream, strings.Join(global, "\n  "))
}
