package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
)

// MaxEgressPorts bounds the ports of one pod, for those of all pods of a node must find room
// together.
const MaxEgressPorts = 64

// egress is the redirection of a pod's connections to others than the apiserver.
type egress struct {
	ports     []uint16 // sorted
	port      uint16   // of the sockets
	sockets   []*net.TCPListener
	listeners []net.Listener // as they are served
}

// SetEgress redirects the pod's other connections to these TCP ports, at whatever
// address, but for its own and loopback. It returns where they come in: what is accepted
// there has a method To that tells where the pod meant to connect. The listeners are
// the same as long as there are ports. What the pod sends to these ports by UDP is
// refused. What it had connected to a port that is new, it is made to connect again.
//
// Without ports all of it goes direct again, at once, and the listeners are closed. If
// that fails, they are closed all the same, and it is to be said again.
// Until it is first said, what an earlier agent redirected stays so: refused, unless
// its listeners were handed over.
func (p *Pod) SetEgress(ports []uint16) ([]net.Listener, error) {
	ports = portSet(ports)
	if len(ports) > MaxEgressPorts {
		return nil, fmt.Errorf("redirect other connections of pod %s: %d ports are more than the %d that a pod may have: list fewer in spec.egress.ports", p.uid, len(ports), MaxEgressPorts)
	}
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	listeners, err := p.setEgress(ports)
	if err != nil {
		return nil, fmt.Errorf("redirect other connections of pod %s: %w", p.uid, err)
	}
	return listeners, nil
}

func portSet(ports []uint16) []uint16 { return slices.Compact(slices.Sorted(slices.Values(ports))) }

func (p *Pod) setEgress(ports []uint16) ([]net.Listener, error) {
	before := p.egress
	switch {
	case p.node.pods[p.uid.String()] != p:
		return nil, fmt.Errorf("it is captured no longer, or by another agent: %w", os.ErrClosed)
	case len(ports) == 0:
		return nil, p.endEgress()
	case ports[0] == 0:
		return nil, errors.New("0 is no port")
	case before != nil && len(before.sockets) > 0 && slices.Equal(before.ports, ports):
		return before.listeners, nil
	}
	if err := p.redirector.canEgress(); err != nil {
		return nil, err
	}
	p.stopMending() // it would make the redirection of before
	next, err := p.replaceEgress(before, ports)
	if err != nil {
		return nil, err
	}
	added := slices.DeleteFunc(slices.Clone(ports), func(port uint16) bool {
		return before != nil && slices.Contains(before.ports, port)
	})
	for tries := 16; tries > 0 && len(added) > 0 && p.node.destroyDirect(nil, added, p); tries-- {
	}
	return next.listeners, nil
}

// replaceEgress redirects to listeners for these ports. After an error, what was redirected
// before still is.
func (p *Pod) replaceEgress(before *egress, ports []uint16) (*egress, error) {
	next := &egress{ports: ports}
	if before != nil {
		next.port, next.sockets, next.listeners = before.port, before.sockets, before.listeners
	}
	if err := p.listenEgress(next, nil); err != nil {
		return nil, err
	}
	p.egress = next
	err := p.redirect()
	if err == nil {
		return next, nil
	}
	p.egress = before
	if before == nil || len(before.sockets) == 0 {
		_ = closeAll(next.listeners)
	}
	// Some of what is in force by now may lead to a port that nobody listens on.
	return nil, errors.Join(err, p.redirector.redirect(context.Background(), p))
}

// listenEgress opens the listeners, unless they are.
func (p *Pod) listenEgress(e *egress, given map[netip.Addr]*net.TCPListener) error {
	if len(e.sockets) > 0 {
		return nil
	}
	if err := inNetNS(p.netns, func() (err error) {
		e.sockets, err = listen(e.port, given)
		return err
	}); err != nil {
		return err
	}
	e.port = portOf(e.sockets[0])
	for _, l := range e.sockets {
		e.listeners = append(e.listeners, redirected{l, p})
	}
	return nil
}

func (p *Pod) endEgress() error {
	before := p.egress
	if before == nil {
		return nil
	}
	p.stopMending()
	p.egress = nil
	err := p.redirect()
	if err != nil {
		p.egress = &egress{ports: before.ports, port: before.port} // some of it may be redirected still
	}
	return errors.Join(err, closeAll(before.listeners))
}

// inheritEgress keeps what an earlier agent redirected as it is. If that was in another
// way, or nothing, these ports are redirected at once: connections wait for SetEgress.
func (p *Pod) inheritEgress(earlier *egress, ports []uint16, given map[netip.Addr]*net.TCPListener) {
	ports = portSet(ports)
	switch {
	case p.redirector.canEgress() != nil:
	case earlier != nil:
		p.egress = earlier
		if len(given) > 0 && p.listenEgress(earlier, given) == nil {
			return
		}
		earlier.sockets, earlier.listeners = nil, nil
	case len(ports) > 0 && ports[0] > 0 && len(ports) <= MaxEgressPorts:
		e := &egress{ports: ports}
		if p.listenEgress(e, given) == nil {
			p.egress = e
			return
		}
	}
	for _, l := range given {
		l.Close()
	}
}

// rules returns the egress as iptables has it.
func (e *egress) rules() *iptables.Egress {
	if e == nil {
		return nil
	}
	return &iptables.Egress{Ports: e.ports, Port: e.port}
}

// allPorts are the redirected ports, none without egress.
func (e *egress) allPorts() []uint16 {
	if e == nil {
		return nil
	}
	return e.ports
}

// redirected is a listener for the connections that went elsewhere.
type redirected struct {
	*net.TCPListener
	pod *Pod
}

// Accept waits for the next connection of which it is known where it was to go. What
// was made to the listener itself is none.
func (l redirected) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptTCP()
		if err != nil {
			return nil, err
		}
		to, err := l.pod.redirector.origin(l.pod, conn)
		if err == nil && to.IsValid() {
			return toElsewhere{conn, to}, nil
		}
		if err != nil {
			l.pod.node.cfg.Logger.Warn("a redirected connection is closed, for it is not known where it was to go", "pod", l.pod.uid, "error", err)
		}
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
}

// toElsewhere is a connection that was redirected.
type toElsewhere struct {
	*net.TCPConn
	to netip.AddrPort
}

// To is where the pod meant to connect.
func (c toElsewhere) To() netip.AddrPort { return c.to }

// NetConn is the connection as such, which the kernel can copy from.
func (c toElsewhere) NetConn() net.Conn { return c.TCPConn }

// ends are a connection's, as the kernel knows them.
func ends(conn *net.TCPConn) (near, far netip.AddrPort) {
	near, far = conn.LocalAddr().(*net.TCPAddr).AddrPort(), conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(near.Addr().Unmap(), near.Port()), netip.AddrPortFrom(far.Addr().Unmap(), far.Port())
}
