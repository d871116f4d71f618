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

	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// redirector is one capture mode.
type redirector interface {
	mode() Mode
	// hostNetwork is nil if a pod can be told from others in its network namespace.
	hostNetwork() error
	// last is the port that the pod was redirected to before, 0 if it was not, and what
	// was of its other connections.
	last(p *Pod) (uint16, *egress)
	// canEgress is nil if a pod's other connections can be redirected.
	canEgress() error
	// origin is where a pod meant to connect that came in by its listeners for egress;
	// invalid of what was not redirected there.
	origin(p *Pod, conn *net.TCPConn) (netip.AddrPort, error)
	// redirect points the pod at its listeners, those for egress too or not any more. What pointed it elsewhere is in
	// force until then. It mends what is broken, and changes nothing else.
	redirect(ctx context.Context, p *Pod) error
	// slow reports whether the pod can delay redirect. Checks do not wait for it then.
	slow() bool
	// release ends the redirection, unless another agent has made it its own since.
	release(p *Pod) error
	// setFailOpen puts in force what p.failOpen has become.
	setFailOpen(p *Pod) error
	// setDestinations changes them for these pods and all that are redirected later.
	setDestinations(destinations []netip.AddrPort, pods []*Pod) error
	// mark lets a socket pass that has yet to connect.
	mark(fd int) error
	// sweep forgets what earlier agents left of pods that are gone.
	sweep(keep func(uid uuid.UUID) bool) error
	// beat is a sign of life, for the pods that fail open. It tells whether there
	// was none for so long that they may have gone direct.
	beat() bool
	// check tells what is wrong that a probe of these pods would not show.
	check(pods []*Pod) error
	// repair puts in force again what the pods share, and what check finds of these.
	repair(destinations []netip.AddrPort, pods []*Pod) error
	// close lets go of these pods: those that fail open go direct once nobody listens.
	close(pods []*Pod) error
}

// node implements Backend for the modes that work on this node.
type node struct {
	cfg         Config
	redirectors []redirector // the best first
	unavailable map[Mode]error
	rotation    time.Duration
	health      health // its lock comes first

	mu           sync.Mutex
	pods         map[string]*Pod  // by uid
	destinations []netip.AddrPort // apiservers, then agents
	agents       []netip.AddrPort
	closed       bool
	noDestroy    sync.Once // the kernel's lack of SOCK_DESTROY was reported
}

// allModes are the capture modes, the best first.
var allModes = []Mode{EBPF, IPTables, Address}

func (n *node) open() error {
	for _, m := range []struct {
		mode   Mode
		open   func(Config) (redirector, error)
		wanted bool
	}{
		{EBPF, openEBPF, n.cfg.Mode == Auto},
		{IPTables, openIPTables, n.cfg.Mode == Auto},
		{Address, openAddress, n.cfg.Address != ""},
	} {
		if !m.wanted && m.mode != n.cfg.Mode {
			continue
		}
		r, err := m.open(n.cfg)
		switch {
		case err == nil:
			n.redirectors = append(n.redirectors, r)
		case m.mode == n.cfg.Mode, m.mode == EBPF && !errors.Is(err, bpf.ErrUnsupported):
			return err
		default:
			n.unavailable[m.mode] = err
			n.cfg.Logger.Warn("a way to capture pods does not work here", "mode", m.mode, "reason", err)
		}
	}
	if len(n.redirectors) == 0 {
		errs := []error{errors.New("unknown or impossible here")}
		for _, mode := range allModes {
			if err := n.unavailable[mode]; err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", mode, err))
			}
		}
		return errors.Join(errs...)
	}
	return nil
}

func (n *node) Modes() []Mode {
	var modes []Mode
	for _, w := range n.redirectors {
		modes = append(modes, w.mode())
	}
	return modes
}

func (n *node) Unavailable() map[Mode]error { return n.unavailable }

func (n *node) HostNetwork() error {
	_, err := n.redirectorFor(Request{HostNetwork: true})
	return err
}

// redirectorFor returns the redirector of the mode to capture a pod by.
func (n *node) redirectorFor(r Request) (redirector, error) {
	var errs []error
	for _, w := range n.redirectors {
		if r.Mode != w.mode() && r.Mode != Auto {
			continue
		}
		if !r.HostNetwork {
			if r.Mode == Auto && w.mode() == Address {
				continue // the pod must have been made for it
			}
			return w, nil
		}
		err := w.hostNetwork()
		if err == nil {
			return w, nil
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
	return nil, errors.Join(errs...)
}

func (n *node) SetDestinations(apiservers, agents []netip.AddrPort) error {
	if len(apiservers) == 0 {
		return errors.New("set destinations: an empty set would let every captured pod go direct")
	}
	set, err := destinationSet(slices.Concat(apiservers, agents))
	if err != nil {
		return fmt.Errorf("set destinations: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return fmt.Errorf("set destinations: %w", os.ErrClosed)
	}
	n.destinations, n.agents = set, agents
	var errs []error
	for _, w := range n.redirectors {
		errs = append(errs, w.setDestinations(set, n.captured(w)))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("set destinations: %w", err)
	}
	return nil
}

// captured returns the pods that a redirector has captured, the agent's own among them.
func (n *node) captured(w redirector) []*Pod {
	var pods []*Pod
	for _, p := range n.all() {
		if p.redirector.mode() == w.mode() {
			pods = append(pods, p)
		}
	}
	return pods
}

// destinationSet is destinations without doubles, IPv4 addresses as such.
func destinationSet(destinations []netip.AddrPort) ([]netip.AddrPort, error) {
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
	p, err := n.capture(r)
	if err != nil {
		return nil, fmt.Errorf("capture pod %s: %w", r.UID, err)
	}
	return p, nil
}

func (n *node) capture(r Request) (*Pod, error) {
	defer r.Handed.close() // listeners are made of copies
	id, err := uuid.Parse(r.UID)
	if err != nil || id.String() != r.UID {
		return nil, errors.New("its uid is not a UUID")
	}
	by, err := n.redirectorFor(r)
	if err != nil {
		return nil, err
	}
	if r.HostNetwork && r.Cgroup == 0 {
		return nil, fmt.Errorf("%w, and its cgroup is not known", ErrHostNetwork)
	}
	netns, err := openNetNS(r.NetNS, r.HostNetwork)
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
	case earlier != nil && earlier.isFor(r, netns):
		netns.Close()
		return earlier, nil
	}
	if err != nil {
		netns.Close()
		return nil, err
	}
	p := n.newPod(id, by, netns, r)
	if err := p.open(r); err != nil {
		return nil, errors.Join(err, p.closeFiles())
	}
	n.pods[r.UID] = p
	if earlier != nil {
		// The sandbox was replaced. The old one is gone, whatever it says.
		_ = earlier.redirector.release(earlier)
		_ = earlier.closeFiles()
	}
	return p, nil
}

// isFor reports whether a captured pod is the one that a request asks for.
func (p *Pod) isFor(r Request, netns *os.File) bool {
	return (p.cgroup == r.Cgroup || !r.HostNetwork) && p.hostNetwork == r.HostNetwork && sameFile(p.netns, netns)
}

func (n *node) newPod(id uuid.UUID, by redirector, netns *os.File, r Request) *Pod {
	p := &Pod{uid: id, node: n, redirector: by, netns: netns, hostNetwork: r.HostNetwork, cgroup: r.Cgroup, failOpen: r.FailOpen}
	if r.HostNetwork {
		p.members = &membership{root: n.cfg.CgroupRoot, cgroup: r.Cgroup, netns: netns}
	}
	if by.mode() == Address {
		p.addresses, p.given = r.Addresses, len(r.Addresses) > 0
	}
	return p
}

// forgetOthers ends the pod's redirections by other modes than its own, which
// were an earlier agent's. They would turn its connections to that one's port.
func (n *node) forgetOthers(p *Pod) error {
	var errs []error
	if p.redirector.mode() != EBPF {
		errs = append(errs, bpf.Forget(n.cfg.PinDir, p.cookie))
	}
	if p.redirector.mode() != IPTables && !p.hostNetwork {
		errs = append(errs, forgetRules(p.netns, n.natTables))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("end the redirection by an earlier agent: %w", err)
	}
	return nil
}

// natTables returns those that are open, so that no pod waits for programs to be probed.
func (n *node) natTables() ([2]iptables.Table, error) {
	for _, w := range n.redirectors {
		if t, ok := w.(*rules); ok {
			return t.tables, nil
		}
	}
	return iptables.OpenTables(n.cfg.IPTables)
}

// mark lets a socket pass every redirection, including those of an earlier agent.
func (n *node) mark(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, iptables.Mark); err != nil {
		return fmt.Errorf("mark socket as the agent's own: %w", os.NewSyscallError("setsockopt", err))
	}
	var errs []error
	for _, w := range n.redirectors {
		errs = append(errs, w.mark(fd))
	}
	return errors.Join(errs...)
}

// release is Pod.Release. A pod that is no longer the node's is released already, or stays redirected.
func (n *node) release(p *Pod) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.pods[p.uid.String()] != p {
		p.netns.Close() // of a pod that was abandoned
		return nil
	}
	delete(n.pods, p.uid.String())
	if err := errors.Join(p.closeListeners(), p.redirector.release(p), p.netns.Close()); err != nil {
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
	for _, w := range n.redirectors {
		errs = append(errs, w.sweep(func(uid uuid.UUID) bool { return n.pods[uid.String()] != nil || keep(uid.String()) }))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	return nil
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
	errs := n.closeHealth()
	for _, w := range n.redirectors {
		errs = append(errs, w.close(n.captured(w)))
	}
	for uid, p := range n.pods {
		errs = append(errs, p.closeFiles())
		delete(n.pods, uid)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close capture: %w", err)
	}
	return nil
}
