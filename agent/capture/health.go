package capture

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// rotation is how long it takes to probe all captured pods once.
	rotation = 1500 * time.Millisecond
	// patience is how long a probe may take to arrive.
	patience = time.Second
	// attempts is how many probes fail before a redirection counts as lost.
	attempts = 2
	// stallAfter is how long a probe may wait to be accepted before its pod, if it
	// fails open, goes direct. The hook grants the whole agent as much.
	stallAfter = 2 * time.Second
	// auditInterval is how often it is looked at what no probe shows.
	auditInterval = time.Second
	// mendingBudget is how long one check mends pods, for there is no sign of life
	// meanwhile. The others are the next check's.
	mendingBudget = 500 * time.Millisecond
)

// health is what is known of the redirections in force, between checks.
type health struct {
	mu sync.Mutex
	// own is a pod that runs nothing. Through it a node without pods is checked
	// too, and the agent shows that it lives.
	own     *Pod
	to      netip.AddrPort // where own's probes go
	probing []*Pod         // with a probe under way when the last check ended
	slept   bool           // there was none, by any agent, for so long that pods may have gone direct
	probed  time.Time      // when captured pods were probed last
	audited time.Time
	audits  map[Mode]Loss // what is wrong, and not mended
}

// vitals is what is known of one pod's redirection.
type vitals struct {
	awaited atomic.Pointer[probe] // by who accepts

	// The rest is health.mu's.
	probe  *probe // under way
	began  time.Time
	failed int   // probes in a row
	found  error // why they did, once it was tried to mend it
	lost   *Loss // it was not mended by that

	// Of a pod that is mended apart from the checks:
	damage error     // what there is to mend
	mends  int       // in a row
	mended time.Time // last
}

// probe is a connection that should arrive at the pod's listener.
type probe struct {
	fd      int
	port    int // it comes from
	began   time.Time
	err     error // of connect
	arrived atomic.Bool
}

// watched is a listener that keeps probes to itself.
type watched struct {
	net.Listener
	pod *Pod
}

// Accept waits for the next connection that is not a probe. For the probe, that
// it came this far is what was to be found out.
func (w watched) Accept() (net.Conn, error) {
	for {
		conn, err := w.Listener.Accept()
		if err != nil {
			return nil, err
		}
		at, ok := conn.RemoteAddr().(*net.TCPAddr)
		if !ok || !w.pod.vitals.takes(at.Port) {
			return conn, nil
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // leave nothing in the pod's network namespace
		}
		_ = conn.Close()
	}
}

// takes tells whether a connection from a port is the awaited probe. Nothing
// else can come from there: the probe is bound to its port on all addresses.
func (v *vitals) takes(port int) bool {
	pr := v.awaited.Load()
	if pr == nil || pr.port != port || !v.awaited.CompareAndSwap(pr, nil) {
		return false
	}
	pr.arrived.Store(true)
	return true
}

// end closes the probe under way.
func (v *vitals) end() {
	v.awaited.Store(nil)
	_ = unix.Close(v.probe.fd)
	v.probe = nil
}

// check is Method.Check. It waits for nothing: what became of a probe, a later check sees.
func (n *node) check(mend bool) []Loss {
	h := &n.health
	h.mu.Lock()
	defer h.mu.Unlock()

	// The lock may be held for seconds, while rules are written for many pods. A
	// sign of life must not wait for that; the rest can be done next time.
	locked := n.mu.TryLock()
	if locked {
		defer n.mu.Unlock()
		if n.closed || len(n.destinations) == 0 {
			return nil
		}
		h.to = n.destinations[0]
		if err := n.makeOwn(); err != nil {
			return []Loss{{Mode: n.ways[0].mode(), Reason: err, Repair: errors.New("the redirection cannot be checked")}}
		}
	}
	if own := h.own; own != nil {
		if own.vitals.probe == nil {
			n.begin([]*Pod{own})
		}
		own.acceptOwn()
		if pr := own.vitals.probe; pr != nil && pr.arrived.Load() {
			for _, w := range n.ways {
				h.slept = w.beat() || h.slept
			}
		}
	}
	if !locked || !mend {
		return nil
	}

	if h.slept {
		for _, p := range n.pods {
			p.comeBack()
		}
		h.slept = false
	}
	start := time.Now()
	losses := n.audit(start)
	pods := n.all()
	for _, p := range h.probing {
		if p.vitals.probe != nil && p != h.own && n.pods[p.uid.String()] != p {
			p.vitals.end() // released meanwhile
		}
	}
	for _, p := range pods {
		if p.vitals.probe != nil && time.Since(start) < mendingBudget {
			if mended := n.examine(p); mended != nil {
				losses = append(losses, *mended)
			}
		}
		if p.vitals.lost != nil {
			losses = append(losses, *p.vitals.lost)
		}
	}
	n.endDirect(pods, start.Add(mendingBudget))
	n.mend(pods)
	n.begin(n.due(pods, start))
	h.probing = slices.DeleteFunc(pods, func(p *Pod) bool { return p.vitals.probe == nil })
	return losses
}

// all are the captured pods and, first, the agent's own.
func (n *node) all() []*Pod {
	pods := make([]*Pod, 0, len(n.pods)+1)
	if n.health.own != nil {
		pods = append(pods, n.health.own)
	}
	for _, p := range n.pods {
		pods = append(pods, p)
	}
	return pods
}

// due are the pods to be probed now: those whose probe failed, and as many
// others as the time since the last check asks for, the longest unseen first.
func (n *node) due(pods []*Pod, now time.Time) []*Pod {
	var due, others []*Pod
	for _, p := range pods {
		switch v := &p.vitals; {
		case v.probe != nil || p == n.health.own && v.failed == 0:
		case v.failed > 0:
			due = append(due, p)
		default:
			others = append(others, p)
		}
	}
	since := min(now.Sub(n.health.probed), rotation)
	n.health.probed = now
	slices.SortFunc(others, func(a, b *Pod) int { return a.vitals.began.Compare(b.vitals.began) })
	share := int(int64(len(n.pods)) * int64(since) / int64(rotation))
	return append(due, others[:min(share+1, len(others))]...)
}

// audit looks at what no probe shows, and mends it.
func (n *node) audit(now time.Time) []Loss {
	h := &n.health
	var losses []Loss
	if now.Sub(h.audited) >= auditInterval {
		h.audited = now
		h.audits = map[Mode]Loss{}
		for _, w := range n.ways {
			pods := n.captured(w)
			reason := w.check(pods)
			if reason == nil {
				continue
			}
			loss := Loss{Mode: w.mode(), Reason: reason, Repair: errors.Join(w.repair(n.destinations, pods), w.check(pods))}
			if loss.Repair == nil {
				losses = append(losses, loss)
				for _, p := range pods {
					p.recaptured()
				}
			} else {
				h.audits[w.mode()] = loss
			}
		}
	}
	for _, loss := range h.audits {
		losses = append(losses, loss)
	}
	return losses
}

// examine sees what has become of the pod's probe, and mends what did not let
// it arrive. It returns what was mended for certain.
func (n *node) examine(p *Pod) (mended *Loss) {
	v := &p.vitals
	pr := v.probe
	if pr.err == nil {
		if code, err := unix.GetsockoptInt(pr.fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && code != 0 {
			pr.err = unix.Errno(code)
		}
	}
	arrived, waits := pr.arrived.Load(), false
	if !arrived && (pr.err != nil || time.Since(pr.began) > patience) {
		arrived, waits = p.landed(pr)
	} else if !arrived {
		return nil
	}
	switch {
	case arrived && v.damage != nil: // it may not be all there is
		v.end()
		v.failed = 0
	case arrived:
		if v.found != nil {
			p.recaptured()
			if v.lost == nil {
				mended = &Loss{UID: p.name(), Mode: p.Mode(), Reason: v.found}
			}
		}
		v.end()
		v.failed, v.found, v.lost = 0, nil, nil
		n.setStalled(p, false)
	case waits:
		if time.Since(pr.began) > stallAfter {
			n.setStalled(p, true)
		}
		if pr.err != nil {
			v.end()
		}
	case p.stalled:
		// It was, and the probe went direct or was thrown away meanwhile.
		v.end()
		n.setStalled(p, false)
	default:
		n.failed(p)
	}
	return mended
}

// failed is for a probe that did not arrive.
func (n *node) failed(p *Pod) {
	v := &p.vitals
	reason := v.probe.err
	if reason == nil {
		reason = fmt.Errorf("a connection to %s did not arrive at the agent within %s", n.target(p), patience)
	} else {
		reason = fmt.Errorf("a connection to %s did not arrive at the agent: %w", n.target(p), reason)
	}
	outdated := v.damage != nil || v.probe.began.Before(v.mended)
	v.end()
	if outdated {
		return
	}
	if v.failed++; v.failed < attempts {
		return
	}
	v.failed = attempts // and so on until one arrives
	if v.found != nil {
		v.lost = &Loss{UID: p.name(), Mode: p.Mode(), Reason: v.found, Repair: reason}
	}
	v.found = cmp.Or(v.found, reason)
	if p.way.slow() {
		v.damage = reason
		return
	}
	if err := errors.Join(p.way.repair(n.destinations, nil), p.way.redirect(context.Background(), p)); err != nil {
		v.lost = &Loss{UID: p.name(), Mode: p.Mode(), Reason: v.found, Repair: err}
	}
}

// setStalled tells the hook whether the pod's connections are taken at all.
func (n *node) setStalled(p *Pod, stalled bool) {
	if p.stalled == stalled {
		return
	}
	p.stalled = stalled
	if stalled {
		n.cfg.Logger.Warn("the pod's connections are not accepted", "pod", p.uid, "fail_open", p.failOpen)
	}
	if err := p.way.setFailOpen(p); err != nil {
		n.cfg.Logger.Error("telling the hook whether the pod's connections are accepted", "pod", p.uid, "error", err)
	}
	if !stalled {
		p.comeBack()
	}
}

// comeBack is for a pod that may have gone direct for want of an agent.
func (p *Pod) comeBack() {
	p.direct = p.direct || p.failOpen && p.way.mode() == EBPF
}

// recaptured is for a pod whose redirection was lost and is mended: what it
// connected meanwhile went direct, whatever its failure policy.
func (p *Pod) recaptured() {
	p.direct = p.direct || p.way.mode() != Address
}

// endDirect ends the connections around the agent, for as many pods as there is
// time for. The others are the next check's.
func (n *node) endDirect(pods []*Pod, until time.Time) {
	for i, p := range pods {
		if !p.direct {
			continue
		}
		if !time.Now().Before(until) {
			return
		}
		// Those under hostNetwork share a namespace, and all it takes to look there.
		together := []*Pod{p}
		if p.hostNetwork {
			together = slices.DeleteFunc(slices.Clone(pods[i:]), func(other *Pod) bool { return !other.direct || !other.hostNetwork })
		}
		more := n.destroyDirect(together...)
		for _, p := range together {
			p.direct = more
		}
	}
}

// name is the pod's uid as the outside knows it.
func (p *Pod) name() string {
	if isOwnPod(p.uid) {
		return ""
	}
	return p.uid.String()
}

// target is where the pod's probes go; invalid if nowhere.
func (n *node) target(p *Pod) netip.AddrPort {
	switch {
	case p == n.health.own:
		return n.health.to
	case p.way.mode() == Address && len(n.agents) == 0:
		return netip.AddrPort{}
	case p.way.mode() == Address:
		return n.agents[0]
	case p.hostNetwork:
		// The hook would not take this process for one of the pod's.
		return netip.AddrPortFrom(loopback4, p.port)
	}
	return n.destinations[0]
}

// begin sends a probe from the network namespace of each of the pods. One that
// cannot be made says nothing of the redirection.
func (n *node) begin(pods []*Pod) {
	if len(pods) == 0 {
		return
	}
	now := time.Now()
	_ = onOwnGoroutine(func() error {
		leave, err := enter(pods[0].netns)
		if err != nil {
			return err
		}
		for _, p := range pods {
			v := &p.vitals
			v.began = now
			to := n.target(p)
			if !to.IsValid() || setns(p.netns) != nil {
				continue // released meanwhile
			}
			if pr, err := newProbe(to); err == nil {
				pr.began, v.probe = now, pr
				v.awaited.Store(pr)
				pr.connect(to)
			}
		}
		return leave()
	})
}

// newProbe makes a probe in the calling thread's network namespace, unconnected.
func newProbe(to netip.AddrPort) (*probe, error) {
	family, anywhere := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{})
	if to.Addr().Is6() {
		family, anywhere = unix.AF_INET6, &unix.SockaddrInet6{}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, err
	}
	// Its port must be known before anybody can accept it. Closed, it shall leave nothing.
	err = errors.Join(unix.Bind(fd, anywhere), unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	at, nerr := unix.Getsockname(fd)
	if err = errors.Join(err, nerr); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &probe{fd: fd, port: int(addrPort(at).Port())}, nil
}

func (pr *probe) connect(to netip.AddrPort) {
	address := unix.Sockaddr(&unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
	if to.Addr().Is4() {
		address = &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	if err := unix.Connect(pr.fd, address); !errors.Is(err, unix.EINPROGRESS) {
		pr.err = os.NewSyscallError("connect", err)
	}
}

func addrPort(at unix.Sockaddr) netip.AddrPort {
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(at.Addr).Unmap(), uint16(at.Port))
	}
	return netip.AddrPort{}
}

// landed tells of a probe that nobody reported whether the redirection brought
// it where it should nonetheless: to another agent, with which the listeners
// are shared during a hand-over, or to a queue of connections that wait to be
// accepted.
func (p *Pod) landed(pr *probe) (elsewhere, waits bool) {
	if p.queue != nil {
		// While there are two agents, their Service leads to either.
		info, err := unix.GetsockoptTCPInfo(pr.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		waits = len(p.queue.conns) > 0
		return !waits && err == nil && info.State == unix.BPF_TCP_ESTABLISHED, waits
	}
	for _, l := range p.sockets {
		conn, err := l.SyscallConn()
		if err != nil {
			continue
		}
		_ = conn.Control(func(fd uintptr) {
			// Of a socket that listens, what is unacknowledged is its queue.
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			waits = waits || err == nil && info.Unacked > 0
		})
	}
	return !waits && p.accepted(pr), waits
}

// accepted asks the kernel for the other end of a probe.
func (p *Pod) accepted(pr *probe) (found bool) {
	at, err := unix.Getsockname(pr.fd)
	if err != nil {
		return false
	}
	from := addrPort(at)
	family, near := uint8(unix.AF_INET), loopback4.AsSlice()
	if from.Addr().Is6() {
		family, near = unix.AF_INET6, loopback6.AsSlice()
	}
	var id [sizeofDiagID]byte
	binary.BigEndian.PutUint16(id[0:], p.port)
	binary.BigEndian.PutUint16(id[2:], from.Port())
	copy(id[4:], near)
	copy(id[20:], from.Addr().AsSlice())
	binary.NativeEndian.PutUint64(id[40:], ^uint64(0)) // whatever its cookie
	_ = inNetNS(p.netns, func() error {
		request := nl.NewNetlinkRequest(unix.SOCK_DIAG_BY_FAMILY, 0)
		request.AddRawData(diagRequest(family, id))
		return request.ExecuteIter(unix.NETLINK_INET_DIAG, 0, func(message []byte) bool {
			c, ok := parseConnection(message) // the listener itself, if there is no such connection
			found = found || ok && c.remote.Port() == from.Port()
			return true
		})
	})
	return found
}

// ownPod is the uid of the pods that agents make for themselves, but for the
// agent's process id at its end. Uids that Kubernetes makes are never like it.
var ownPod uuid.UUID

func isOwnPod(uid uuid.UUID) bool {
	return [12]byte(uid[:]) == [12]byte(ownPod[:])
}

// isGone tells whether a uid is of an agent's own pod, and the agent is gone.
func isGone(uid uuid.UUID) bool {
	if !isOwnPod(uid) {
		return false
	}
	pid := binary.BigEndian.Uint32(uid[12:])
	return errors.Is(unix.Kill(int(pid), 0), unix.ESRCH)
}

// makeOwn captures a network namespace with nothing in it but lo.
func (n *node) makeOwn() error {
	if n.health.own != nil || n.ways[0].mode() == Address {
		return nil
	}
	netns, err := newNetNS()
	if err != nil {
		return err
	}
	p := &Pod{uid: ownPod, node: n, way: n.ways[0], netns: netns}
	binary.BigEndian.PutUint32(p.uid[12:], uint32(os.Getpid()))
	if err := p.open(nil); err != nil {
		return errors.Join(err, p.closeFiles())
	}
	n.health.own = p
	return nil
}

// acceptOwn takes what waits to be accepted.
func (p *Pod) acceptOwn() {
	for _, l := range p.sockets {
		conn, err := l.SyscallConn()
		if err != nil {
			continue
		}
		_ = conn.Control(func(fd uintptr) {
			for {
				accepted, from, err := unix.Accept4(int(fd), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
				if err != nil {
					return
				}
				p.vitals.takes(int(addrPort(from).Port()))
				_ = unix.SetsockoptLinger(accepted, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
				_ = unix.Close(accepted)
			}
		})
	}
}

// closeHealth ends all probes and the agent's own pod.
func (n *node) closeHealth() []error {
	for _, p := range n.health.probing {
		if p.vitals.probe != nil {
			p.vitals.end()
		}
	}
	own := n.health.own
	if own == nil {
		return nil
	}
	n.health.own = nil
	return []error{own.way.release(own), own.closeFiles()}
}
