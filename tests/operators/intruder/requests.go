package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

const tokenFile = "/var/run/secrets/kubernetes.io/serviceaccount/token"

// dial speaks TLS with the server that answers at the apiserver's address.
func dial(sni, protocol string) (*tls.Conn, error) {
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: patience}, "tcp", apiserver(), &tls.Config{
		InsecureSkipVerify: true, ServerName: sni, NextProtos: []string{protocol}, // it is the mesh, says forge
	})
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(patience))
	}
	return conn, err
}

// tokenIn returns the token in a file.
func tokenIn(file string) (string, error) {
	token, err := os.ReadFile(file)
	return strings.TrimSpace(string(token)), err
}

// send sends the head of a request as it is, with the token in a file, and a body. It returns the answer's code and
// body.
func send(sni, head, file, body string) (int, string, error) {
	token, err := tokenIn(file)
	if err != nil {
		return 0, "", err
	}
	conn, err := dial(sni, "http/1.1")
	if err != nil {
		return 0, "", err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, head+"Authorization: Bearer "+token+"\r\n\r\n"+body); err != nil {
		return 0, "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(answer), err
}

// misdirect names another address in each place of a request that can name one. The server
// there knows whether the mesh connected.
func misdirect(_ context.Context, decoy string) (verdict, error) {
	host, _, _ := net.SplitHostPort(decoy)
	answered := 0
	for _, r := range []struct{ sni, request string }{
		{"decoy.example.com", "GET /version HTTP/1.1\r\nHost: " + decoy + "\r\n"},
		{"", "GET https://" + decoy + "/version HTTP/1.1\r\nHost: " + decoy + "\r\n"},
		{"", "GET http://" + decoy + "/version HTTP/1.1\r\nHost: kubernetes\r\n"},
		{"", "CONNECT " + decoy + " HTTP/1.1\r\nHost: " + decoy + "\r\n"},
		{"", "GET //" + decoy + "/version HTTP/1.1\r\nHost: kubernetes\r\n"},
		{"", "GET /version HTTP/1.1\r\nHost: kubernetes\r\nX-Forwarded-Host: " + decoy + "\r\nForwarded: host=" + host + "\r\n"},
		{"", "GET /version HTTP/1.1\r\nHost: " + decoy + "\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"},
		// Two lengths: a server that uses the shorter one reads the rest as another request.
		{"", "POST /version HTTP/1.1\r\nHost: kubernetes\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n"},
	} {
		if _, _, err := send(r.sni, r.request, tokenFile, ""); err == nil {
			answered++
		}
	}
	if answered == 0 {
		return verdict{}, fmt.Errorf("none of the requests was answered")
	}
	return held("%d requests were answered", answered)
}

// borrow sends a request with another pod's token.
func borrow(_ context.Context, file string) (verdict, error) {
	const request = "GET /version HTTP/1.1\r\nHost: kubernetes\r\n"
	if code, body, err := send("", request, tokenFile, ""); err != nil || code != http.StatusOK {
		return verdict{}, fmt.Errorf("its own token: %d %s: %w", code, body, err)
	}
	code, body, err := send("", request, file, "")
	if err != nil {
		return verdict{}, err
	}
	if code != http.StatusForbidden {
		return broken("answered %d", code)
	}
	return held("%s", body)
}

// misname writes a lock whose name is not UTF-8. What became of the agent the caller sees.
func misname(context.Context) (verdict, error) {
	const lock = `{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "a"},
		"spec": {"holderIdentity": "a", "leaseDurationSeconds": 15, "leaseTransitions": 1, "acquireTime": "2026-01-01T00:00:00.000000Z"}}`
	head := fmt.Sprintf("PUT /apis/coordination.k8s.io/v1/namespaces/default/leases/%%ff HTTP/1.1\r\nHost: kubernetes\r\nContent-Type: application/json\r\nContent-Length: %d\r\n", len(lock))
	code, _, err := send("", head, tokenFile, lock)
	if err != nil {
		return verdict{}, err
	}
	return held("answered %d", code)
}
