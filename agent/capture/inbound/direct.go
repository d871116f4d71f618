package inbound

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/sockdiag"
)

// Connections that were made while no agent steered them lead to the application as long as
// the client keeps them: the apiserver keeps those to a webhook for hours. They are ended once
// the agent steers, so that the client connects again.
//
// A request that is under way on such a connection fails when it ends. So it is ended when it
// is quiet: the application has sent since anything arrived, and nothing for some time after
// that. The longer it is never quiet, the shorter that time. A client may confirm an answer
// only with its next request, so that is not waited for. The kernel's times have a resolution of 4 ms or
// less, so a request that arrives within that time of an answer is not known to be under way.
const (
	// findFor is how long direct connections are looked for at least: an application may
	// accept one some time after it was made.
	findFor = 2 * time.Second
	// endWithin is when connections are ended although they are never quiet: their requests
	// fail. Until then the status of the pod says that its reviews are not routed.
	endWithin = 3 * time.Minute
	// endFor bounds how long one check looks for connections and ends them, of all pods. They
	// cannot be captured or released meanwhile.
	endFor     = 200 * time.Millisecond
	watchEvery = time.Millisecond
	// searchEvery is how often connections are looked for that the kernel cannot end.
	searchEvery = 10 * time.Second
)

// quietFor returns how long a connection must have been quiet, some time after the agent began
// to steer.
func quietFor(age time.Duration) time.Duration {
	switch {
	case age < 2*time.Second:
		return time.Second
	case age < 4*time.Second:
		return 100 * time.Millisecond
	case age < 8*time.Second:
		return 5 * time.Millisecond
	}
	return time.Millisecond // the resolution at least
}

// watchFor returns how long one check watches connections of a pod that are not quiet, some
// time after the agent began to steer. Under load they are quiet for moments.
func watchFor(age time.Duration) time.Duration {
	if age < 8*time.Second {
		return 20 * time.Millisecond
	}
	return endFor / 2
}

var errDirect = errors.New("connections that were made before the agent steered them may lead to the application: it ends them when they are quiet, and within " + endWithin.String())

var errEndless = errors.New("connections that were made before the agent steered them may lead to the application until their clients close them, because this kernel lacks CONFIG_INET_DIAG_DESTROY: restart the pod")

// Direct returns why a client may still have a connection to the application, although new
// ones are steered; nil if none has.
func (p *Pod) Direct() error {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	switch {
	case p.direct.IsZero() && !p.node.lapsed.Load():
		return nil
	case p.node.cannotEnd:
		return errEndless
	}
	return errDirect
}

// noteDirect notes that connections that were made until now may be direct.
func (p *Pod) noteDirect() { p.direct = time.Now() }

// endDirect ends direct connections that are quiet, until a time.
func (p *Pod) endDirect(until time.Time) error {
	if p.node.cannotEnd && time.Since(p.searched) < searchEvery {
		return nil
	}
	p.searched = time.Now()
	age := p.searched.Sub(p.direct)
	// What is found must also be ended in time.
	found, all, err := p.findDirect(p.searched.Add(until.Sub(p.searched) / 2))
	if err != nil {
		return err
	}
	left, err := p.watch(found, age, until)
	if err == nil && all && (len(found) == 0 && age > findFor || len(left) == 0 && age > p.node.endWithin+findFor) {
		p.direct = time.Time{}
	}
	return p.node.noteEndless(err)
}

// noteEndless notes whether connections could not be ended because the kernel cannot end any.
// It returns other errors.
func (n *Node) noteEndless(err error) error {
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	if !n.cannotEnd {
		n.log.Warn("this kernel lacks CONFIG_INET_DIAG_DESTROY: connections to webhooks from before they were captured are not routed")
	}
	n.cannotEnd = true
	return nil
}

// openSockets opens the sockets of the pod's network namespace. The caller must Close them.
func (p *Pod) openSockets() (sockets sockdiag.Namespace, err error) {
	err = netns.Do(p.netns, func() (err error) {
		sockets, err = sockdiag.Open()
		return err
	})
	return sockets, err
}

// findDirect returns the connections from outside to the application at steered ports that it
// finds until a time, and whether these are all.
func (p *Pod) findDirect(until time.Time) (found []sockdiag.Connection, all bool, err error) {
	sockets, err := p.openSockets()
	if err != nil {
		return nil, false, fmt.Errorf("listing sockets: %w", err)
	}
	defer sockets.Close()
	all = true
	err = sockets.Each([]uint8{unix.IPPROTO_TCP}, func(c sockdiag.Connection) bool {
		to, from := c.Local.Addr(), c.Remote.Addr()
		switch {
		case c.Inode == 0: // not accepted, or closed by its process
		case !slices.Contains(p.ports, c.Local.Port()) || !slices.Contains(p.addresses, to):
		case from == to || from.IsLoopback(): // from the pod, as in bpf/lookup.c
		case !p.cgroups[c.Cgroup]: // an agent's
		default:
			found = append(found, c)
		}
		all = time.Now().Before(until)
		return all
	})
	if err != nil || len(found) == 0 {
		return nil, all, err
	}
	// Own sockets are listed last, so that one that is accepted meanwhile is in neither list.
	own, err := sockdiag.Own()
	return slices.DeleteFunc(found, func(c sockdiag.Connection) bool { return own[c.Inode] }), all, err
}

// watch watches connections for a while, and ends those that are quiet. It returns the others.
func (p *Pod) watch(found []sockdiag.Connection, age time.Duration, until time.Time) (left []sockdiag.Connection, err error) {
	if len(found) == 0 {
		return nil, nil
	}
	sockets, err := p.openSockets()
	if err != nil {
		return found, err
	}
	defer sockets.Close()
	left = found
	ended, required := 0, quietFor(age)
	if age > p.node.endWithin {
		required = anyway
	}
	for start := time.Now(); ; time.Sleep(watchEvery) {
		left, err = destroyQuiet(sockets, left, required, until, &ended)
		if err != nil || len(left) == 0 || time.Since(start) > watchFor(age) || !time.Now().Before(until) {
			break
		}
	}
	if ended > 0 {
		p.node.log.Info("ended direct connections to a webhook", "pod", p.uid, "connections", ended)
	}
	return left, err
}

// destroyer is a [sockdiag.Namespace].
type destroyer interface {
	Activity(c sockdiag.Connection) (a sockdiag.Activity, ok bool, err error)
	Destroy(c sockdiag.Connection) (destroyed bool, err error)
}

// anyway, instead of a time, does not require that a connection is quiet.
const anyway = -1

// destroyQuiet destroys the connections that have been quiet for the required time, until a
// time, and returns the others.
func destroyQuiet(sockets destroyer, found []sockdiag.Connection, required time.Duration, until time.Time, ended *int) (left []sockdiag.Connection, err error) {
	for i, c := range found {
		if !time.Now().Before(until) {
			return append(left, found[i:]...), nil
		}
		a, ok, err := sockets.Activity(c)
		switch {
		case err != nil:
			return nil, err
		case !ok:
			continue
		case required != anyway && (a.Unread || a.Unsent || a.Sent > a.Received || a.Sent < required):
			left = append(left, c)
			continue
		}
		destroyed, err := sockets.Destroy(c)
		if err != nil {
			return nil, err
		}
		if destroyed {
			*ended++
		}
	}
	return left, nil
}
