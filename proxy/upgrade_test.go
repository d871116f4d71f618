package proxy

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// echo switches protocols and sends back what it gets, after a greeting that
// leaves with the head.
func echo(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Query().Get("answer") {
	case "403":
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, "no")
		return
	case "200":
		return
	}
	conn, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	protocol := r.Header.Get("Upgrade")
	if r.URL.Query().Get("answer") == "other" {
		protocol = "something"
	}
	fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nX-Stream: %s\r\n\r\nhello", protocol, r.Header.Get("X-Stream"))
	_, _ = io.Copy(conn, rw)
}

type upgraded struct {
	conn *tls.Conn
	br   *bufio.Reader
	resp *http.Response
}

func (m *mesh) upgrade(path, protocol, more string) upgraded {
	m.t.Helper()
	return m.upgradeBy("POST", path, protocol, more)
}

func (m *mesh) upgradeBy(method, path, protocol, more string) upgraded {
	m.t.Helper()
	conn, err := tls.Dial("tcp", m.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
	require.NoError(m.t, err)
	m.t.Cleanup(func() { _ = conn.Close() })
	require.NoError(m.t, conn.SetDeadline(time.Now().Add(soon)))
	_, err = fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: kubernetes\r\nX-Stream: v4\r\nAuthorization: Bearer t\r\nConnection: Upgrade\r\nUpgrade: %s\r\n%s\r\n", method, path, protocol, more)
	require.NoError(m.t, err)
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	require.NoError(m.t, err)
	return upgraded{conn, br, resp}
}

func TestUpgrades(t *testing.T) {
	t.Parallel()
	api := &recorder{then: echo}
	m := newMesh(t, api)
	m.policy(policytest.LimitTo("a=b"))
	for _, path := range []string{
		"/api/v1/namespaces/a/pods/b/exec?command=ls", "/api/v1/namespaces/a/pods/b/attach", "/api/v1/namespaces/a/pods/b/portforward",
		"/api/v1/namespaces/a/pods/b/proxy/x", "/api/v1/namespaces/a/services/b/proxy/", "/api/v1/nodes/n/proxy/exec",
	} {
		for _, protocol := range []string{"SPDY/3.1", "websocket"} {
			u := m.upgrade(path, protocol, "")
			require.Equal(t, 101, u.resp.StatusCode)
			require.Equal(t, protocol, u.resp.Header.Get("Upgrade"))
			require.Equal(t, "v4", u.resp.Header.Get("X-Stream"))
			got := api.last(t)
			require.Equal(t, path, got.URI)
			require.Equal(t, "HTTP/1.1", got.Proto)
			require.Equal(t, "Bearer t", got.Header.Get("Authorization"))
			for _, s := range []string{"hello", "ping", "pong"} {
				if s != "hello" {
					_, err := io.WriteString(u.conn, s)
					require.NoError(t, err)
				}
				b := make([]byte, len(s))
				_, err := io.ReadFull(u.br, b)
				require.NoError(t, err)
				require.Equal(t, s, string(b))
			}
			_ = u.conn.Close()
		}
	}
}

// Java clients ask for WebSocket in watches, and fall back to HTTP when they get 200.
func TestReadsByWebSocketAreAnsweredByHTTP(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(policytest.LimitTo("a=b"))
	for _, path := range []string{"/api/v1/pods?watch=true", "/api/v1/namespaces/a/pods?watch=1", "/api/v1/pods", "/api/v1/namespaces/a/configmaps/b"} {
		require.Equal(t, 200, m.upgradeBy("GET", path, "websocket", "Sec-WebSocket-Version: 13\r\n").resp.StatusCode, path)
		got := api.last(t)
		require.Empty(t, got.Header.Get("Upgrade"), path)
		require.NotContains(t, got.Header.Get("Connection"), "pgrade", path)
		require.Equal(t, strings.Contains(path, "/pods"), strings.Contains(got.URI, "labelSelector=a"), "%s is narrowed: %s", path, got.URI)
	}
	require.Equal(t, 400, m.upgradeBy("GET", "/api/v1/pods?watch=true", "SPDY/3.1", "").resp.StatusCode)
	require.Equal(t, 400, m.upgradeBy("GET", "/version", "websocket", "").resp.StatusCode)
}

// What subresources answer by WebSocket is not seen, so that it counts as a connection.
func TestSubresourcesAreUpgradedToWebSocket(t *testing.T) {
	t.Parallel()
	const log, console = "/api/v1/namespaces/%s/pods/b/log?follow=true", "/apis/subresources.kubevirt.io/v1/namespaces/%s/virtualmachineinstances/vm/console"
	api := far{make(chan net.Conn, 1)}
	m := newMesh(t, api)
	for _, path := range []string{log, console} {
		m.set(sharded("1", "mine"))
		u := m.upgradeBy("GET", fmt.Sprintf(path, "mine"), "websocket", "")
		require.Equal(t, 101, u.resp.StatusCode, path)
		theirs := <-api.conns
		requireSettled(t, m.set(sharded("2", "mine")))
		next := sharded("3", "other")
		next.Sharding.FenceNamespaces = true
		settled := m.set(next)
		_, err := io.Copy(io.Discard, u.br)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "it is cut")
		requireUnsettled(t, settled)
		require.NoError(t, theirs.Close())
		requireSettled(t, settled)

		next = sharded("4", "other")
		next.Sharding.ReadAll, next.Sharding.FenceNamespaces = true, true
		m.set(next)
		require.Equal(t, 403, m.upgradeBy("GET", fmt.Sprintf(path, "mine"), "websocket", "").resp.StatusCode, path)
	}
	for _, method := range []string{"PUT", "POST", "DELETE"} {
		require.Equal(t, 400, m.upgradeBy(method, fmt.Sprintf(console, "other"), "websocket", "").resp.StatusCode, method)
	}
	require.Equal(t, 400, m.upgradeBy("GET", fmt.Sprintf(console, "other"), "SPDY/3.1", "").resp.StatusCode)
}

func TestUpgradeRefusedByApiserverIsPassed(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{then: echo})
	m.policy(nil)
	const path = "/api/v1/namespaces/a/pods/b/exec?answer="
	u := m.upgrade(path+"403", "SPDY/3.1", "")
	require.Equal(t, 403, u.resp.StatusCode)
	body, err := io.ReadAll(u.resp.Body)
	require.NoError(t, err)
	require.Equal(t, "no", string(body))
	require.Equal(t, 200, m.upgrade(path+"200", "SPDY/3.1", "").resp.StatusCode)
	require.Equal(t, 502, m.upgrade(path+"other", "SPDY/3.1", "").resp.StatusCode)
}

func TestShutdownEndsUpgrades(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{then: echo})
	m.policy(nil)
	u := m.upgrade("/api/v1/namespaces/a/pods/b/exec", "SPDY/3.1", "")
	require.Equal(t, 101, u.resp.StatusCode)
	require.NoError(t, m.pod.Shutdown(t.Context()))
	_, err := io.Copy(io.Discard, u.br)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
}
