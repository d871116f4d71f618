package proxy

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

func requireUnsettled(t *testing.T, settled <-chan struct{}) {
	t.Helper()
	select {
	case <-settled:
		t.Fatal("settled while something may be written")
	case <-time.After(100 * time.Millisecond):
	}
}

func requireSettled(t *testing.T, settled <-chan struct{}) {
	t.Helper()
	select {
	case <-settled:
	case <-time.After(soon):
		t.Fatal("not settled")
	}
}

// far is an apiserver that changes protocol, and ends no connection by itself.
type far struct{ conns chan net.Conn }

func (f far) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	_, _ = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
	f.conns <- conn
}

func sharded(version string, keys ...string) *meshv1.PodPolicy {
	return &meshv1.PodPolicy{Uid: "uid-1", Version: version, Sharding: policytest.Owning(keys...)}
}

func TestUpgradesCountWhileOpen(t *testing.T) {
	t.Parallel()
	api := far{make(chan net.Conn, 1)}
	m := newMesh(t, api)
	var journal recorded
	m.pod.env.Info.Journal = &journal
	m.set(sharded("1", "a", "b"))
	u := m.upgrade("/api/v1/namespaces/a/pods/x/exec", "SPDY/3.1", "")
	theirs := <-api.conns
	require.EqualValues(t, 1, journal.open.Load())

	requireSettled(t, m.set(sharded("2", "a"))) // it goes on under the new policy
	settled := m.set(sharded("3", "b"))
	_, err := io.Copy(io.Discard, u.br)
	require.NotErrorIs(t, err, context.DeadlineExceeded, "it is cut")
	requireUnsettled(t, settled)
	_, err = io.Copy(io.Discard, theirs)
	require.NoError(t, err, "the apiserver is sent the end")
	requireUnsettled(t, settled)
	require.NoError(t, theirs.Close())
	requireSettled(t, settled)
	require.Eventually(t, func() bool { return journal.open.Load() == 0 }, soon, time.Millisecond)
	require.Zero(t, journal.lost.Load())
}

func TestUpgradeThatTheClientEnds(t *testing.T) {
	t.Parallel()
	api := far{make(chan net.Conn, 1)}
	m := newMesh(t, api)
	m.set(sharded("1", "a"))
	u := m.upgrade("/api/v1/namespaces/a/pods/x/portforward", "websocket", "")
	theirs := <-api.conns
	require.NoError(t, u.conn.Close())
	settled := m.set(sharded("2", "b"))
	requireUnsettled(t, settled)
	require.NoError(t, theirs.Close())
	requireSettled(t, settled)
}

func TestUpgradeThatBreaks(t *testing.T) {
	t.Parallel()
	api := far{make(chan net.Conn, 1)}
	m := newMesh(t, api)
	var journal recorded
	m.pod.env.Info.Journal = &journal
	m.set(sharded("1", "a"))
	m.upgrade("/api/v1/namespaces/a/pods/x/attach", "SPDY/3.1", "")
	theirs := (<-api.conns).(*tls.Conn).NetConn().(*net.TCPConn)
	require.NoError(t, theirs.SetLinger(0)) // to reset it
	require.NoError(t, theirs.Close())
	require.Eventually(t, func() bool { return journal.lost.Load() != 0 }, soon, time.Millisecond)
	require.EqualValues(t, meshv1.LostWrite, journal.lost.Load())
}

func TestProxiedWritesCountUntilTheyAreAnswered(t *testing.T) {
	t.Parallel()
	api := held{make(chan struct{}), make(chan struct{})}
	m := newMesh(t, api)
	m.set(sharded("1", "a"))
	answered := make(chan answer, 1)
	go func() { answered <- m.do("PUT", "/api/v1/namespaces/a/pods/x/proxy/y", "{}") }()
	<-api.arrived
	settled := m.set(sharded("2", "b"))
	requireUnsettled(t, settled)
	close(api.answer)
	requireSettled(t, settled)
	require.Equal(t, 200, (<-answered).StatusCode, "it is given a moment")
}

// Who made the answer of a proxied request is not known.
func TestProxiedWriteThatFails(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", jsonType)
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	var journal recorded
	m.pod.env.Info.Journal = &journal
	m.set(sharded("1", "a"))
	m.do("GET", "/api/v1/namespaces/a/services/x/proxy/y", "")
	require.Zero(t, journal.lost.Load(), "it only reads")
	m.do("POST", "/api/v1/namespaces/a/services/x/proxy/y", "{}")
	require.Eventually(t, func() bool { return journal.lost.Load() != 0 }, soon, time.Millisecond)
	require.EqualValues(t, writes.Unseen(nil), journal.lost.Load())
	require.Zero(t, journal.open.Load())
}
