// Package address captures pods that were created with the address of their node's agent
// for that of the apiserver. It redirects nothing: pods are identified by their addresses.
package address

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
)

// Backend accepts the connections of all pods at the agent's own address, and queues each
// for its pod.
type Backend struct {
	redirect.Nothing
	listener net.Listener
	refused  func(peer netip.Addr, full bool)
	done     chan struct{} // closed when accept has returned

	mu     sync.Mutex
	pods   map[uuid.UUID]*Pod
	byAddr map[netip.Addr]*Pod
}

// Listen opens the listener. refused is called for each connection that is closed, because
// the queue of its pod is full, or else because no pod has the peer's address.
func Listen(at string, refused func(peer netip.Addr, full bool)) (*Backend, error) {
	if at == "" {
		return nil, errors.New("no address to listen on is configured")
	}
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	l, err := config.Listen(context.Background(), "tcp", at)
	if err != nil {
		return nil, fmt.Errorf("listening for the pods captured by address: %w", err)
	}
	b := &Backend{listener: l, refused: refused, done: make(chan struct{}), pods: map[uuid.UUID]*Pod{}, byAddr: map[netip.Addr]*Pod{}}
	go b.accept()
	return b, nil
}

// accept gives each connection to its pod. It waits for no pod.
func (b *Backend) accept() {
	defer close(b.done)
	const pause = 10 * time.Millisecond
	for {
		conn, err := b.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, most likely
			time.Sleep(pause)
			continue
		}
		peer := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().WithZone("")
		b.mu.Lock()
		p := b.byAddr[peer]
		b.mu.Unlock()
		if p != nil && p.push(conn) {
			continue
		}
		b.refused(peer, p != nil)
		_ = conn.Close()
	}
}

// HostNetwork returns why pods under hostNetwork cannot be captured.
func (b *Backend) HostNetwork() error {
	return errors.New("under hostNetwork the pod has the node's address")
}

// Left returns nothing, because nothing is redirected.
func (b *Backend) Left(context.Context, redirect.Pod) (l redirect.Left) { return l }

// Egress returns why connections to other hosts cannot be redirected.
func (b *Backend) Egress() error {
	return errors.New("the pod is captured by address, which redirects nothing: only its connections to the apiserver reach the agent. Use capture mode ebpf or iptables")
}

// Origin fails.
func (b *Backend) Origin(uint64, *net.TCPConn, netip.AddrPort, netip.AddrPort) (netip.AddrPort, error) {
	return netip.AddrPort{}, b.Egress()
}

// SetDestinations does nothing.
func (b *Backend) SetDestinations([]netip.AddrPort, []redirect.Pod) (redirect.Failed, error) {
	return nil, nil
}

// Check finds nothing.
func (b *Backend) Check([]redirect.Pod) (redirect.Failed, error) { return nil, nil }

// Close closes the listener.
func (b *Backend) Close([]redirect.Pod) error {
	err := b.listener.Close()
	<-b.done
	return err
}

// Apply identifies the pod by its addresses again.
func (b *Backend) Apply(_ context.Context, p redirect.Pod) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if pod := b.pods[p.UID]; pod != nil {
		return pod.identify(pod.addresses, pod.given)
	}
	return nil
}

// Release ends the capture of a pod, unless the pod has another network namespace by now.
func (b *Backend) Release(p redirect.Pod) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if pod := b.pods[p.UID]; pod != nil && pod.netns == p.NetNS {
		pod.forget()
		delete(b.pods, p.UID)
	}
	return nil
}

// Open captures a pod by these addresses, or else by those in its network namespace.
func (b *Backend) Open(uid uuid.UUID, namespace *os.File, addresses []netip.Addr) (*Pod, error) {
	given := len(addresses) > 0
	if !given {
		var err error
		if addresses, err = addressesOf(namespace); err != nil {
			return nil, err
		}
	}
	p := &Pod{backend: b, uid: uid, netns: namespace, at: b.listener.Addr(), conns: make(chan net.Conn, queueLength)}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := p.identify(addresses, given); err != nil {
		return nil, err
	}
	if earlier := b.pods[uid]; earlier != nil {
		earlier.forget()
	}
	b.pods[uid] = p
	return p, nil
}

// addressesOf returns the first address of each family in a network namespace by which
// others can identify it.
func addressesOf(namespace *os.File) (addresses []netip.Addr, err error) {
	all, err := netns.Addresses(namespace)
	for _, v4 := range []bool{true, false} {
		if i := slices.IndexFunc(all, func(a netip.Addr) bool { return a.Is4() == v4 && a.IsGlobalUnicast() }); i >= 0 {
			addresses = append(addresses, all[i])
		}
	}
	if err == nil && len(addresses) == 0 {
		err = errors.New("the pod has no address yet")
	}
	return addresses, err
}
