// Package capture brings a pod's connections to the apiserver to the agent.
//
// The agent opens listeners in the network namespace of each captured pod, on 127.0.0.1
// and ::1. Connections to a listed destination are redirected to them: by BPF when the
// process connects, or by iptables in the pod's namespace. The listener that accepted a
// connection identifies the pod. Connections that the agent makes for a pod (see
// [Pod.DialContext]) leave from the pod's own address, so the pod's network policies apply.
// Where a node allows neither, a pod can be created with the agent's own address for that
// of the apiserver: then the pod's address identifies it.
//
// Connections to other hosts are not redirected, unless [Pod.SetEgress] names ports: then
// they arrive at listeners of their own, under the same rules.
//
// A captured pod stays captured. Listeners are opened before the redirection, and an
// earlier agent's redirection stays until the new one replaces it atomically. Without an
// agent the connections are refused, except those of pods that fail open. A running agent
// passes its listeners to the next one, so that no connection is refused in a takeover.
// Connections from before the capture are ended.
//
// The process needs CAP_SYS_ADMIN to enter a network namespace (it includes CAP_BPF),
// CAP_NET_ADMIN to load and attach the programs, to mark and end sockets and for iptables
// (that of nftables), and read access to the paths that name the namespaces (for
// /proc/PID/ns/net of another user's process CAP_SYS_PTRACE). Package bpf documents the
// kernels that it supports; on earlier ones only iptables works.
package capture

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// Mode is a capture mode.
type Mode string

const (
	// Auto is EBPF where it works, else IPTables. It is never Address, which requires a pod
	// that was created for it.
	Auto Mode = ""
	// EBPF redirects when a process connects: nothing in the pod's network namespace
	// changes, and no packet passes connection tracking.
	EBPF Mode = "ebpf"
	// IPTables redirects by nat rules in the pod's network namespace.
	IPTables Mode = "iptables"
	// Address redirects nothing: the pod was created with the address of its node's agent
	// for that of the apiserver, and its own address identifies it.
	Address Mode = "address"
)

// Config configures the capture of pods.
type Config struct {
	// Mode is the one mode to open; Auto opens all that work.
	Mode Mode

	// Address is the host:port to listen on, in the agent's own network namespace, for the
	// pods captured by Address. If empty, that mode is not open.
	Address string
	// Refused, if not nil, is called for each connection that was closed, to Address or
	// to the listener of a pod under hostNetwork. It must not block.
	Refused func(peer netip.Addr, why Refusal)
	// Lapsed, if not nil, is called when the agent gives a sign of life again, after none for
	// so long that connections may have bypassed it. It must not block.
	Lapsed func()

	// CgroupRoot is the root of the node's unified cgroup hierarchy, or a part of it that
	// has all pods. EBPF requires it: it redirects the connections of processes below it.
	CgroupRoot string
	// PinDir is a directory on a bpffs. It is created if it does not exist.
	PinDir string

	Logger *slog.Logger // slog.Default() if nil
}

// Refusal is why a connection was closed.
type Refusal string

// Refusals.
const (
	Stranger       Refusal = "stranger"        // no captured pod has the peer's address
	QueueFull      Refusal = "queue_full"      // too many connections of the pod wait to be accepted
	ForeignProcess Refusal = "foreign_process" // no process of the pod under hostNetwork made it
)

// Request asks for a pod to be captured.
type Request struct {
	// UID of the pod.
	UID string
	// NetNS names the pod's network namespace (/proc/PID/ns/net, /run/netns/NAME).
	NetNS string
	// Mode is the capture mode; Auto for the first that works on this node.
	Mode Mode
	// HostNetwork is true for a pod without a network namespace of its own.
	HostNetwork bool
	// Cgroup is the id of the pod's cgroup in the unified hierarchy: the inode of its
	// directory. It distinguishes the pod's connections from those that agents make for it,
	// and the pod from others under hostNetwork.
	Cgroup uint64
	// Addresses identify a pod that is captured by Address, as the API or the runtime names
	// them. If there are none, they are read once in NetNS. That is safe only before a
	// container of the pod runs, which could assume another pod's address.
	Addresses []netip.Addr
	// FailOpen lets the pod's connections go direct while no agent serves it, where the
	// capture mode can detect that.
	FailOpen bool
	// Egress are the ports that [Pod.SetEgress] is expected to get. They are redirected as
	// soon as the pod is captured, unless an earlier agent's redirection by the same mode
	// stays until SetEgress. SetEgress returns the error if that fails.
	Egress []uint16
	// Files are the listeners of the agent that passes the pod on; nil without one. Capture
	// closes them in any case.
	Files *Files
}

// Loss is a redirection that had no effect when it was checked.
type Loss struct {
	// UID of the pod; empty for the redirection of the whole node.
	UID  string
	Mode Mode
	// Reason is what was wrong.
	Reason error
	// Repair is why it is still wrong; nil once it is repaired.
	Repair error
}

// Backend captures pods. It is safe for concurrent use.
type Backend interface {
	// Modes returns the modes that work on this node, the best first; at least one.
	Modes() []Mode

	// Unavailable returns why other modes do not work here.
	Unavailable() map[Mode]error

	// HostNetwork returns why pods under hostNetwork cannot be captured, nil if they can.
	HostNetwork() error

	// SetDestinations replaces the addresses whose connections are redirected, for every
	// pod captured now and later. agents are the addresses of the agents' own Service, which
	// are redirected unless the pod is captured by Address. Addresses that stay in the sets
	// are redirected throughout. An empty set of apiservers is an error: it would let every
	// pod go direct.
	SetDestinations(apiservers, agents []netip.AddrPort) error

	// Capture captures a pod before it returns. It takes over the redirection of an earlier
	// agent, and ends the pod's direct connections. Capturing a captured pod again returns
	// the same Pod, unless the pod has another network namespace by now: then the earlier
	// Pod is released. Destinations must have been set. Unless HostNetwork is set, a pod in
	// the agent's own network namespace or the node's is rejected with ErrHostNetwork.
	Capture(Request) (*Pod, error)

	// Check probes the redirections and returns those without effect, after it tried to
	// repair them. It does not wait for its probes: a later call returns the loss, once if it
	// was repaired, else every time. While probes arrive, the agent counts as alive for pods
	// that fail open, so it must be called every CheckInterval at least.
	//
	// Without repair it is the sign of life only, while another agent is about to take over:
	// that one repairs.
	Check(repair bool) []Loss

	// CheckInterval returns the longest time between checks. It is shorter while a pod's redirection is
	// damaged, because each check starts one repair.
	CheckInterval() time.Duration

	// Sweep releases the captured pods that keep does not report, and removes what earlier
	// agents left of such pods: their connections go direct. keep must report every pod of
	// the node that any agent is to capture, and must not call the Backend.
	Sweep(keep func(uid string) bool) error

	// Close closes all listeners and network namespaces. The redirections stay: connections
	// are refused until an agent captures the pods again. Pods that fail open go direct.
	Close() error
}

// The longest time between checks, without and with damage.
const (
	calmInterval   = 500 * time.Millisecond
	urgentInterval = 250 * time.Millisecond
)

// ErrHostNetwork means that a pod has no network namespace of its own.
var ErrHostNetwork = netns.ErrHostNetwork

// Open opens the capture modes that work on this node. It finds out by trying: it loads and
// attaches the BPF programs, and makes rules in a network namespace of its own. In Auto mode
// any one mode is enough; a mode that was asked for must work.
func Open(cfg Config) (Backend, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Refused == nil {
		cfg.Refused = func(netip.Addr, Refusal) {}
	}
	if cfg.Lapsed == nil {
		cfg.Lapsed = func() {}
	}
	n := &node{cfg: cfg, rotation: rotation, unavailable: map[Mode]error{}, pods: map[string]*Pod{}}
	n.health.node = n
	if err := n.open(); err != nil {
		return nil, fmt.Errorf("opening capture mode %q: %w", cfg.Mode, errors.Join(err, n.Close()))
	}
	return n, nil
}

// Cleanup removes every trace of capture from the node: pins, links, and the rules in the
// network namespaces that netnsPaths name. Captured pods go direct from then on.
func Cleanup(pinDir string, netnsPaths ...string) error {
	return errors.Join(bpf.Remove(pinDir), iptables.ForgetAll(netnsPaths))
}
