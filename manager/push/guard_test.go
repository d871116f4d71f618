package push

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// send writes up to that many bytes to a connection that is read until it fails, and
// returns how many were written before it closed.
func send(client, server net.Conn, total int) (written chan int) {
	go func() { _, _ = io.Copy(io.Discard, server) }()
	written = make(chan int, 1)
	go func() {
		n, _ := client.Write(make([]byte, total))
		written <- n
	}()
	return written
}

func TestUnauthenticatedConnectionIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		c := newGuardedConn(server)
		began := time.Now()
		require.Equal(t, maxUnreviewed, <-send(client, c, 2*maxUnreviewed))
		require.Equal(t, authenticateWithin, time.Since(began), "when it was closed")
	})
}

func TestTrustLiftsTheBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		c := newGuardedConn(server)
		written := send(client, c, 2*maxUnreviewed)
		synctest.Wait() // until the bound is reached
		c.trust()
		require.Equal(t, 2*maxUnreviewed, <-written)
		time.Sleep(2 * authenticateWithin)
		require.Equal(t, 1<<10, <-send(client, c, 1<<10), "the connection is open")
		require.NoError(t, client.Close())
	})
}

func TestPeerWithManyConnectionsIsCutOff(t *testing.T) {
	w := start(t)
	var last net.Conn
	for range maxConnsPerPeer + 1 {
		c, err := net.Dial("tcp", w.address)
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		last = c
	}
	require.NoError(t, last.SetReadDeadline(time.Now().Add(authenticateWithin/2)))
	_, err := last.Read(make([]byte, 1))
	var timeout net.Error
	require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the connection above the bound is open")
}

func TestMessagesOfAgentsExceedWhatIsReadOfOthers(t *testing.T) {
	w := start(t)
	w.Set(cluster1, policies("a@n1=1"))
	a := w.connect("n1", nil)
	a.world()
	report := &meshv1.Report{}
	for range 20 {
		report.Pods = append(report.Pods, &meshv1.PodReport{Uid: "a", Version: "1", Message: strings.Repeat("x", maxUnreviewed)})
	}
	require.NoError(t, a.stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Report{Report: report}}))
	require.Eventually(t, func() bool { return w.Observe("n1", "a").Version == "1" }, soon, 10*time.Millisecond)
}
