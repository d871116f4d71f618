package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/address"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Pod is one captured pod. It is safe for concurrent use.
type Pod struct {
	node       *node
	redirector redirector
	mode       Mode
	known      redirect.Pod // what redirectors know of it; FailOpen and Stalled under node.mu; no Egress
	identity   *identity    // of a pod under hostNetwork; nil: every connection is the pod's

	// Where its connections arrive:
	sockets   []*net.TCPListener // in its network namespace; none in mode Address
	addressed *address.Pod       // in mode Address
	listeners []net.Listener
	egress    *egress // under node.mu

	status status     // what checks have found
	repair *repairing // under node.mu; nil: none
}

// target returns, under node.mu, what a redirector must know of the pod, with its egress.
func (p *Pod) target() redirect.Pod {
	t := p.known
	if p.egress != nil {
		t.Egress = &p.egress.Egress
	}
	return t
}

// isCurrent reports, under node.mu, whether the pod is captured, and not another agent's.
func (p *Pod) isCurrent() bool { return p.node.pods[p.known.UID.String()] == p }

// Listeners returns where the pod's redirected connections arrive: 127.0.0.1 and, unless
// the kernel has no IPv6, ::1, on the same port; or a queue of those that the pod makes to
// the agent's own address. The caller accepts from them; [Pod.Release] and [Backend.Close]
// close them.
//
// A connection accepted here, like one made by [Pod.DialContext], keeps the pod's network
// namespace alive until it is closed.
func (p *Pod) Listeners() []net.Listener { return p.listeners }

// Release ends the capture. It closes the listeners, the redirection and the network
// namespace. A redirection that another agent has taken over stays, also that of a pod that
// was abandoned.
func (p *Pod) Release() error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if !p.isCurrent() {
		_ = p.closeNamespace()
		return nil
	}
	delete(p.node.pods, p.known.UID.String())
	p.stopRepair()
	err := errors.Join(p.closeListeners(), p.redirector.Release(p.target()), p.closeNamespace())
	return failure.Wrap(err, "releasing pod %s", p.known.UID)
}

// Addresses returns the addresses that identify the pod, if it is captured by Address.
func (p *Pod) Addresses() []netip.Addr {
	if p.addressed == nil {
		return nil
	}
	return p.addressed.Addresses()
}

// SetAddresses replaces the addresses that identify the pod by those that the API lists.
func (p *Pod) SetAddresses(addresses []netip.Addr) error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if p.addressed == nil || !p.isCurrent() {
		return nil
	}
	return p.addressed.SetAddresses(addresses)
}

// NetNS returns a path of the pod's network namespace that is valid until [Pod.Release].
func (p *Pod) NetNS() string { return fmt.Sprintf("/proc/self/fd/%d", p.known.NetNS.Fd()) }

// Mode returns the mode that the pod was captured by.
func (p *Pod) Mode() Mode { return p.mode }

// SetFailOpen changes whether the pod's connections go direct while no agent serves it.
func (p *Pod) SetFailOpen(open bool) error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if p.known.FailOpen == open {
		return nil
	}
	p.known.FailOpen = open
	if !p.isCurrent() {
		return nil
	}
	return failure.Wrap(p.updateHook(), "setting the failure policy of pod %s", p.known.UID)
}

// updateHook applies FailOpen and Stalled. Only the hook distinguishes them.
func (p *Pod) updateHook() error {
	if p.mode != EBPF {
		return nil
	}
	return p.redirector.Apply(context.Background(), p.target())
}

// Files returns copies of the listeners for the next agent. The caller closes the files
// once they were sent.
func (p *Pod) Files() (*Files, error) {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	f := &Files{}
	var err error
	if f.Listeners, err = listener.Duplicates(p.sockets); err == nil && p.egress != nil {
		f.Egress, err = listener.Duplicates(p.egress.sockets)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("copying the listeners of pod %s: %w", p.known.UID, err)
	}
	return f, nil
}

// Abandon leaves the pod to the agent that took it over: it closes this agent's listeners,
// and the redirection stays. Connections that were accepted before can still be served:
// [Pod.DialContext] works until [Pod.Release], which then only closes the network namespace.
// Abandon must precede [Backend.Close]. A pod captured by Address should be abandoned last,
// because its connections to this agent's own address are closed from then on.
func (p *Pod) Abandon() error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if p.isCurrent() {
		delete(p.node.pods, p.known.UID.String())
	}
	p.stopRepair()
	return failure.Wrap(p.closeListeners(), "abandoning pod %s", p.known.UID)
}

// open opens the listeners, or uses those that an earlier agent passes on, and redirects the
// pod to them.
func (p *Pod) open(r Request) error {
	if err := netns.Do(p.known.NetNS, func() (err error) {
		if p.known.Cookie, err = netns.Cookie(); p.mode != EBPF {
			return nil // only the hook needs it
		}
		return err
	}); err != nil {
		return err
	}
	if b, ok := p.redirector.(*address.Backend); ok {
		if err := p.node.forgetOthers(p); err != nil {
			return err
		}
		var err error
		if p.addressed, err = b.Open(p.known.UID, p.known.NetNS, r.Addresses); err == nil {
			p.listeners = []net.Listener{watched{p.addressed, p}}
		}
		return err
	}
	return p.openSockets(r)
}

// openSockets is open for a pod that is redirected to sockets in its network namespace.
func (p *Pod) openSockets(r Request) error {
	ctx, cancel := context.WithTimeout(context.Background(), iptables.Timeout)
	defer cancel()
	if p.mode == IPTables {
		p.known.Rules, _ = netns.OpenRules(p.known.NetNS) // without them it is probed in each rotation
	}
	left := p.left(ctx)
	given, givenEgress := r.Files.listeners(p.known.NetNS)
	var err error
	if p.sockets, err = listener.Open(p.known.NetNS, left.Port, given); err != nil {
		return err
	}
	p.known.Port = listener.Port(p.sockets[0])
	for _, l := range p.sockets {
		p.listeners = append(p.listeners, watched{l, p})
	}
	p.inheritEgress(left.Egress, r.Egress, givenEgress)
	err = p.redirect(ctx, left)
	if err != nil && left.Egress == nil && p.egress != nil { // capture the pod without egress
		_ = closeAll(p.egress.listeners)
		p.egress = nil
		err = p.redirect(ctx, p.left(ctx))
	}
	if err != nil {
		return err
	}
	if err := p.node.forgetOthers(p); err != nil {
		return err
	}
	// There are no direct connections if an agent redirected the pod until now, or if the
	// pod's connections were refused since that agent died.
	if len(given) == 0 && (left.Port == 0 || p.known.FailOpen) {
		p.status.direct = p.node.destroyDirect(p.node.destinations, p.egress.allPorts(), p)
	}
	return nil
}

// left returns how the pod is redirected now, by this agent or an earlier one.
func (p *Pod) left(ctx context.Context) redirect.Left { return p.redirector.Left(ctx, p.target()) }

// redirect applies the redirection, except for what is left and looks right: if it only looks so,
// the first probe shows that. A pod that makes redirect fail slowly is left to the repair, so that
// it does not delay the others again and again.
func (p *Pod) redirect(ctx context.Context, left redirect.Left) error {
	start := time.Now()
	target := p.target()
	target.Left = &left
	err := p.redirector.Apply(ctx, target)
	if err != nil && p.mode == IPTables && time.Since(start) > slowAfter {
		p.setDamage(err)
		return nil
	}
	return err
}

func (p *Pod) closeListeners() error {
	err := closeAll(p.listeners)
	if p.egress != nil {
		err = errors.Join(err, closeAll(p.egress.listeners))
	}
	return err
}

func closeAll(listeners []net.Listener) error {
	var errs []error
	for _, l := range listeners {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) { // its user may have closed it
			errs = append(errs, failure.Wrap(err, "closing listener"))
		}
	}
	return errors.Join(errs...)
}

func (p *Pod) closeFiles() error {
	p.stopRepair()
	return errors.Join(p.closeListeners(), p.closeNamespace())
}

func (p *Pod) closeNamespace() error {
	p.known.Rules.Close()
	return p.known.NetNS.Close()
}
