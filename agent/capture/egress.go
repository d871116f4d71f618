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
	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// MaxEgressPorts bounds the ports of one pod, because the pods of a node share a table.
const MaxEgressPorts = 64

// egress is the redirection of a pod's connections to other hosts than the apiserver.
type egress struct {
	redirect.Egress
	sockets   []*net.TCPListener
	listeners []net.Listener // as they are served
}

// SetEgress redirects the pod's connections to these TCP ports, at all addresses except
// loopback and the pod's own. It returns where they arrive: an accepted connection has a
// method To, which returns the address that the pod connected to. The listeners are the
// same as long as there are ports. UDP from the pod to these ports is refused. Connections
// to a port that is new are ended, so that the pod connects again.
//
// Without ports the connections go direct again, at once, and the listeners are closed. If
// that fails, they are closed as well, and SetEgress must be called again. Until the first
// call, an earlier agent's redirection stays: connections are refused, unless its listeners
// were passed on.
func (p *Pod) SetEgress(ports []uint16) ([]net.Listener, error) {
	ports = portSet(ports)
	if len(ports) > MaxEgressPorts {
		return nil, fmt.Errorf("redirecting other connections of pod %s: %d ports are more than the limit of %d per pod: list fewer in spec.egress.ports", p.known.UID, len(ports), MaxEgressPorts)
	}
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	listeners, err := p.setEgress(ports)
	return listeners, failure.Wrap(err, "redirecting other connections of pod %s", p.known.UID)
}

func portSet(ports []uint16) []uint16 { return slices.Compact(slices.Sorted(slices.Values(ports))) }

func (p *Pod) setEgress(ports []uint16) ([]net.Listener, error) {
	before := p.egress
	switch {
	case !p.isCurrent():
		return nil, fmt.Errorf("this agent does not capture it any more: %w", os.ErrClosed)
	case len(ports) == 0:
		return nil, p.endEgress()
	case ports[0] == 0:
		return nil, errors.New("invalid port 0")
	case before != nil && len(before.sockets) > 0 && slices.Equal(before.Ports, ports):
		return before.listeners, nil
	}
	if err := p.redirector.Egress(); err != nil {
		return nil, err
	}
	p.stopRepair() // it would restore the earlier redirection
	next, err := p.replaceEgress(before, ports)
	if err != nil {
		return nil, err
	}
	added := slices.DeleteFunc(slices.Clone(ports), func(port uint16) bool {
		return slices.Contains(before.allPorts(), port)
	})
	for tries := 16; tries > 0 && len(added) > 0 && p.node.destroyDirect(nil, added, p); tries-- {
	}
	return next.listeners, nil
}

// replaceEgress redirects to listeners for these ports. After an error, the earlier
// redirection stays.
func (p *Pod) replaceEgress(before *egress, ports []uint16) (*egress, error) {
	next := &egress{}
	if before != nil {
		*next = *before
	}
	next.Ports = ports
	if err := next.listen(p, nil); err != nil {
		return nil, err
	}
	p.egress = next
	ctx, cancel := context.WithTimeout(context.Background(), iptables.Timeout)
	defer cancel()
	err := p.redirect(ctx, p.left(ctx))
	if err == nil {
		return next, nil
	}
	p.egress = before
	if before == nil || len(before.sockets) == 0 {
		_ = closeAll(next.listeners)
	}
	// A part of the new redirection may be in force, and lead to a closed port.
	return nil, errors.Join(err, p.redirector.Apply(ctx, p.target()))
}

// listen opens the listeners, unless they are open.
func (e *egress) listen(p *Pod, given map[netip.Addr]*net.TCPListener) error {
	if len(e.sockets) > 0 {
		return nil
	}
	var err error
	if e.sockets, err = listener.Open(p.known.NetNS, e.Port, given); err != nil {
		return err
	}
	e.Port = listener.Port(e.sockets[0])
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
	p.stopRepair()
	p.egress = nil
	ctx, cancel := context.WithTimeout(context.Background(), iptables.Timeout)
	defer cancel()
	err := p.redirect(ctx, p.left(ctx))
	if err != nil {
		p.egress = &egress{Egress: before.Egress} // a part of it may still be in force
	}
	return errors.Join(err, closeAll(before.listeners))
}

// inheritEgress keeps the redirection of an earlier agent. Without one by this mode, the
// ports are redirected at once, and connections wait for SetEgress.
func (p *Pod) inheritEgress(earlier *redirect.Egress, ports []uint16, given map[netip.Addr]*net.TCPListener) {
	ports = portSet(ports)
	switch {
	case p.redirector.Egress() != nil:
	case earlier != nil:
		p.egress = &egress{Egress: *earlier}
		if len(given) > 0 && p.egress.listen(p, given) == nil {
			return
		}
		p.egress.sockets, p.egress.listeners = nil, nil
	case len(ports) > 0 && ports[0] > 0 && len(ports) <= MaxEgressPorts:
		e := &egress{Egress: redirect.Egress{Ports: ports}}
		if e.listen(p, given) == nil {
			p.egress = e
			return
		}
	}
	for _, l := range given {
		l.Close()
	}
}

// allPorts returns the redirected ports, none without egress.
func (e *egress) allPorts() []uint16 {
	if e == nil {
		return nil
	}
	return e.Ports
}

// redirected is a listener for the connections to other hosts.
type redirected struct {
	*net.TCPListener
	pod *Pod
}

// Accept waits for the next connection that was redirected. It closes those that were made
// to the listener itself.
func (l redirected) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptTCP()
		if err != nil {
			return nil, err
		}
		local, remote := ends(conn)
		to, err := l.pod.redirector.Origin(l.pod.known.Cookie, conn, local, remote)
		if err == nil && to.IsValid() {
			return redirectedConn{conn, to}, nil
		}
		if err != nil {
			l.pod.node.cfg.Logger.Warn("closed a redirected connection whose destination is unknown", "pod", l.pod.known.UID, "error", err)
		}
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
}

// redirectedConn is a connection that was redirected.
type redirectedConn struct {
	*net.TCPConn
	to netip.AddrPort
}

// To returns the address that the pod connected to.
func (c redirectedConn) To() netip.AddrPort { return c.to }

// NetConn returns the connection that the kernel can copy from.
func (c redirectedConn) NetConn() net.Conn { return c.TCPConn }

// ends returns the ends of a connection as the kernel knows them.
func ends(conn *net.TCPConn) (local, remote netip.AddrPort) {
	local, remote = conn.LocalAddr().(*net.TCPAddr).AddrPort(), conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(local.Addr().Unmap(), local.Port()), netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())
}
