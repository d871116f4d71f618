package capture

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
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/address"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/ebpf"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// redirector implements one capture mode.
type redirector interface {
	// HostNetwork returns why the pods of one network namespace cannot be distinguished, nil
	// if they can.
	HostNetwork() error
	// Left returns what an earlier agent left of the pod's redirection.
	Left(ctx context.Context, p redirect.Pod) redirect.Left
	// Egress returns why connections to other hosts cannot be redirected, nil if they can.
	Egress() error
	// Origin returns the address that a connection which arrived at the egress listeners was
	// made to; invalid if the connection was not redirected. The cookie is that of the pod's
	// network namespace.
	Origin(cookie uint64, conn *net.TCPConn, local, remote netip.AddrPort) (netip.AddrPort, error)
	// Apply redirects the pod to its listeners, those for egress included. An earlier
	// redirection stays in force until then. It repairs a redirection that is damaged.
	Apply(ctx context.Context, p redirect.Pod) error
	// Release ends the redirection, unless another agent has taken it over.
	Release(p redirect.Pod) error
	// SetDestinations changes them for these pods and all that are redirected later.
	SetDestinations(destinations []netip.AddrPort, pods []redirect.Pod) (redirect.Failed, error)
	// MarkSocket lets a socket pass that is not connected yet.
	MarkSocket(fd int) error
	// Sweep removes what earlier agents left of other pods than those to keep.
	Sweep(keep func(uid [16]byte) bool) error
	// Beat gives a sign of life, for the pods that fail open. It reports whether there was
	// none for so long that they may have gone direct.
	Beat() bool
	// Check returns what is wrong and a probe of these pods would not show. Pods that failed
	// are repaired one by one, all else by Repair.
	Check(pods []redirect.Pod) (redirect.Failed, error)
	// State returns a number for what the kernel holds of the pod's redirection, unless it is unknown or not as it
	// was made. While it is the one of a probe that arrived, the next is expected to arrive.
	State(p redirect.Pod) (state uint32, known bool)
	// Repair restores what the pods share, and what Check finds of these.
	Repair(destinations []netip.AddrPort, pods []redirect.Pod) error
	// Close ends the work on these pods: those that fail open go direct without a listener.
	Close(pods []redirect.Pod) error
}

// openMode is a capture mode that works on this node.
type openMode struct {
	redirector
	mode Mode
}

// node implements Backend for the modes that work on this node.
type node struct {
	cfg         Config
	modes       []openMode // the best first
	unavailable map[Mode]error
	rotation    time.Duration
	health      health // its lock is taken first

	mu           sync.Mutex
	pods         map[string]*Pod  // by uid
	destinations []netip.AddrPort // apiservers, then agents
	agents       []netip.AddrPort
	closed       bool
	noDestroy    sync.Once // the kernel's lack of SOCK_DESTROY was logged
}

// allModes are the capture modes, the best first.
var allModes = []Mode{EBPF, IPTables, Address}

// openRedirector opens one capture mode.
func (n *node) openRedirector(mode Mode) (redirector, error) {
	switch mode {
	case EBPF:
		return ebpf.Open(n.cfg.CgroupRoot, n.cfg.PinDir, n.cfg.Logger.Warn)
	case IPTables:
		return iptables.Open(n.cfg.Logger)
	}
	return address.Listen(n.cfg.Address, func(peer netip.Addr, full bool) {
		if full {
			n.cfg.Refused(peer, QueueFull)
		} else {
			n.cfg.Refused(peer, Stranger)
		}
	})
}

func (n *node) open() error {
	for _, mode := range allModes {
		wanted := n.cfg.Mode == Auto && mode != Address || mode == Address && n.cfg.Address != ""
		if !wanted && mode != n.cfg.Mode {
			continue
		}
		r, err := n.openRedirector(mode)
		switch {
		case err == nil:
			n.modes = append(n.modes, openMode{r, mode})
		case mode == n.cfg.Mode, mode == EBPF && !errors.Is(err, bpf.ErrUnsupported):
			return err
		default:
			n.unavailable[mode] = err
			n.cfg.Logger.Warn("a capture mode does not work on this node", "mode", mode, "reason", err)
		}
	}
	if len(n.modes) == 0 {
		errs := []error{errors.New("unknown or impossible on this node")}
		for _, mode := range allModes {
			if err := n.unavailable[mode]; err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", mode, err))
			}
		}
		return errors.Join(errs...)
	}
	return nil
}

func (n *node) Check(repair bool) []Loss { return n.health.check(repair) }

func (n *node) Modes() []Mode {
	var modes []Mode
	for _, m := range n.modes {
		modes = append(modes, m.mode)
	}
	return modes
}

func (n *node) Unavailable() map[Mode]error { return n.unavailable }

func (n *node) HostNetwork() error {
	_, err := n.modeFor(Request{HostNetwork: true})
	return err
}

// modeFor returns the mode to capture a pod by.
func (n *node) modeFor(r Request) (openMode, error) {
	var errs []error
	for _, m := range n.modes {
		if r.Mode != m.mode && r.Mode != Auto {
			continue
		}
		if !r.HostNetwork {
			if r.Mode == Auto && m.mode == Address {
				continue // the pod must have been created for it
			}
			return m, nil
		}
		err := m.HostNetwork()
		if err == nil {
			return m, nil
		}
		errs = append(errs, fmt.Errorf("%w: %w", ErrHostNetwork, err))
	}
	for _, mode := range allModes {
		if err := n.unavailable[mode]; err != nil && (r.Mode == mode || r.Mode == Auto && mode != Address) {
			errs = append(errs, fmt.Errorf("%s does not work on this node: %w", mode, err))
		}
	}
	if len(errs) == 0 {
		errs = append(errs, fmt.Errorf("the agent of this node does not capture by %q, only by %q", r.Mode, n.Modes()))
	}
	return openMode{}, errors.Join(errs...)
}

func (n *node) SetDestinations(apiservers, agents []netip.AddrPort) error {
	return failure.Wrap(n.setDestinations(apiservers, agents), "setting the destinations")
}

func (n *node) setDestinations(apiservers, agents []netip.AddrPort) error {
	if len(apiservers) == 0 {
		return errors.New("an empty set would let every captured pod go direct")
	}
	set, err := destinationSet(slices.Concat(apiservers, agents))
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return os.ErrClosed
	}
	n.destinations, n.agents = set, agents
	var errs []error
	for _, m := range n.modes {
		pods := n.captured(m.mode)
		for _, p := range pods {
			p.stopRepair() // it has the earlier destinations
		}
		failed, err := m.SetDestinations(set, intact(pods))
		errs = append(errs, err)
		for _, p := range pods {
			if why := failed[p.known.UID]; why != nil {
				p.setDamage(fmt.Errorf("changing the destinations: %w", why))
			}
		}
	}
	return errors.Join(errs...)
}

// captured returns the pods that are captured by a mode, the agent's own among them.
func (n *node) captured(mode Mode) []*Pod {
	return slices.DeleteFunc(n.all(), func(p *Pod) bool { return p.mode != mode })
}

// intact returns the pods whose redirection is not known to be damaged, for a redirector.
func intact(pods []*Pod) (targets []redirect.Pod) {
	for _, p := range pods {
		if p.status.damage == nil {
			targets = append(targets, p.target())
		}
	}
	return targets
}

// destinationSet returns destinations without duplicates, with IPv4 addresses as such.
func destinationSet(destinations []netip.AddrPort) (set []netip.AddrPort, err error) {
	for _, d := range destinations {
		d = netip.AddrPortFrom(d.Addr().Unmap(), d.Port())
		if !isServer(d) {
			return nil, fmt.Errorf("not the address of a server: %s", d)
		}
		if !slices.Contains(set, d) {
			set = append(set, d)
		}
	}
	return set, nil
}

func isServer(at netip.AddrPort) bool {
	return at.IsValid() && at.Port() != 0 && !at.Addr().IsUnspecified() && at.Addr().Zone() == ""
}

func (n *node) Capture(r Request) (*Pod, error) {
	p, err := n.capture(r)
	return p, failure.Wrap(err, "capturing pod %s", r.UID)
}

func (n *node) capture(r Request) (*Pod, error) {
	defer r.Files.Close() // listeners are made of copies
	id, err := uuid.Parse(r.UID)
	if err != nil || id.String() != r.UID {
		return nil, errors.New("its uid is not a UUID")
	}
	by, err := n.modeFor(r)
	if err != nil {
		return nil, err
	}
	if r.HostNetwork && r.Cgroup == 0 {
		return nil, fmt.Errorf("%w, and its cgroup is unknown", ErrHostNetwork)
	}
	namespace, err := netns.Open(r.NetNS, r.HostNetwork)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	earlier := n.pods[r.UID]
	switch {
	case n.closed:
		err = os.ErrClosed
	case len(n.destinations) == 0:
		err = errors.New("no destinations have been set")
	case earlier != nil && r.asksFor(earlier, namespace):
		namespace.Close()
		return earlier, nil
	}
	if err != nil {
		namespace.Close()
		return nil, err
	}
	p := &Pod{node: n, redirector: by.redirector, mode: by.mode, known: redirect.Pod{
		UID: id, NetNS: namespace, HostNetwork: r.HostNetwork, Cgroup: r.Cgroup, FailOpen: r.FailOpen,
	}}
	if r.HostNetwork {
		p.identity = &identity{root: n.cfg.CgroupRoot, cgroup: r.Cgroup, netns: namespace}
	}
	if err := p.open(r); err != nil {
		return nil, errors.Join(err, p.closeFiles())
	}
	n.pods[r.UID] = p
	if earlier != nil {
		// The sandbox was replaced: errors of the old one do not matter.
		earlier.stopRepair()
		_ = earlier.redirector.Release(earlier.target())
		_ = earlier.closeFiles()
	}
	return p, nil
}

// asksFor reports whether a captured pod is the one that the request asks for.
func (r Request) asksFor(p *Pod, namespace *os.File) bool {
	return (p.known.Cgroup == r.Cgroup || !r.HostNetwork) && p.known.HostNetwork == r.HostNetwork && netns.Same(p.known.NetNS, namespace)
}

// forgetOthers ends the pod's redirections by other modes than its own. An earlier agent
// made them, and they lead to that agent's port.
func (n *node) forgetOthers(p *Pod) error {
	var errs []error
	if p.mode != EBPF {
		errs = append(errs, bpf.Forget(n.cfg.PinDir, p.known.Cookie))
	}
	if p.mode != IPTables && !p.known.HostNetwork {
		errs = append(errs, iptables.Forget(p.known.NetNS, n.tables))
	}
	return failure.Wrap(errors.Join(errs...), "ending the redirection by an earlier agent")
}

// tables returns those that are open, because probing the programs takes time.
func (n *node) tables() ([2]iptables.Table, error) {
	for _, m := range n.modes {
		if b, ok := m.redirector.(*iptables.Backend); ok {
			return b.Tables, nil
		}
	}
	return iptables.OpenTables()
}

// mark lets a socket pass every redirection, including those of an earlier agent.
func (n *node) mark(fd int) error {
	err := os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, iptables.Mark))
	errs := []error{failure.Wrap(err, "marking a socket as the agent's own")}
	for _, m := range n.modes {
		errs = append(errs, m.MarkSocket(fd))
	}
	return errors.Join(errs...)
}

func (n *node) Sweep(keep func(uid string) bool) error {
	n.mu.Lock()
	var deleted []*Pod
	for uid, p := range n.pods {
		if !keep(uid) {
			deleted = append(deleted, p)
		}
	}
	n.mu.Unlock()

	errs := collect.Map(deleted, func(p *Pod) error { return p.Release() })
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return os.ErrClosed
	}
	for _, m := range n.modes {
		errs = append(errs, m.Sweep(func(id [16]byte) bool {
			uid := uuid.UUID(id)
			return isOwnOfRunningAgent(uid) || n.pods[uid.String()] != nil || keep(uid.String())
		}))
	}
	return failure.Wrap(errors.Join(errs...), "sweeping redirections")
}

func (n *node) Close() error {
	n.health.mu.Lock()
	defer n.health.mu.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	errs := n.health.close()
	for _, p := range n.pods {
		p.stopRepair()
	}
	for _, m := range n.modes {
		pods := collect.Map(n.captured(m.mode), func(p *Pod) redirect.Pod { return p.target() })
		errs = append(errs, m.Close(pods))
	}
	for uid, p := range n.pods {
		errs = append(errs, p.closeFiles())
		delete(n.pods, uid)
	}
	return failure.Wrap(errors.Join(errs...), "closing capture")
}
