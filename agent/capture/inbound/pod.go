package inbound

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/sockdiag"
	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Pod is a pod whose inbound connections are captured. It is safe for concurrent use.
type Pod struct {
	uid   uuid.UUID
	node  *Node
	netns *os.File

	// Under node.mu:
	ports     []uint16 // sorted
	steering  *bpf.Steering
	sockets   []socket
	listeners []net.Listener
	addresses []netip.Addr    // of the pod, without loopback
	cgroups   map[uint64]bool // of the application's listeners
	direct    time.Time       // until when connections may have been made directly; zero: they have ended
	searched  time.Time       // when direct connections were looked for last
}

// socket is a listener of the agent in the pod's network namespace.
type socket struct {
	*net.TCPListener
	family bpf.Family
	cookie uint64
}

// end is a port of one family.
type end struct {
	port   uint16
	family bpf.Family
}

func (p *Pod) open(files []*os.File) error {
	sockets, err := p.listen(listener.Received(files, p.netns))
	if err != nil {
		return err
	}
	for _, l := range sockets {
		s := socket{TCPListener: l, family: familyOf(l.Addr().(*net.TCPAddr).AddrPort().Addr())}
		p.sockets = append(p.sockets, s)
		p.listeners = append(p.listeners, steered{l})
	}
	for i := range p.sockets {
		if err := p.sockets[i].identify(); err != nil {
			return err
		}
	}
	if p.steering, err = p.node.inbound.Steer(p.uid, p.netns); err != nil {
		return err
	}
	if err := errors.Join(p.claim(), p.refresh()); err != nil {
		return errors.Join(err, p.steering.Remove())
	}
	p.noteDirect() // the agent before may not have ended all
	return nil
}

// listen opens the listeners, at none of the application's ports: a port that the kernel
// chooses may be one before the application listens.
func (p *Pod) listen(given map[netip.Addr]*net.TCPListener) ([]*net.TCPListener, error) {
	var taken [][]*net.TCPListener
	defer func() {
		for _, sockets := range taken {
			for _, l := range sockets {
				_ = l.Close()
			}
		}
	}()
	for {
		sockets, err := listener.Open(p.netns, 0, given)
		if err != nil || !slices.Contains(p.ports, listener.Port(sockets[0])) {
			return sockets, err
		}
		taken, given = append(taken, sockets), nil
	}
}

func familyOf(a netip.Addr) bpf.Family {
	if a.Is4() {
		return bpf.IPv4
	}
	return bpf.IPv6
}

// identify reads the number by which the kernel identifies the socket.
func (s *socket) identify() error {
	return descriptor.Control(s, func(fd int) (err error) {
		s.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		return failure.Wrap(os.NewSyscallError("getsockopt", err), "identifying a listener")
	})
}

// claim makes this agent the one that steers the pod.
func (p *Pod) claim() error {
	for _, s := range p.sockets {
		if err := p.steering.Set(bpf.Owner, s.family, s.TCPListener); err != nil {
			return err
		}
	}
	return nil
}

// check restores what was removed from outside, and refreshes the ports.
func (p *Pod) check() error {
	if lost := p.steering.Check(); lost != nil {
		again, err := p.node.inbound.Steer(p.uid, p.netns)
		if err != nil {
			return errors.Join(lost, err)
		}
		_ = p.steering.Close()
		p.steering = again
		p.node.log.Warn("restored the steering of inbound connections", "pod", p.uid, "reason", lost)
	}
	return p.refresh()
}

// refresh steers the ports at which the application listens. Those of another agent that
// took over stay.
func (p *Pod) refresh() error {
	listening, err := p.applications()
	if err != nil {
		return err
	}
	for _, s := range p.sockets {
		owner, err := p.steering.Listener(bpf.Owner, s.family)
		if err != nil {
			return err
		}
		switch owner {
		case s.cookie:
		case 0: // the one that took over has exited
			err = p.steering.Set(bpf.Owner, s.family, s.TCPListener)
		default:
			continue
		}
		if err = errors.Join(err, p.refreshPorts(s, listening)); err != nil {
			return err
		}
	}
	return nil
}

func (p *Pod) refreshPorts(s socket, listening map[end]bool) error {
	for _, port := range p.ports {
		now, err := p.steering.Listener(port, s.family)
		switch wanted := listening[end{port, s.family}]; {
		case err != nil:
		case wanted && now != s.cookie:
			if err = p.steering.Set(port, s.family, s.TCPListener); err == nil {
				p.noteDirect()
			}
		case !wanted && now != 0:
			err = p.steering.Delete(port, s.family)
		}
		if err != nil {
			return err
		}
	}
	steered, err := p.steering.Ports(s.family)
	for _, port := range steered {
		if !slices.Contains(p.ports, port) {
			err = errors.Join(err, p.steering.Delete(port, s.family))
		}
	}
	return err
}

// applications returns where the application listens, at an address that can be reached
// from outside.
func (p *Pod) applications() (map[end]bool, error) {
	found := map[end]bool{}
	p.cgroups = map[uint64]bool{}
	if len(p.ports) == 0 {
		return found, nil
	}
	if err := p.find(found); err != nil {
		return nil, err
	}
	if len(found) == len(p.ports)*len(p.sockets) {
		return found, nil
	}
	// It may listen at an address that the pod got later.
	all, err := netns.Addresses(p.netns)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, netip.Addr.IsLoopback)
	if slices.Equal(all, p.addresses) {
		return found, nil
	}
	p.addresses = all
	return found, p.find(found)
}

// find asks the kernel for sockets that listen at an address of the pod. The program does
// not steer a connection from an address to itself, so it is not the agent's that is found.
func (p *Pod) find(found map[end]bool) error {
	return netns.Do(p.netns, func() error {
		for _, a := range p.addresses {
			for _, port := range p.ports {
				at := end{port, familyOf(a)}
				if found[at] {
					continue
				}
				listening, err := sockdiag.Find(netip.AddrPortFrom(a, port), netip.AddrPortFrom(a, 0))
				switch {
				case err == nil:
					found[at] = true
					p.cgroups[listening.Cgroup] = true
				case !errors.Is(err, unix.ENOENT):
					return fmt.Errorf("looking for the application's listener at port %d: %w", port, err)
				}
			}
		}
		return nil
	})
}

// Listeners returns where the connections arrive. The local address of an accepted
// connection is the one that the client connected to. The caller accepts from them;
// [Pod.Release] and [Node.Close] close them.
func (p *Pod) Listeners() []net.Listener { return p.listeners }

// SetPorts replaces the ports. Without ports, all connections reach the application, and the
// listeners stay open: those that arrived before can still be accepted.
func (p *Pod) SetPorts(ports []uint16) error {
	ports, err := portSet(ports)
	if err != nil {
		return fmt.Errorf("capturing inbound connections of pod %s: %w", p.uid, err)
	}
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	return failure.Wrap(p.setPorts(ports), "capturing inbound connections of pod %s", p.uid)
}

func (p *Pod) setPorts(ports []uint16) error {
	if !p.isCurrent() {
		return fmt.Errorf("this agent does not capture it any more: %w", os.ErrClosed)
	}
	if own := listener.Port(p.sockets[0].TCPListener); slices.Contains(ports, own) {
		return fmt.Errorf("port %d is that of the agent's own listener: restart the pod", own)
	}
	p.ports = ports
	return p.refresh()
}

// isCurrent reports, under node.mu, whether this agent captures the pod.
func (p *Pod) isCurrent() bool { return p.node.pods[p.uid] == p }

// Files returns copies of the listeners for the next agent. The caller closes the files
// once they were sent.
func (p *Pod) Files() ([]*os.File, error) {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	sockets := make([]*net.TCPListener, len(p.sockets))
	for i, s := range p.sockets {
		sockets[i] = s.TCPListener
	}
	files, err := listener.Duplicates(sockets)
	if err != nil {
		closeFiles(files)
		return nil, fmt.Errorf("copying the listeners of pod %s: %w", p.uid, err)
	}
	return files, nil
}

// Abandon leaves the pod to the agent that took it over: it closes this agent's copies of
// the listeners, and the steering stays.
func (p *Pod) Abandon() error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if !p.isCurrent() {
		return nil
	}
	delete(p.node.pods, p.uid)
	return failure.Wrap(p.close(), "abandoning inbound connections of pod %s", p.uid)
}

// Release ends the capture: connections reach the application, and the listeners are closed.
// The steering of another agent that took over stays. Connections that were not accepted are
// reset, so the caller should call SetPorts without ports first, and accept for a moment.
func (p *Pod) Release() error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if !p.isCurrent() {
		return nil
	}
	return p.release()
}

func (p *Pod) release() error {
	delete(p.node.pods, p.uid)
	err := p.remove()
	return failure.Wrap(errors.Join(err, p.close()), "releasing inbound connections of pod %s", p.uid)
}

// remove ends the steering, unless it is another agent's.
func (p *Pod) remove() error {
	for _, s := range p.sockets {
		owner, err := p.steering.Listener(bpf.Owner, s.family)
		if err != nil || owner != 0 && owner != s.cookie {
			return err
		}
	}
	return p.steering.Remove()
}

// close closes what this process has open.
func (p *Pod) close() error {
	errs := []error{p.netns.Close()}
	for _, s := range p.sockets {
		if err := s.Close(); !errors.Is(err, net.ErrClosed) { // its user may have closed it
			errs = append(errs, failure.Wrap(err, "closing listener"))
		}
	}
	if p.steering != nil {
		errs = append(errs, p.steering.Close())
	}
	return errors.Join(errs...)
}

// steered is a listener for the connections that are steered.
type steered struct{ *net.TCPListener }

// Accept waits for the next connection that was steered. It closes those that were made to
// the listener itself.
func (l steered) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptTCP()
		if err != nil {
			return nil, err
		}
		if conn.LocalAddr().(*net.TCPAddr).Port != int(listener.Port(l.TCPListener)) {
			return conn, nil
		}
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
}
