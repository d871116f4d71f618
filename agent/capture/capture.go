// Package capture brings a pod's connections to the apiserver to the agent.
//
// The agent opens listeners inside the network namespace of each captured pod,
// on 127.0.0.1 and ::1, and connections to a listed destination are redirected
// to them: by BPF at the connect, or by iptables in the pod's namespace. So the
// listener a connection came in by is the pod's identity, and the connections
// that the agent makes for a pod (see [Pod.DialContext]) leave from the pod's
// own address, under the pod's own network policies. Where a node allows
// neither, a pod can be made to look for the apiserver at the agent's own
// address: then the address that it comes from is its identity.
//
// What a pod connects to elsewhere goes its own way, unless [Pod.SetEgress] names
// ports: then it comes in by listeners of its own, under the same rules.
//
// A captured pod stays captured. Listeners come before the redirection, an
// earlier agent's redirection stays until the new one replaces it at once, and
// without an agent the connections are refused, but for pods that fail open. An
// agent that is there when the next one comes hands its listeners over, so that
// nothing is refused in between. What a pod had connected before it was captured
// is ended.
//
// What the process needs: CAP_SYS_ADMIN to enter a network namespace (it
// includes CAP_BPF), CAP_NET_ADMIN to load and attach the programs, to mark
// and end sockets and for iptables (that of nftables), and read access to the paths
// that name the namespaces (for /proc/PID/ns/net of another user's process
// CAP_SYS_PTRACE). Package bpf says which kernels it needs; on earlier ones only
// iptables is possible.
package capture

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// Mode is a capture mode.
type Mode string

const (
	// Auto is EBPF where it works, else IPTables. It is never Address: that takes a
	// pod that was made for it.
	Auto Mode = ""
	// EBPF redirects at the connect: nothing in the pod's network namespace
	// changes and no packet passes through connection tracking.
	EBPF Mode = "ebpf"
	// IPTables redirects by nat rules in the pod's network namespace.
	IPTables Mode = "iptables"
	// Address redirects nothing: the pod was created with the address of its
	// node's agent for that of the apiserver, and is known by its own address.
	Address Mode = "address"
)

// DefaultPinDir is where the redirection by BPF is pinned.
const DefaultPinDir = "/sys/fs/bpf/ctrlmesh"

// Config says how pods are captured. The zero value suits a usual node.
type Config struct {
	// Mode is the one mode to open; Auto opens all that work.
	Mode Mode

	// Address is the host:port to listen on, in the agent's own network namespace,
	// for the pods captured by Address. If empty, that mode is not open.
	Address string
	// Refused, if not nil, is called for each connection that was closed, to Address or
	// to the listener of a pod under hostNetwork. It must not block.
	Refused func(peer netip.Addr, why Refusal)

	// CgroupRoot is the root of the node's unified cgroup hierarchy, or a part of it
	// in which all pods are. EBPF needs it, for it redirects what is made below it.
	CgroupRoot string
	// PinDir is a directory on a bpffs, DefaultPinDir if empty. It is made if need be.
	PinDir string

	// IPTables is the variant of iptables: "nft", or empty for the system's default,
	// which must be that.
	IPTables string

	Logger *slog.Logger // slog.Default() if nil
}

// Refusal is why a connection was closed.
type Refusal string

// Refusals.
const (
	Stranger  Refusal = "stranger"   // no captured pod has the peer's address
	QueueFull Refusal = "queue_full" // nobody accepts what the pod connected before
	// ForeignProcess: it came to a pod under hostNetwork, and not from one of its processes.
	ForeignProcess Refusal = "foreign_process"
)

// Request asks for a pod to be captured.
type Request struct {
	// UID of the pod.
	UID string
	// NetNS names the pod's network namespace (/proc/PID/ns/net, /run/netns/NAME).
	NetNS string
	// Mode is the capture mode; Auto for the first that works on this node.
	Mode Mode
	// HostNetwork is for a pod without a network namespace of its own.
	HostNetwork bool
	// Cgroup is the id of the pod's cgroup in the unified hierarchy: the inode of
	// its directory. It tells the pod's connections from those that agents make for
	// it, and the pod itself from others under hostNetwork.
	Cgroup uint64
	// Addresses are what a pod captured by Address is known by, as the API or the
	// runtime says. Without them they are looked for in NetNS, once: that must be
	// before a container of the pod runs, which could give itself another's.
	Addresses []netip.Addr
	// FailOpen lets the pod go direct while no agent serves it, where the way of
	// capture can tell.
	FailOpen bool
	// Egress are the ports that [Pod.SetEgress] may be told: they are redirected as soon
	// as the pod is captured, unless an earlier agent redirected in the same way what
	// stays so until then. If that cannot be, SetEgress will say why.
	Egress []uint16
	// Handed is what an agent that hands the pod over had of it; nil without one.
	// It is taken over, whatever Capture returns.
	Handed *Handed
}

// Handed is what one agent hands to the next, so that no connection is refused
// in between.
type Handed struct {
	Listeners []*os.File
	Egress    []*os.File // those of [Pod.SetEgress]
}

// Loss is a redirection that had no effect when it was looked at.
type Loss struct {
	// UID of the pod; empty for that of the whole node.
	UID  string
	Mode Mode
	// Reason says what was wrong.
	Reason error
	// Repair is why it still is; nil when it was mended.
	Repair error
}

// Backend captures pods. It is safe for concurrent use.
type Backend interface {
	// Modes returns the modes that work on this node, the best first; at least one.
	Modes() []Mode

	// Unavailable returns why the other modes that were to be opened do not work here.
	Unavailable() map[Mode]error

	// HostNetwork is nil where pods under hostNetwork can be captured, else the reason.
	HostNetwork() error

	// SetDestinations makes apiservers the whole set of addresses whose
	// connections are redirected, for every pod captured now and later, and agents
	// the addresses of the agents' own Service, which are redirected too unless the
	// pod is captured by Address. What stays in the sets is redirected throughout.
	// An empty set of apiservers would let every pod go direct and is refused.
	SetDestinations(apiservers, agents []netip.AddrPort) error

	// Capture captures a pod. What an earlier agent left there is taken over. What
	// the pod had connected before, it is made to connect again. Capturing a
	// captured pod again returns the same Pod, unless the pod has got another
	// network namespace since: then the earlier Pod is released.
	//
	// Destinations must have been set before: a pod is captured when Capture
	// returns, not later. Unless HostNetwork is said, a pod in the agent's own
	// network namespace or the node's is refused with ErrHostNetwork.
	Capture(Request) (*Pod, error)

	// Check makes connections through the redirections in force and tells which
	// did not arrive, after it tried to mend them. While checks arrive, the agent
	// counts as alive for pods that fail open: it is to be called at least every
	// CheckInterval. It does not wait for what it begins: a loss is told by a later
	// call, once if it was mended, by every call while it is not.
	//
	// Without mend it is but the sign of life, for as long as another agent is about
	// to take over: that one mends.
	Check(mend bool) []Loss

	// Sweep releases the captured pods that keep does not know, and forgets what
	// earlier agents left of such pods: they go direct. keep must know every pod
	// of the node that is to be captured, whichever agent does, and must not call
	// the Backend.
	Sweep(keep func(uid string) bool) error

	// Close closes all listeners and lets go of the network namespaces. The
	// redirections stay: connections are refused until an agent captures the pods
	// anew. Pods that fail open go direct.
	Close() error
}

// CheckInterval is the longest time between checks.
const CheckInterval = 250 * time.Millisecond

// ErrHostNetwork means that a pod has no network namespace of its own.
var ErrHostNetwork = errors.New("the pod has no network namespace of its own")

// Open opens the capture modes that work on this node. It finds out by trying: it loads and
// attaches the BPF programs, and makes rules in a network namespace of its own. In Auto mode
// any one mode is enough; a mode that was asked for must work.
func Open(cfg Config) (Backend, error) {
	cfg = cfg.withDefaults()
	n := &node{cfg: cfg, rotation: rotation, unavailable: map[Mode]error{}, pods: map[string]*Pod{}}
	if err := n.open(); err != nil {
		return nil, fmt.Errorf("capture mode %q: %w", cfg.Mode, errors.Join(err, n.Close()))
	}
	return n, nil
}

// Cleanup removes every trace of capture from the node: pins,
// links, and the rules in the network namespaces that netnsPaths name. Pods
// captured until now go direct.
func Cleanup(cfg Config, netnsPaths ...string) error {
	cfg = cfg.withDefaults()
	errs := []error{bpf.Remove(cfg.PinDir)}
	if len(netnsPaths) > 0 {
		errs = append(errs, removeRules(cfg, netnsPaths))
	}
	return errors.Join(errs...)
}

func (cfg Config) withDefaults() Config {
	if cfg.PinDir == "" {
		cfg.PinDir = DefaultPinDir
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return cfg
}
