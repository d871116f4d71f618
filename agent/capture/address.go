package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// queueLength is how many of a pod's connections wait to be accepted.
const queueLength = 128

// address redirects nothing. Pods connect to the agent's own address, and are
// told apart by theirs.
type address struct {
	listener net.Listener
	refused  func(netip.Addr, Refusal)
	done     chan struct{} // closed when nothing is accepted any more

	mu   sync.Mutex
	pods map[netip.Addr]*Pod
}

func openAddress(cfg Config) (redirector, error) {
	if cfg.Address == "" {
		return nil, errors.New("it takes an address to listen on")
	}
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	l, err := config.Listen(context.Background(), "tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("listen for the pods captured by address: %w", err)
	}
	a := &address{listener: l, refused: cfg.Refused, done: make(chan struct{}), pods: map[netip.Addr]*Pod{}}
	if a.refused == nil {
		a.refused = func(netip.Addr, Refusal) {}
	}
	go a.accept()
	return a, nil
}

// accept gives each connection to its pod, and waits for none.
func (a *address) accept() {
	defer close(a.done)
	const pause = 10 * time.Millisecond
	for {
		conn, err := a.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors left, or the like: it passes
			time.Sleep(pause)
			continue
		}
		peer := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().WithZone("")
		a.mu.Lock()
		p := a.pods[peer]
		a.mu.Unlock()
		switch {
		case p == nil:
			a.refused(peer, Stranger)
		case !p.queue.push(conn):
			a.refused(peer, QueueFull)
		default:
			continue
		}
		_ = conn.Close()
	}
}

func (a *address) mode() Mode { return Address }

func (a *address) slow() bool { return false }

func (a *address) hostNetwork() error {
	return errors.New("under hostNetwork the pod has the node's address")
}

func (a *address) last(*Pod) (uint16, *egress) { return 0, nil }

func (a *address) canEgress() error {
	return errors.New("the pod is captured by address, which redirects nothing: only what it sends to the apiserver comes to the agent. Let it be captured by eBPF or iptables")
}

func (a *address) origin(*Pod, *net.TCPConn) (netip.AddrPort, error) {
	return netip.AddrPort{}, a.canEgress()
}

// redirect makes the pod known by its addresses.
func (a *address) redirect(_ context.Context, p *Pod) error {
	if len(p.addresses) > 0 {
		return a.know(p, p.addresses, p.given)
	}
	addresses, err := addressesOf(p.netns)
	if err != nil {
		return err
	}
	if len(addresses) == 0 {
		return errors.New("the pod has no address yet to know it by")
	}
	return a.know(p, addresses, false)
}

// know makes the pod known by addresses. Those that it has itself shown give way
// to those that are given.
func (a *address) know(p *Pod, addresses []netip.Addr, given bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, at := range addresses {
		other := a.pods[at]
		if other == nil || other.uid == p.uid || given && !other.given {
			continue
		}
		if has(other, at) {
			return fmt.Errorf("the pod has the address %s, which pod %s has too: they cannot be told apart", at, other.uid)
		}
	}
	a.forget(p)
	for _, at := range addresses {
		a.pods[at] = p
	}
	p.addresses, p.given = addresses, given
	return nil
}

// has reports whether a pod still has an address: a pod that is gone, but not yet
// released, may have lost it to another.
func has(p *Pod, at netip.Addr) bool {
	return !errors.Is(inNetNS(p.netns, func() error {
		var config net.ListenConfig
		l, err := config.ListenPacket(context.Background(), "udp", netip.AddrPortFrom(at, 0).String())
		if err == nil {
			err = l.Close()
		}
		return err
	}), unix.EADDRNOTAVAIL)
}

// addressesOf are the first addresses, of either family, in a network namespace
// by which others can know it.
func addressesOf(namespace *os.File) ([]netip.Addr, error) {
	handle, err := linksOf(namespace)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	var addresses []netip.Addr
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		found, err := handle.AddrList(nil, family)
		if err != nil {
			return nil, fmt.Errorf("list the pod's addresses: %w", err)
		}
		for _, f := range found {
			if at, ok := netip.AddrFromSlice(f.IP); ok && at.Unmap().IsGlobalUnicast() {
				addresses = append(addresses, at.Unmap())
				break
			}
		}
	}
	return addresses, nil
}

// ownAddresses are all addresses in a network namespace at which something there may
// listen. Those of IPVS, which all Services have on a node, are not its own.
func ownAddresses(namespace *os.File) ([]netip.Addr, error) {
	handle, err := linksOf(namespace)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	found, err := handle.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the pod's addresses: %w", err)
	}
	services := -1
	if ipvs, err := handle.LinkByName("kube-ipvs0"); err == nil {
		services = ipvs.Attrs().Index
	}
	var own []netip.Addr
	for _, f := range found {
		if at, ok := netip.AddrFromSlice(f.IP); ok && f.LinkIndex != services {
			own = append(own, at.Unmap())
		}
	}
	return own, nil
}

// linksOf is for asking about the devices of a network namespace.
func linksOf(namespace *os.File) (handle *netlink.Handle, err error) {
	conn, err := namespace.SyscallConn()
	if err != nil {
		return nil, err
	}
	if cerr := conn.Control(func(fd uintptr) { handle, err = netlink.NewHandleAt(netns.NsHandle(fd), unix.NETLINK_ROUTE) }); cerr != nil {
		return nil, os.ErrClosed
	}
	if err != nil {
		return nil, fmt.Errorf("look for the pod's addresses: %w", err)
	}
	return handle, nil
}

func (a *address) release(p *Pod) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forget(p)
	return nil
}

func (a *address) forget(p *Pod) {
	for at, known := range a.pods {
		if known == p {
			delete(a.pods, at)
		}
	}
}

// setFailOpen has nothing to do: the pod knows no other way than to the agent.
func (a *address) setFailOpen(*Pod) error { return nil }

func (a *address) setDestinations([]netip.AddrPort, []*Pod) error { return nil }

func (a *address) mark(int) error { return nil }

func (a *address) sweep(func(uuid.UUID) bool) error { return nil }

func (a *address) beat() bool { return false }

func (a *address) check([]*Pod) error { return nil }

func (a *address) repair([]netip.AddrPort, []*Pod) error { return nil }

func (a *address) close([]*Pod) error {
	err := a.listener.Close()
	<-a.done
	return err
}

// queue is a listener for the connections of one pod.
type queue struct {
	at    net.Addr
	conns chan net.Conn

	mu     sync.Mutex
	closed chan struct{}
}

func newQueue(at net.Addr) *queue {
	return &queue{at: at, conns: make(chan net.Conn, queueLength), closed: make(chan struct{})}
}

// push reports whether there was room for the connection.
func (q *queue) push(conn net.Conn) bool {
	q.mu.Lock() // or it would come into a queue that nobody empties any more
	defer q.mu.Unlock()
	if q.isClosed() {
		return false
	}
	select {
	case q.conns <- conn:
		return true
	default:
		return false
	}
}

func (q *queue) isClosed() bool {
	select {
	case <-q.closed:
		return true
	default:
		return false
	}
}

// Accept waits for the pod's next connection.
func (q *queue) Accept() (net.Conn, error) {
	select {
	case <-q.closed:
		return nil, net.ErrClosed
	case conn := <-q.conns:
		return conn, nil
	}
}

// Close closes the connections that were not accepted.
func (q *queue) Close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.isClosed() {
		return net.ErrClosed
	}
	close(q.closed)
	for {
		select {
		case conn := <-q.conns:
			_ = conn.Close()
		default:
			return nil
		}
	}
}

// Addr is the agent's own address.
func (q *queue) Addr() net.Addr { return q.at }
