package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/google/uuid"
)

// Pod is one captured pod. It is safe for concurrent use.
type Pod struct {
	uid         uuid.UUID
	node        *node
	redirector  redirector
	netns       *os.File
	hostNetwork bool        // netns is the node's
	cgroup      uint64      // 0 if it is unknown; never under hostNetwork
	members     *membership // of hostNetwork; nil: every connection is the pod's

	listening
	addressing

	failOpen bool     // under node.mu
	direct   bool     // it may have connections around the agent; under node.mu
	mending  *mending // under node.mu
	stalled  bool     // its connections are not accepted; under node.mu
	vitals   vitals   // what checks know
}

// listening is where a pod's connections arrive.
type listening struct {
	cookie    uint64             // of the network namespace; 0 if the kernel gives none
	port      uint16             // of all sockets
	sockets   []*net.TCPListener // in the network namespace; none in mode Address
	listeners []net.Listener
	egress    *egress // under node.mu
}

// addressing is what a pod in mode Address is known by.
type addressing struct {
	addresses []netip.Addr // under node.mu
	given     bool         // the API or the runtime has named them; under node.mu
	queue     *queue       // of connections to the agent's own address
}

// Listeners returns where the pod's redirected connections come in: 127.0.0.1
// and, unless the kernel has no IPv6, ::1, on the same port; or what comes to
// the agent's own address from the pod's. They are the caller's to accept from,
// and closed by [Pod.Release] and [Backend.Close].
//
// A connection accepted here, like one made by [Pod.DialContext], keeps the
// pod's network namespace alive until it is closed.
func (p *Pod) Listeners() []net.Listener { return p.listeners }

// Release is for a pod that is gone or to be captured no longer. It closes the
// listeners, ends the redirection and lets go of the network namespace. A
// redirection that another agent has taken over meanwhile stays.
func (p *Pod) Release() error { return p.node.release(p) }

// Addresses are what the pod is known by, if it is captured by Address.
func (p *Pod) Addresses() []netip.Addr {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	return p.addresses
}

// SetAddresses changes what the pod is known by to what the API says.
func (p *Pod) SetAddresses(addresses []netip.Addr) error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	a, ok := p.redirector.(*address)
	if !ok || p.node.pods[p.uid.String()] != p {
		return nil
	}
	return a.know(p, addresses, true)
}

// Mode returns the mode that the pod was captured in.
func (p *Pod) Mode() Mode { return p.redirector.mode() }

// SetFailOpen changes what becomes of the pod's connections while no agent serves it.
func (p *Pod) SetFailOpen(open bool) error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if p.failOpen == open {
		return nil
	}
	p.failOpen = open
	if p.node.pods[p.uid.String()] != p {
		return nil // another agent's by now
	}
	if err := p.redirector.setFailOpen(p); err != nil {
		return fmt.Errorf("set what becomes of pod %s without an agent: %w", p.uid, err)
	}
	return nil
}

// Hand returns copies of what the next agent needs to take the pod over. The
// caller closes the files once they were sent.
func (p *Pod) Hand() (*Handed, error) {
	h := &Handed{}
	hand := func(sockets []*net.TCPListener) (files []*os.File, err error) {
		for _, l := range sockets {
			f, err := duplicate(l)
			if err != nil {
				return files, fmt.Errorf("hand over pod %s: %w", p.uid, err)
			}
			files = append(files, f)
		}
		return files, nil
	}
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	var err error
	if h.Listeners, err = hand(p.sockets); err == nil && p.egress != nil {
		h.Egress, err = hand(p.egress.sockets)
	}
	if err != nil {
		h.close()
		return nil, err
	}
	return h, nil
}

// Abandon is for a pod that was handed over: it closes this agent's listeners
// and leaves the redirection to the other. What was accepted before can still be
// served: [Pod.DialContext] works until [Pod.Release], which then does no more
// than let go of the network namespace. It must come before [Backend.Close]. For a
// pod captured by Address it should come last: what still comes to this agent's
// own address is turned away from then on.
func (p *Pod) Abandon() error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if p.node.pods[p.uid.String()] == p {
		delete(p.node.pods, p.uid.String())
	}
	p.stopMending()
	if err := p.closeListeners(); err != nil {
		return fmt.Errorf("abandon pod %s: %w", p.uid, err)
	}
	return nil
}

// open opens the listeners, or takes those that were handed over, and redirects the pod to
// them.
func (p *Pod) open(r Request) error {
	if err := inNetNS(p.netns, func() (err error) {
		if p.cookie, err = netnsCookie(); err != nil && p.redirector.mode() == EBPF {
			return err
		}
		return nil
	}); err != nil {
		return err
	}
	if a, ok := p.redirector.(*address); ok {
		p.queue = newQueue(a.listener.Addr())
		p.listeners = []net.Listener{watched{p.queue, p}}
		if err := p.node.forgetOthers(p); err != nil {
			return err
		}
		return a.redirect(context.Background(), p)
	}
	return p.openSockets(r)
}

// openSockets is open for a pod that is redirected to sockets in its network namespace.
func (p *Pod) openSockets(r Request) error {
	last, elsewhere := p.redirector.last(p)
	given, toElsewhere := r.Handed.listeners(p.netns)
	if err := inNetNS(p.netns, func() (err error) {
		p.sockets, err = listen(last, given)
		return err
	}); err != nil {
		return err
	}
	p.port = portOf(p.sockets[0])
	for _, l := range p.sockets {
		p.listeners = append(p.listeners, watched{l, p})
	}
	p.inheritEgress(elsewhere, r.Egress, toElsewhere)
	err := p.redirect()
	if err != nil && elsewhere == nil && p.egress != nil { // no reason to give up all else
		_ = closeAll(p.egress.listeners)
		p.egress = nil
		err = p.redirect()
	}
	if err != nil {
		return err
	}
	if err := p.node.forgetOthers(p); err != nil {
		return err
	}
	// Connections that an agent redirected and handed over, or that were refused since it
	// died, did not go around it.
	if len(given) == 0 && (last == 0 || p.failOpen) {
		p.direct = p.node.destroyDirect(p.node.destinations, p.egress.allPorts(), p)
	}
	return nil
}

// redirect puts in force what is wanted.
func (p *Pod) redirect() error {
	start := time.Now()
	err := p.redirector.redirect(context.Background(), p)
	if err != nil && p.redirector.slow() && time.Since(start) > slowAfter {
		p.damaged(err) // not again and again, with all others waiting
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
		// Its user may have closed it.
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, fmt.Errorf("close listener: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (p *Pod) closeFiles() error {
	p.stopMending()
	return errors.Join(p.closeListeners(), p.netns.Close())
}
