// Package inbound brings connections from outside a pod to ports of the pod to the agent,
// such as those of the apiserver to a webhook.
//
// The agent opens listeners in the pod's network namespace, on 127.0.0.1 and ::1, and a
// program steers connections to them when they arrive. No address is rewritten: the local
// address of an accepted connection is the one that the client connected to. Connections
// from the pod itself reach the application, and so do those that the agent makes in the
// pod's network namespace.
//
// A port is steered only while the application listens at it, so that a probe of the port
// fails when the application does. The kernel has no way to find that out where the program
// runs: [Node.Check] asks it for the application's socket instead. Without an agent, or with
// one that gives no sign of life, connections reach the application directly. They are ended
// when an agent steers again. A running agent passes its listeners to the next one, so that no
// connection is refused in a takeover.
//
// The process needs CAP_SYS_ADMIN to enter a network namespace, and CAP_NET_ADMIN to attach
// the program. The kernel must be 5.9 or later. Pods under hostNetwork are rejected: their
// ports are the node's.
package inbound

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// MaxPorts bounds the ports of one pod.
const MaxPorts = 16

// Request asks for the inbound connections of a pod.
type Request struct {
	// UID of the pod.
	UID string
	// NetNS names the pod's network namespace (/proc/PID/ns/net, /run/netns/NAME).
	NetNS string
	// Ports are those at which the application listens, or will.
	Ports []uint16
	// Files are the listeners of the agent that passes the pod on; none without one. Capture
	// closes them in any case.
	Files []*os.File
}

// Node captures the inbound connections of pods. It is safe for concurrent use.
type Node struct {
	inbound   *bpf.Inbound
	log       *slog.Logger
	endFor    time.Duration
	endWithin time.Duration

	lapsed atomic.Bool // since the last Check

	mu        sync.Mutex
	pods      map[uuid.UUID]*Pod
	cannotEnd bool // the kernel cannot end connections
}

// Open opens the capture of this node. pinDir is that of the capture of outbound
// connections. The error is a [bpf.ErrUnsupported] if the kernel cannot do it.
func Open(pinDir string, log *slog.Logger) (*Node, error) {
	inbound, err := bpf.OpenInbound(pinDir)
	if err != nil {
		return nil, fmt.Errorf("opening the capture of inbound connections: %w", err)
	}
	return &Node{inbound: inbound, log: log, endFor: endFor, endWithin: endWithin, pods: map[uuid.UUID]*Pod{}}, nil
}

// Capture captures the inbound connections of a pod. It takes over the steering of an
// earlier agent. Capturing a captured pod again returns the same Pod with these ports,
// unless the pod has another network namespace by now: then the earlier Pod is released.
func (n *Node) Capture(r Request) (*Pod, error) {
	defer closeFiles(r.Files)
	p, err := n.capture(r)
	return p, failure.Wrap(err, "capturing inbound connections of pod %s", r.UID)
}

func (n *Node) capture(r Request) (*Pod, error) {
	uid, err := uuid.Parse(r.UID)
	if err != nil {
		return nil, fmt.Errorf("invalid uid: %w", err)
	}
	ports, err := portSet(r.Ports)
	if err != nil {
		return nil, err
	}
	namespace, err := netns.Open(r.NetNS, false)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if earlier := n.pods[uid]; earlier != nil {
		if netns.Same(earlier.netns, namespace) {
			namespace.Close()
			return earlier, earlier.setPorts(ports)
		}
		if err := earlier.release(); err != nil {
			n.log.Warn("failed to release a pod's earlier network namespace", "pod", uid, "error", err)
		}
	}
	p := &Pod{uid: uid, node: n, netns: namespace, ports: ports}
	if err := p.open(r.Files); err != nil {
		return nil, errors.Join(err, p.close())
	}
	n.pods[uid] = p
	return p, nil
}

func portSet(ports []uint16) ([]uint16, error) {
	ports = slices.Compact(slices.Sorted(slices.Values(ports)))
	switch {
	case len(ports) > MaxPorts:
		return nil, fmt.Errorf("%d ports are more than the limit of %d per pod", len(ports), MaxPorts)
	case len(ports) > 0 && ports[0] == 0:
		return nil, errors.New("invalid port 0")
	}
	return ports, nil
}

// Beat is the agent's sign of life, without which connections reach the applications after
// two seconds. It is also that of the outbound connections captured by BPF: an agent that
// captures those calls the Check of their Backend instead, which beats only while probes arrive.
func (n *Node) Beat() {
	if n.inbound.Beat() {
		n.NoteLapse()
	}
}

// NoteLapse notes that no agent gave a sign of life for so long that clients may have
// connected to the applications. An agent that does not call [Node.Beat] calls it when its
// Backend reports a lapse. It does not block.
func (n *Node) NoteLapse() { n.lapsed.Store(true) }

// Check steers the ports at which applications listen, and no others. It restores what was
// removed from outside, and ends connections that were made while no agent steered them, for as
// many pods as there is time for. The next call continues. Call it each [Node.CheckInterval]:
// until then the listener of an application that stopped still accepts connections.
func (n *Node) Check() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.lapsed.Swap(false) {
		for _, p := range n.pods {
			p.noteDirect()
		}
	}
	var errs []error
	var direct []*Pod
	for uid, p := range n.pods {
		err := p.check()
		if err == nil && !p.direct.IsZero() {
			direct = append(direct, p)
		}
		errs = append(errs, failure.Wrap(err, "checking inbound connections of pod %s", uid))
	}
	slices.SortFunc(direct, func(a, b *Pod) int { return a.searched.Compare(b.searched) })
	until := time.Now().Add(n.endFor)
	for _, p := range direct {
		errs = append(errs, failure.Wrap(p.endDirect(until), "ending direct connections of pod %s", p.uid))
		if !time.Now().Before(until) {
			break
		}
	}
	return errors.Join(errs...)
}

// CheckInterval returns the longest time between checks.
func (n *Node) CheckInterval() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.pods) == 0 {
		return 500 * time.Millisecond
	}
	return 250 * time.Millisecond
}

// Sweep releases the captured pods that keep does not report, and removes what earlier
// agents left of such pods. keep must report every pod of the node that any agent is to
// capture, and must not call the Node.
func (n *Node) Sweep(keep func(uid string) bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	for uid, p := range maps.Clone(n.pods) {
		if !keep(uid.String()) {
			errs = append(errs, p.release())
		}
	}
	errs = append(errs, n.inbound.Sweep(func(uid [16]byte) bool { return keep(uuid.UUID(uid).String()) }))
	return errors.Join(errs...)
}

// Close closes all listeners and network namespaces. Connections reach the applications
// until an agent captures the pods again.
func (n *Node) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	for _, p := range n.pods {
		errs = append(errs, p.close())
	}
	clear(n.pods)
	return errors.Join(append(errs, n.inbound.Close())...)
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
