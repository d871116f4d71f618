package capture

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/google/uuid"
)

// Pod is one captured pod. It is safe for concurrent use.
type Pod struct {
	uid   uuid.UUID
	node  *node
	netns *os.File

	cookie    uint64 // of the network namespace, 0 where the kernel gives none
	port      uint16 // of all listeners
	listeners []net.Listener
}

// Listeners returns where the pod's redirected connections come in: 127.0.0.1
// and, unless its network namespace has no IPv6, ::1, on the same port. They are
// the caller's to accept from, and closed by [Pod.Release] and [Method.Close].
//
// A connection accepted here, like one made by [Pod.DialContext], keeps the
// pod's network namespace alive until it is closed.
func (p *Pod) Listeners() []net.Listener { return p.listeners }

// Release is for a pod that is gone or to be captured no longer. It closes the
// listeners, ends the redirection and lets go of the network namespace. A
// redirection that another agent has taken over meanwhile stays.
func (p *Pod) Release() error { return p.node.release(p) }

// Mode is the way the pod was captured.
func (p *Pod) Mode() Mode { return p.node.redirector.mode() }

// SetFailOpen changes what becomes of the pod's connections while no agent serves it.
func (p *Pod) SetFailOpen(bool) error { return nil }

// Hand returns copies of what the next agent needs to take the pod over. The
// caller closes the files once they were sent.
func (p *Pod) Hand() (*Handed, error) { return nil, errors.ErrUnsupported }

// Abandon is for a pod that was handed over: it closes this agent's listeners
// and lets go of the network namespace, and leaves the redirection to the other.
func (p *Pod) Abandon() error { return p.closeFiles() }

// open opens the listeners, then redirects the pod to them.
func (p *Pod) open(r redirector) error {
	last := r.lastPort(p)
	if err := inNetNS(p.netns, func() (err error) {
		if p.cookie, err = netnsCookie(); err != nil && r.mode() == EBPF {
			return err
		}
		p.listeners, p.port, err = listen(last)
		return err
	}); err != nil {
		return err
	}
	return r.redirect(p)
}

func (p *Pod) closeListeners() error {
	var errs []error
	for _, l := range p.listeners {
		// Its user may have closed it.
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, fmt.Errorf("close listener: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (p *Pod) closeFiles() error {
	return errors.Join(p.closeListeners(), p.netns.Close())
}
