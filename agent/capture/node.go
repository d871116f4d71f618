package capture

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"github.com/google/uuid"
)

// redirector is what the ways of capture differ in.
type redirector interface {
	mode() Mode
	// lastPort is the port to listen on if it can be had: an earlier agent's, or 0.
	lastPort(p *Pod) uint16
	// redirect points the pod at its listeners. What pointed it elsewhere is in force until then.
	redirect(p *Pod) error
	// release ends the redirection, unless another agent has made it its own since.
	release(p *Pod) error
	// setDestinations changes them for these pods and all that are redirected later.
	setDestinations(destinations []netip.AddrPort, pods []*Pod) error
	// mark lets a socket pass that has yet to connect.
	mark(fd int) error
	// sweep forgets what earlier agents left of pods that are gone.
	sweep(keep func(uid uuid.UUID) bool) error
	close() error
}

// node is the Method: the pods that are captured, and how.
type node struct {
	redirector redirector

	mu     sync.Mutex
	pods   map[string]*Pod // by uid
	ready  bool            // destinations have been set
	closed bool
}

func (n *node) Modes() []Mode { return []Mode{n.redirector.mode()} }

func (n *node) HostNetwork() error { return errors.ErrUnsupported }

func (n *node) Check(context.Context) []Loss { return nil }

func (n *node) SetDestinations(destinations, agents []netip.AddrPort) error {
	set, err := destinationSet(destinations)
	if err != nil {
		return fmt.Errorf("set destinations: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return fmt.Errorf("set destinations: %w", os.ErrClosed)
	}
	pods := make([]*Pod, 0, len(n.pods))
	for _, p := range n.pods {
		pods = append(pods, p)
	}
	n.ready = true
	if err := n.redirector.setDestinations(set, pods); err != nil {
		return fmt.Errorf("set destinations: %w", err)
	}
	return nil
}

// destinationSet is destinations without doubles, IPv4 addresses as such.
func destinationSet(destinations []netip.AddrPort) ([]netip.AddrPort, error) {
	if len(destinations) == 0 {
		return nil, errors.New("an empty set would let every captured pod go direct")
	}
	seen := map[netip.AddrPort]bool{}
	var set []netip.AddrPort
	for _, d := range destinations {
		d = netip.AddrPortFrom(d.Addr().Unmap(), d.Port())
		if !d.IsValid() || d.Port() == 0 || d.Addr().IsUnspecified() || d.Addr().Zone() != "" {
			return nil, fmt.Errorf("not the address of a server: %s", d)
		}
		if !seen[d] {
			seen[d] = true
			set = append(set, d)
		}
	}
	return set, nil
}

func (n *node) Capture(r Request) (*Pod, error) {
	p, err := n.capture(r.UID, r.NetNS)
	if err != nil {
		return nil, fmt.Errorf("capture pod %s: %w", r.UID, err)
	}
	return p, nil
}

func (n *node) capture(uid string, netnsPath string) (*Pod, error) {
	id, err := uuid.Parse(uid)
	if err != nil || id.String() != uid {
		return nil, errors.New("its uid is not a UUID")
	}
	netns, err := openNetNS(netnsPath)
	if err != nil {
		return nil, err
	}

	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		netns.Close()
		return nil, os.ErrClosed
	}
	if !n.ready {
		netns.Close()
		return nil, errors.New("no destinations have been set")
	}
	earlier := n.pods[uid]
	if earlier != nil && sameFile(earlier.netns, netns) {
		netns.Close()
		return earlier, nil
	}

	p := &Pod{uid: id, netns: netns, node: n}
	if err := p.open(n.redirector); err != nil {
		return nil, errors.Join(err, p.closeFiles())
	}
	n.pods[uid] = p
	if earlier != nil {
		// The sandbox was made anew. The old one is gone, whatever it says.
		_ = n.redirector.release(earlier)
		_ = earlier.closeFiles()
	}
	return p, nil
}

// release is Pod.Release. A pod that is no longer the node's is released already, or stays redirected.
func (n *node) release(p *Pod) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.pods[p.uid.String()] != p {
		return nil
	}
	delete(n.pods, p.uid.String())
	if err := errors.Join(p.closeListeners(), n.redirector.release(p), p.netns.Close()); err != nil {
		return fmt.Errorf("release pod %s: %w", p.uid, err)
	}
	return nil
}

func (n *node) Sweep(keep func(uid string) bool) error {
	n.mu.Lock()
	var gone []*Pod
	for uid, p := range n.pods {
		if !keep(uid) {
			gone = append(gone, p)
		}
	}
	n.mu.Unlock()

	var errs []error
	for _, p := range gone {
		errs = append(errs, n.release(p))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return os.ErrClosed
	}
	errs = append(errs, n.redirector.sweep(func(uid uuid.UUID) bool { return n.pods[uid.String()] != nil || keep(uid.String()) }))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	return nil
}

func (n *node) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	var errs []error
	for uid, p := range n.pods {
		errs = append(errs, p.closeFiles())
		delete(n.pods, uid)
	}
	errs = append(errs, n.redirector.close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close capture: %w", err)
	}
	return nil
}
