package main

import (
	"fmt"
	"path/filepath"
)

// nginxConfig is nginx as HAProxy is configured: HTTP/2 for clients, persistent HTTP/1.1
// connections to the apiserver, nothing buffered, and the same cipher.
func nginxConfig(o options, listen string) string {
	return fmt.Sprintf(`
daemon off;
worker_processes auto;
pid %[6]s;
error_log stderr;
events { worker_connections 2000; }
http {
  access_log off;
  postpone_output 0;
  keepalive_requests 1000000000;
  upstream apiserver {
    server %[2]s;
    keepalive 64;
    keepalive_requests 1000000000;
  }
  server {
    listen %[5]s ssl http2;
    ssl_certificate %[1]s;
    ssl_certificate_key %[1]s;
    ssl_protocols TLSv1.3;
    ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;
    location / {
      proxy_pass https://apiserver;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_buffering off;
      proxy_request_buffering off;
      proxy_read_timeout 1h;
      proxy_ssl_protocols TLSv1.3;
      proxy_ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;
      proxy_ssl_verify on;
      proxy_ssl_trusted_certificate %[3]s;
      proxy_ssl_name %[4]s;
      proxy_ssl_server_name on;
    }
  }
}
`, o.cert, o.api, o.ca, serverName, listen, filepath.Join(filepath.Dir(o.cert), "nginx.pid")) // which nginx removes
}
