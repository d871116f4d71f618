package capture

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
)

// probe is a connection that should arrive at the pod's listener.
type probe struct {
	fd      int
	port    int // its source port
	began   time.Time
	err     error   // of connect
	state   *uint32 // of the redirection before it; nil: unknown
	arrived atomic.Bool
}

// watched is a listener that omits probes, and connections that are not the pod's.
type watched struct {
	net.Listener
	pod *Pod
}

// Accept waits for the pod's next connection that is not a probe. A probe has served its
// purpose when it arrives here.
func (w watched) Accept() (net.Conn, error) {
	for {
		conn, err := w.Listener.Accept()
		if err != nil {
			return nil, err
		}
		at, ok := conn.RemoteAddr().(*net.TCPAddr)
		if !ok || !w.pod.status.takes(at.Port) && w.owns(conn) {
			return conn, nil
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // leave nothing in the pod's network namespace
		}
		_ = conn.Close()
	}
}

// owns reports whether a process of the pod made a connection. In a network namespace of
// its own there are no others.
func (w watched) owns(conn net.Conn) bool {
	if w.pod.identity == nil {
		return true
	}
	err := w.pod.identity.check(conn)
	if err == nil {
		return true
	}
	peer := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	if !errors.Is(err, errForeign) && !errors.Is(err, fs.ErrNotExist) {
		w.pod.node.cfg.Logger.Warn("closed a connection whose process is unknown", "pod", w.pod.known.UID, "error", err)
	}
	w.pod.node.cfg.Refused(peer, ForeignProcess)
	return false
}

// takes reports whether a connection from a port is the awaited probe. No other socket can
// have that port, because the probe is bound to it on all addresses.
func (s *status) takes(port int) bool {
	pr := s.awaited.Load()
	if pr == nil || pr.port != port || !s.awaited.CompareAndSwap(pr, nil) {
		return false
	}
	pr.arrived.Store(true)
	return true
}

// destinationOf returns the destination of the pod's probes; invalid if there is none.
func (h *health) destinationOf(p *Pod) netip.AddrPort {
	switch {
	case p == h.own:
		return h.to
	case p.mode == Address && len(h.node.agents) == 0:
		return netip.AddrPort{}
	case p.mode == Address:
		return h.node.agents[0]
	case p.known.HostNetwork:
		// The hook does not redirect this process, which is not in the pod's cgroup.
		return netip.AddrPortFrom(listener.Loopback4, p.known.Port)
	}
	return h.node.destinations[0]
}

// begin sends a probe from the network namespace of each of the pods. A probe that cannot be
// created proves nothing about the redirection.
func (h *health) begin(pods []*Pod) {
	if len(pods) == 0 {
		return
	}
	now := time.Now()
	_ = netns.OnOwnGoroutine(func() error {
		leave, err := netns.Enter(pods[0].known.NetNS)
		if err != nil {
			return err
		}
		for i, p := range pods {
			s := &p.status
			s.began, s.proof = now, nil
			to := h.destinationOf(p)
			if !to.IsValid() || i > 0 && netns.Set(p.known.NetNS) != nil {
				continue // released meanwhile
			}
			if pr, err := newProbe(to); err == nil {
				pr.began, s.probe = now, pr
				if state, known := p.redirector.State(p.target()); known {
					pr.state = &state
				}
				s.awaited.Store(pr)
				pr.connect(to)
			}
		}
		return leave()
	})
}

// newProbe creates a probe in the calling thread's network namespace, unconnected.
func newProbe(to netip.AddrPort) (*probe, error) {
	family, anywhere := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{})
	if to.Addr().Is6() {
		family, anywhere = unix.AF_INET6, &unix.SockaddrInet6{}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, err
	}
	// Its port must be known before it is accepted. Without linger it leaves no TIME_WAIT.
	err = errors.Join(unix.Bind(fd, anywhere), unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	at, nerr := unix.Getsockname(fd)
	if err = errors.Join(err, nerr); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &probe{fd: fd, port: int(listener.Address(at).Port())}, nil
}

func (pr *probe) connect(to netip.AddrPort) {
	address := unix.Sockaddr(&unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
	if to.Addr().Is4() {
		address = &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	if err := unix.Connect(pr.fd, address); !errors.Is(err, unix.EINPROGRESS) {
		pr.err = os.NewSyscallError("connect", err)
	}
}

// patience returns how long a probe may take to arrive.
func (pr *probe) patience() time.Duration {
	if _, err := unix.Getpeername(pr.fd); err != nil {
		return patience
	}
	return landing
}

// landed returns whether a probe that no listener reported was redirected all the same: to
// another agent, which shares the listeners during a takeover (elsewhere), or to a queue of
// connections that wait to be accepted.
func (p *Pod) landed(pr *probe) (elsewhere, waits bool) {
	if p.addressed != nil {
		// While there are two agents, their Service leads to either.
		info, err := unix.GetsockoptTCPInfo(pr.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		waits = p.addressed.Waiting()
		return !waits && err == nil && info.State == unix.BPF_TCP_ESTABLISHED, waits
	}
	for _, socket := range p.sockets {
		_ = descriptor.Control(socket, func(fd int) error {
			// Of a listening socket, Unacked is the length of its queue.
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			waits = waits || err == nil && info.Unacked > 0
			return err
		})
	}
	return !waits && p.accepted(pr), waits
}

// accepted reports whether the kernel knows the other end of a probe.
func (p *Pod) accepted(pr *probe) bool {
	own, err := unix.Getsockname(pr.fd)
	if err != nil {
		return false
	}
	from, local := listener.Address(own), listener.Loopback4
	if from.Addr().Is6() {
		local = listener.Loopback6
	}
	_, err = findConnection(p.known.NetNS, netip.AddrPortFrom(local, p.known.Port), from)
	return err == nil
}

// ownPod is the uid of the pods that agents create for themselves, except for the agent's
// process id at its end. Kubernetes creates no such uids.
var ownPod uuid.UUID

func isOwnPod(uid uuid.UUID) bool {
	return [12]byte(uid[:]) == [12]byte(ownPod[:])
}

// isOwnOfRunningAgent reports whether a uid is that of an agent's own pod, and the agent
// runs.
func isOwnOfRunningAgent(uid uuid.UUID) bool {
	pid := binary.BigEndian.Uint32(uid[12:])
	return isOwnPod(uid) && !errors.Is(unix.Kill(int(pid), 0), unix.ESRCH)
}

// captureOwn captures a network namespace that has nothing but lo.
func (h *health) captureOwn() error {
	if h.own != nil || h.node.modes[0].mode == Address {
		return nil
	}
	namespace, err := netns.New()
	if err != nil {
		return err
	}
	p := &Pod{node: h.node, redirector: h.node.modes[0].redirector, mode: h.node.modes[0].mode, known: redirect.Pod{UID: ownPod, NetNS: namespace}}
	binary.BigEndian.PutUint32(p.known.UID[12:], uint32(os.Getpid()))
	if err := p.open(Request{}); err != nil {
		return errors.Join(err, p.closeFiles())
	}
	h.own = p
	return nil
}

// awaitOwn waits a moment for a connection of the agent's own pod.
func (h *health) awaitOwn() {
	var queues []unix.PollFd
	for _, l := range h.own.sockets {
		_ = descriptor.Control(l, func(fd int) error {
			queues = append(queues, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
			return nil
		})
	}
	_, _ = unix.Poll(queues, int(moment.Milliseconds()))
}

// acceptOwn accepts and closes the connections of the agent's own pod.
func (h *health) acceptOwn() {
	for _, l := range h.own.sockets {
		_ = descriptor.Control(l, func(fd int) error {
			for {
				accepted, from, err := unix.Accept4(fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
				if err != nil {
					return err
				}
				h.own.status.takes(int(listener.Address(from).Port()))
				_ = unix.SetsockoptLinger(accepted, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
				_ = unix.Close(accepted)
			}
		})
	}
}

// nameOf returns a pod's uid; "" for that of an agent's own pod.
func nameOf(uid uuid.UUID) string {
	if isOwnPod(uid) {
		return ""
	}
	return uid.String()
}
