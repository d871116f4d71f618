package capture

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// Mode is a way of capture.
type Mode string

const (
	// Auto is EBPF where it works, else IPTables.
	Auto Mode = ""
	// EBPF redirects at the connect: nothing in the pod's network namespace
	// changes and no packet passes through connection tracking.
	EBPF Mode = "ebpf"
	// IPTables redirects by nat rules in the pod's network namespace.
	IPTables Mode = "iptables"
)

// DefaultPinDir is where the redirection by BPF is pinned.
const DefaultPinDir = "/sys/fs/bpf/ctrlmesh"

// Config says how pods are captured. The zero value suits a usual node.
type Config struct {
	Mode Mode

	// CgroupRoot is the root of the unified cgroup hierarchy; found if empty.
	CgroupRoot string
	// Subtree allows CgroupRoot to be a part of the hierarchy. Only sockets made
	// below it are redirected then: all pods must be.
	Subtree bool
	// PinDir is a directory on a bpffs, DefaultPinDir if empty. It is made if need be.
	PinDir string

	// IPTables is the variant of iptables: "nft", "legacy", or empty for the
	// system's default. It should be that of whatever else is in a pod's network
	// namespace, and must stay while a pod is captured.
	IPTables string

	Logger *slog.Logger // slog.Default() if nil
}

// Method captures pods. It is safe for concurrent use.
type Method interface {
	// Mode is the way that was chosen.
	Mode() Mode

	// SetDestinations makes destinations the whole set of addresses whose
	// connections are redirected, for every pod captured now and later. What
	// stays in the set is redirected throughout. An empty set would let every pod
	// go direct and is refused.
	SetDestinations(destinations []netip.AddrPort) error

	// Capture captures the pod with this uid, whose network namespace netnsPath
	// names (/proc/PID/ns/net, /run/netns/NAME). What an earlier agent left there
	// is taken over. Capturing a captured pod again returns the same Pod, unless
	// the pod has got another network namespace since: then the earlier Pod is
	// released.
	//
	// Destinations must have been set before: a pod is captured when Capture
	// returns, not later. A pod in the agent's own network namespace, as a pod under hostNetwork
	// would be, is refused with ErrHostNetwork.
	Capture(uid string, netnsPath string) (*Pod, error)

	// Sweep releases the captured pods that keep does not know, and forgets what
	// earlier agents left of such pods: they go direct. keep must know every pod
	// of the node that is to be captured, whichever agent does, and must not call
	// the Method.
	Sweep(keep func(uid string) bool) error

	// Close closes all listeners and lets go of the network namespaces. The
	// redirections stay: connections are refused until an agent captures the pods
	// anew.
	Close() error
}

// ErrHostNetwork means that a pod shares the agent's network namespace.
var ErrHostNetwork = errors.New("the pod is in the agent's own network namespace")

// Open makes the configured way of capture ready. In Auto mode it really loads
// and attaches the BPF programs, and takes iptables where the node does not
// allow that; the reason is logged.
func Open(cfg Config) (Method, error) {
	cfg = cfg.withDefaults()
	var r redirector
	var err error
	switch cfg.Mode {
	case EBPF:
		r, err = openEBPF(cfg)
	case IPTables:
		r, err = openIPTables(cfg)
	case Auto:
		if r, err = openEBPF(cfg); errors.Is(err, bpf.ErrUnsupported) {
			cfg.Logger.Warn("capturing by iptables", "reason", err)
			why := err
			if r, err = openIPTables(cfg); err != nil {
				err = errors.Join(why, err)
			}
		}
	default:
		err = errors.New("unknown mode")
	}
	if err != nil {
		return nil, fmt.Errorf("capture mode %q: %w", cfg.Mode, err)
	}
	return &node{redirector: r, pods: map[string]*Pod{}}, nil
}

// Cleanup removes every trace of both ways of capture from the node: pins,
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
