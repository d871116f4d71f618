package address

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
)

// queueLength is how many connections of a pod may wait to be accepted.
const queueLength = 128

// Pod is a pod that is identified by its addresses, and the listener for its connections.
type Pod struct {
	backend *Backend
	uid     uuid.UUID
	netns   *os.File
	at      net.Addr

	// Under backend.mu:
	addresses []netip.Addr
	given     bool // the API or the runtime has named them

	mu     sync.Mutex
	conns  chan net.Conn
	closed bool
}

// Addresses returns the addresses that identify the pod.
func (p *Pod) Addresses() []netip.Addr {
	p.backend.mu.Lock()
	defer p.backend.mu.Unlock()
	return p.addresses
}

// SetAddresses replaces the addresses that identify the pod by those that the API lists.
func (p *Pod) SetAddresses(addresses []netip.Addr) error {
	p.backend.mu.Lock()
	defer p.backend.mu.Unlock()
	return p.identify(addresses, true)
}

// identify identifies the pod by addresses, under backend.mu. If two pods have an address,
// the one whose addresses were given gets it.
func (p *Pod) identify(addresses []netip.Addr, given bool) error {
	for _, at := range addresses {
		other := p.backend.byAddr[at]
		if other == nil || other.uid == p.uid || given && !other.given {
			continue
		}
		if other.has(at) {
			return fmt.Errorf("the pod has the address %s, and so has pod %s: they cannot be distinguished", at, other.uid)
		}
	}
	p.forget()
	for _, at := range addresses {
		p.backend.byAddr[at] = p
	}
	p.addresses, p.given = addresses, given
	return nil
}

// forget drops the addresses of the pod, under backend.mu.
func (p *Pod) forget() {
	for at, pod := range p.backend.byAddr {
		if pod == p {
			delete(p.backend.byAddr, at)
		}
	}
}

// has reports whether the pod still has an address. A deleted pod that is not released yet
// may have lost it to another.
func (p *Pod) has(at netip.Addr) bool {
	return !errors.Is(netns.Do(p.netns, func() error {
		var config net.ListenConfig
		l, err := config.ListenPacket(context.Background(), "udp", netip.AddrPortFrom(at, 0).String())
		if err == nil {
			err = l.Close()
		}
		return err
	}), unix.EADDRNOTAVAIL)
}

// push queues a connection. It reports false if the queue is full or closed.
func (p *Pod) push(conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	select {
	case p.conns <- conn:
		return true
	default:
		return false
	}
}

// Waiting reports whether a connection waits to be accepted.
func (p *Pod) Waiting() bool { return len(p.conns) > 0 }

// Accept waits for the pod's next connection.
func (p *Pod) Accept() (net.Conn, error) {
	if conn, ok := <-p.conns; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}

// Close closes the listener, and the connections that were not accepted.
func (p *Pod) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return net.ErrClosed
	}
	p.closed = true
	close(p.conns)
	for conn := range p.conns {
		_ = conn.Close()
	}
	return nil
}

// Addr returns the agent's own address.
func (p *Pod) Addr() net.Addr { return p.at }
