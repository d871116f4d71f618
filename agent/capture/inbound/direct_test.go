package inbound

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/sockdiag"
	"github.com/ctrlmesh/ctrlmesh/internal/stall"
)

const (
	// signOfLifeFor is how long a sign of life of an agent is valid.
	signOfLifeFor = 2 * time.Second
	// patience is longer.
	patience = signOfLifeFor + 100*time.Millisecond
)

const applicationVariable = "CTRLMESH_TEST_APPLICATION"

// TestApplicationProcess is the application of other tests, in a process of its own. It answers
// each line, except "work", whose answer is that of the next line.
func TestApplicationProcess(t *testing.T) {
	if os.Getenv(applicationVariable) == "" {
		t.Skip("it is run by other tests")
	}
	l, err := net.FileListener(os.NewFile(3, "listener"))
	require.NoError(t, err)
	for {
		c, err := l.Accept()
		require.NoError(t, err)
		go func() {
			defer c.Close()
			for lines := bufio.NewScanner(c); lines.Scan(); {
				if lines.Text() != "work" {
					fmt.Fprintln(c, "application")
				}
			}
		}()
	}
}

// startApplication starts the application in a pod.
func startApplication(t *testing.T, pod *ns) {
	t.Helper()
	var l net.Listener
	require.NoError(t, pod.Do(func() (err error) {
		l, err = net.Listen("tcp", ":9443")
		return err
	}))
	f, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestApplicationProcess$")
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), applicationVariable+"=yes"), []*os.File{f}
	require.NoError(t, cmd.Start())
	require.NoError(t, l.Close())
	require.NoError(t, f.Close())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

// kept is a connection that a client keeps.
type kept struct {
	net.Conn
	lines *bufio.Scanner
}

func (n *ns) keep(t *testing.T, to netip.AddrPort) kept {
	t.Helper()
	return n.keepFrom(t, netip.Addr{}, to)
}

func (n *ns) keepFrom(t *testing.T, from netip.Addr, to netip.AddrPort) kept {
	t.Helper()
	var c net.Conn
	require.NoError(t, n.Do(func() (err error) {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
		c, err = dialer.Dial("tcp", to.String())
		return err
	}))
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(soon)))
	return kept{c, bufio.NewScanner(c)}
}

func (c kept) say(t *testing.T, line string) {
	t.Helper()
	_, err := fmt.Fprintln(c, line)
	require.NoError(t, err)
}

// works requires that the application still answers on the connection.
func (c kept) works(t *testing.T) {
	t.Helper()
	c.say(t, "hello")
	require.True(t, c.lines.Scan(), "%v", c.lines.Err())
	require.Equal(t, "application", c.lines.Text())
}

// checking calls Check as the agent does, until done.
func checking(t *testing.T, n *Node, done func() bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		require.NoError(t, n.Check())
		return done()
	}, soon, 50*time.Millisecond)
}

// ends requires that checks end the connection.
func (c kept) ends(t *testing.T, n *Node) {
	t.Helper()
	ended := make(chan error, 1)
	go func() {
		c.lines.Scan()
		ended <- c.lines.Err()
	}()
	var err error
	checking(t, n, func() bool {
		select {
		case err = <-ended:
			return true
		default:
			return false
		}
	})
	require.ErrorIs(t, err, unix.ECONNRESET)
}

func TestDirectConnectionsEndOnceTheAgentSteers(t *testing.T) {
	pod, outside := newPod(t)
	startApplication(t, pod)
	to := netip.AddrPortFrom(pod4, port)
	idle, idle6, busy := outside.keep(t, to), outside.keep(t, netip.AddrPortFrom(pod6, port)), outside.keep(t, to)
	own, loopback := pod.keep(t, to), pod.keepFrom(t, netip.MustParseAddr("127.0.0.2"), to)
	all := []kept{idle, idle6, busy, own, loopback}
	for _, c := range all {
		c.works(t)
	}
	time.Sleep(20 * time.Millisecond) // else its times are those of the answer before
	busy.say(t, "work")

	n := open(t, pins(t))
	p, err := n.Capture(Request{UID: uid, NetNS: pod.Path, Ports: []uint16{port}})
	require.NoError(t, err)
	answer(t, "agent", p.Listeners()...)
	idle.ends(t, n)
	idle6.ends(t, n)
	outside.requireSteered("agent")
	since := time.Now()
	checking(t, n, func() bool { return time.Since(since) > time.Second })
	busy.works(t)
	own.works(t)
	require.ErrorIs(t, p.Direct(), errDirect)
	busy.ends(t, n)
	checking(t, n, func() bool { return p.Direct() == nil })
	own.works(t)
	loopback.works(t)

	late := stall.Measure(t)
	time.Sleep(patience)
	require.NoError(t, n.Check())
	if err := p.Direct(); err != nil {
		require.Greater(t, late.Total(), patience/2, "a slow check is no lapse of the heartbeat: %v", err)
	}
}

func TestConnectionsThatAreNeverQuietEndInTheEnd(t *testing.T) {
	pod, outside := newPod(t)
	startApplication(t, pod)
	busy := outside.keep(t, netip.AddrPortFrom(pod4, port))
	busy.works(t)
	time.Sleep(20 * time.Millisecond) // else its times are those of the answer before
	busy.say(t, "work")

	n := open(t, pins(t))
	n.endWithin = 2 * time.Second
	start := time.Now()
	_, err := n.Capture(Request{UID: uid, NetNS: pod.Path, Ports: []uint16{port}})
	require.NoError(t, err)
	busy.ends(t, n)
	require.GreaterOrEqual(t, time.Since(start), n.endWithin)
}

func TestConnectionsFromALapseEnd(t *testing.T) {
	pod, outside := newPod(t)
	startApplication(t, pod)
	n := open(t, pins(t))
	p, err := n.Capture(Request{UID: uid, NetNS: pod.Path, Ports: []uint16{port}})
	require.NoError(t, err)
	answer(t, "agent", p.Listeners()...)
	checking(t, n, func() bool { return p.Direct() == nil })

	signs.stop(true)
	since := time.Now()
	checking(t, n, func() bool { return time.Since(since) > patience })
	direct := outside.keep(t, netip.AddrPortFrom(pod4, port))
	direct.works(t)
	require.NoError(t, p.Direct(), "no lapse has ended")
	signs.stop(false)
	require.Eventually(t, func() bool { return p.Direct() != nil }, soon, time.Millisecond)
	direct.ends(t, n)
}

func TestBusyConnectionsEndBetweenRequests(t *testing.T) {
	const clients, most = 4, 3 // a busy machine may delay the end until a request arrives
	pod, outside := newPod(t)
	startApplication(t, pod)
	n := open(t, pins(t))
	answered := make(chan bool, clients)
	for range clients {
		c := outside.keep(t, netip.AddrPortFrom(pod4, port))
		c.works(t)
		go func() {
			for {
				time.Sleep(10 * time.Millisecond)
				if _, err := fmt.Fprintln(c, "hello"); err != nil {
					answered <- true
					return
				}
				if !c.lines.Scan() {
					answered <- false
					return
				}
			}
		}()
	}
	p, err := n.Capture(Request{UID: uid, NetNS: pod.Path, Ports: []uint16{port}})
	require.NoError(t, err)
	answer(t, "agent", p.Listeners()...)
	start := time.Now()
	checking(t, n, func() bool { return len(answered) == clients })
	require.Less(t, time.Since(start), n.endWithin)
	all := 0
	for range clients {
		if <-answered {
			all++
		}
	}
	require.GreaterOrEqual(t, all, most)
}

func TestChecksEndDirectConnectionsOfPodsInTurn(t *testing.T) {
	n := open(t, pins(t))
	n.endFor = time.Nanosecond
	var pods []*Pod
	for i := range 3 {
		pod, outside := newPod(t)
		pod.listen("tcp", ":9443")
		p, err := n.Capture(Request{UID: fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", i), NetNS: pod.Path, Ports: []uint16{port}})
		require.NoError(t, err)
		outside.keep(t, netip.AddrPortFrom(pod4, port))
		pods = append(pods, p)
	}
	for checks := range len(pods) * 2 {
		searched := map[time.Time]bool{}
		for _, p := range pods {
			searched[p.searched] = true
		}
		delete(searched, time.Time{})
		require.Len(t, searched, min(checks, len(pods)))
		require.NoError(t, n.Check())
	}
}

// pending is connections, each of which takes a while, and is quiet.
type pending struct{ err error }

func (p pending) Activity(sockdiag.Connection) (sockdiag.Activity, bool, error) {
	time.Sleep(time.Millisecond)
	return sockdiag.Activity{Sent: time.Minute, Received: time.Minute}, true, nil
}

func (p pending) Destroy(sockdiag.Connection) (bool, error) { return p.err == nil, p.err }

func TestDirectConnectionsEndUntilTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const all = 100_000
		ended := 0
		left, err := destroyQuiet(pending{}, make([]sockdiag.Connection, all), time.Second, time.Now().Add(20*time.Millisecond), &ended)
		require.NoError(t, err)
		require.Equal(t, 20, ended, "each takes a millisecond")
		require.Len(t, left, all-ended)
	})
}

func TestConnectionsThatCannotEndStayDirect(t *testing.T) {
	pod, outside := newPod(t)
	startApplication(t, pod)
	c := outside.keep(t, netip.AddrPortFrom(pod4, port))
	c.works(t)
	time.Sleep(20 * time.Millisecond) // else its times are those of the answer before
	c.say(t, "work")                  // so that checks do not end it
	n := open(t, pins(t))
	p, err := n.Capture(Request{UID: uid, NetNS: pod.Path, Ports: []uint16{port}})
	require.NoError(t, err)

	var ended int
	_, err = destroyQuiet(pending{unix.EOPNOTSUPP}, make([]sockdiag.Connection, 1), time.Second, time.Now().Add(soon), &ended)
	require.NoError(t, n.noteEndless(err))
	searched := func() error {
		n.mu.Lock()
		p.searched = time.Time{}
		n.mu.Unlock()
		require.NoError(t, n.Check())
		return p.Direct()
	}
	for since := time.Now(); time.Since(since) < findFor+time.Second; time.Sleep(50 * time.Millisecond) {
		require.ErrorIs(t, searched(), errEndless)
	}
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return searched() == nil }, soon, 50*time.Millisecond)
}
