package inbound

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/internal/netnstest"
)

// soon is when what must happen has happened, however busy the machine is.
const soon = 30 * time.Second

const (
	uid  = "3a1f0c52-6a53-4f0e-8e0a-0f4b1f9f6d11"
	port = 9443
)

var (
	pod4, pod6         = netip.MustParseAddr("198.18.7.1"), netip.MustParseAddr("fd00:18:7::1")
	outside4, outside6 = pod4.Next(), pod6.Next()
)

// ns is a network namespace.
type ns struct{ *netnstest.NS }

func newNS(t testing.TB) *ns { return &ns{netnstest.New(t)} }

// newPod makes a pod's network namespace, and another one that reaches it.
func newPod(t testing.TB) (pod, outside *ns) {
	t.Helper()
	pod, outside = newNS(t), newNS(t)
	require.NoError(t, pod.Link.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "pod", PeerNamespace: netlink.NsFd(outside.File.Fd()),
	}))
	outside.Up("pod", outside4.String()+"/24", outside6.String()+"/64")
	pod.Up("eth0", pod4.String()+"/24", pod6.String()+"/64")
	return pod, outside
}

// listen serves as the application, until the test ends or it is stopped.
func (n *ns) listen(network, at string) (stop func()) {
	n.T.Helper()
	return answer(n.T, "application", n.Listen(network, at))
}

// answer accepts connections and answers each with a name and its local address.
func answer(t testing.TB, name string, listeners ...net.Listener) (stop func()) {
	t.Helper()
	done := make(chan struct{})
	for _, l := range listeners {
		go func() {
			defer func() { done <- struct{}{} }()
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				fmt.Fprintf(c, "%s %s", name, c.LocalAddr())
				c.Close()
			}
		}()
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		for _, l := range listeners {
			l.Close()
		}
		for range listeners {
			<-done
		}
	}
	t.Cleanup(stop)
	return stop
}

// connect returns who answers, and the address that the connection has there. It connects
// again if the machine stalled for so long that no agent gave a sign of life meanwhile.
func (n *ns) connect(to netip.AddrPort) (who, local string, err error) {
	for {
		before := signs.latest()
		who, local, err = n.connectOnce(to)
		if err != nil || before.IsZero() || time.Since(before) < signOfLifeFor {
			return who, local, err
		}
		n.T.Logf("%s answered after %s without a sign of life", who, time.Since(before))
	}
}

func (n *ns) connectOnce(to netip.AddrPort) (who, local string, err error) {
	var c net.Conn
	if err := netns.Do(n.File, func() (err error) {
		c, err = (&net.Dialer{Timeout: soon}).Dial("tcp", to.String())
		return err
	}); err != nil {
		return "", "", err
	}
	defer c.Close()
	_ = c.(*net.TCPConn).SetLinger(0) // no TIME_WAIT
	_ = c.SetDeadline(time.Now().Add(soon))
	said, err := io.ReadAll(c)
	who, local, _ = strings.Cut(string(said), " ")
	return who, local, err
}

func (n *ns) require(who string, to netip.AddrPort) {
	n.T.Helper()
	got, local, err := n.connect(to)
	require.NoError(n.T, err, to)
	require.Equal(n.T, who, got, to)
	require.Equal(n.T, to.String(), local)
}

func (n *ns) requireRefused(to netip.AddrPort) {
	n.T.Helper()
	_, _, err := n.connect(to)
	require.ErrorIs(n.T, err, unix.ECONNREFUSED, to)
}

// requireSteered requires that connections from outside reach the agent, at both addresses.
func (n *ns) requireSteered(who string) {
	n.T.Helper()
	for _, a := range []netip.Addr{pod4, pod6} {
		n.require(who, netip.AddrPortFrom(a, port))
	}
}

// attached counts the steering programs of the network namespace.
func (n *ns) attached() int {
	n.T.Helper()
	result, err := link.QueryPrograms(link.QueryOptions{Target: int(n.File.Fd()), Attach: ebpf.AttachSkLookup})
	require.NoError(n.T, err)
	return len(result.Programs)
}

// signs are the signs of life of the agents.
var signs signsOfLife

type signsOfLife struct {
	mu      sync.Mutex
	agents  int
	stopped bool // by the test
	last    time.Time
}

// join counts one more agent.
func (s *signsOfLife) join(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.agents += n
}

// give gives a sign of life, unless the test has stopped them.
func (s *signsOfLife) give(n *Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopped {
		s.last = time.Now()
		n.Beat()
	}
}

// stop stops the signs of life, or lets agents give them again.
func (s *signsOfLife) stop(yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = yes
}

// latest returns when the last sign was given; zero if none must be.
func (s *signsOfLife) latest() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.agents == 0 || s.stopped {
		return time.Time{}
	}
	return s.last
}

func open(t testing.TB, pins string) *Node {
	t.Helper()
	n, err := Open(pins, slog.New(slog.NewTextHandler(t.Output(), nil)))
	require.NoError(t, err)
	signs.give(n)
	signs.join(1)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() { // as the agent's health check does
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
				signs.give(n)
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-done
		signs.join(-1)
		if err := n.Close(); !errors.Is(err, os.ErrClosed) {
			require.NoError(t, err)
		}
	})
	return n
}

func capture(t testing.TB, n *Node, pod *ns, name string, files ...*os.File) *Pod {
	t.Helper()
	p, err := n.Capture(Request{UID: uid, NetNS: pod.Path, Ports: []uint16{port}, Files: files})
	require.NoError(t, err)
	answer(t, name, p.Listeners()...)
	return p
}
