package agent

import (
	"cmp"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/kube"
	"github.com/ctrlmesh/ctrlmesh/agent/nri"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// Dirs are the directories of an agent, as this process sees them.
type Dirs struct {
	// StateDir keeps the last policies across restarts and reboots.
	StateDir string
	// RunDir keeps the serving certificate across restarts, and the socket by which one
	// agent takes over from another. It should be in memory.
	RunDir string
	// PodDir exists as long as the pod of this agent. It must be in memory. If empty, each
	// start counts as that of another pod.
	PodDir string
	// CgroupDir is the node's /sys/fs/cgroup.
	CgroupDir string
	// BPFDir is the node's BPF file system, usually /sys/fs/bpf.
	BPFDir string
}

// Options configure an agent.
type Options struct {
	// Node is the name of this node.
	Node string
	// Namespace is that of the mesh, where the manager publishes its CA.
	Namespace string
	// ManagerAddress is host:port of the manager's Service.
	ManagerAddress string
	// TokenFile holds a service-account token with the audience ctrlmesh-manager.
	TokenFile string
	Dirs
	// Capture is ebpf, iptables or address; empty for the best that works.
	Capture capture.Mode
	// AddressListen is the address for pods in capture mode address; empty for none.
	AddressListen string
	// NRISocket is the socket of the container runtime.
	NRISocket string
	// WatchMemory bounds the memory of one pod's watches, in bytes (see proxy.Config).
	WatchMemory int64
	// ListenAddress serves /healthz, /readyz and /metrics.
	ListenAddress string
	// Version of this program.
	Version string
	Client  *kube.Client
	Logger  *slog.Logger
}

// AddFlags adds a flag for each option that users set. Environment variables that the
// DaemonSet sets are the defaults of --node and --namespace.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Node, "node", os.Getenv("NODE_NAME"), "name of this node")
	fs.StringVar(&o.Namespace, "namespace", cmp.Or(os.Getenv("POD_NAMESPACE"), "ctrlmesh-system"), "the mesh's own namespace")
	fs.StringVar(&o.ManagerAddress, "manager", "ctrlmesh-manager.ctrlmesh-system.svc:8443", "host:port of the manager's Service")
	fs.StringVar(&o.TokenFile, "token-file", "/var/run/secrets/ctrlmesh/token", "service-account token for the manager")
	fs.StringVar(&o.StateDir, "state-dir", "/var/lib/ctrlmesh", "keeps the last policies")
	fs.StringVar(&o.RunDir, "run-dir", "/run/ctrlmesh", "keeps the serving certificate and the agents' own socket; in memory")
	fs.StringVar(&o.PodDir, "pod-dir", "", "kept over restarts of the container, by its pod alone; in memory")
	fs.StringVar(&o.CgroupDir, "cgroup-dir", "/host/sys/fs/cgroup", "the node's /sys/fs/cgroup")
	fs.StringVar(&o.BPFDir, "bpf-dir", "/sys/fs/bpf", "the node's BPF file system")
	fs.Func("capture", "capture mode of pods that do not name one: ebpf, iptables, address, or auto for the first that works (default auto)", o.setCapture)
	fs.StringVar(&o.AddressListen, "address-listen", ":6443", "where pods in capture mode address reach their agent; empty for nowhere")
	fs.StringVar(&o.NRISocket, "nri-socket", nri.Socket, "where the container runtime reports pods")
	o.WatchMemory = pipeline.DefaultWatchMemory
	fs.Func("watch-memory", "memory for the watches and other lasting requests of one pod, if no other pod uses as much (default "+quantity(o.WatchMemory)+")", o.setWatchMemory)
	fs.StringVar(&o.ListenAddress, "listen", ":9090", "address of /healthz, /readyz and /metrics")
}

func (o *Options) setCapture(mode string) error {
	switch m := capture.Mode(mode); m {
	case "auto":
		o.Capture = capture.Auto
	case capture.EBPF, capture.IPTables, capture.Address:
		o.Capture = m
	default:
		return errors.New("use ebpf, iptables, address or auto")
	}
	return nil
}

func (o *Options) setWatchMemory(text string) error {
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return err
	}
	if q.Value() < pipeline.OwnLong {
		return errors.New("use at least " + quantity(pipeline.OwnLong))
	}
	o.WatchMemory = q.Value()
	return nil
}

func quantity(bytes int64) string { return resource.NewQuantity(bytes, resource.BinarySI).String() }

// PinDir returns where the redirection is pinned below a BPF file system.
func PinDir(bpfDir string) string { return filepath.Join(bpfDir, "ctrlmesh") }

// socket is where the agent that serves answers its successor. Agents of other versions
// use the same path.
func (o Options) socket() string { return filepath.Join(o.RunDir, "handover", "agent.sock") }

// findPods returns the unified cgroup hierarchy of the node, and what locates pods in it.
func (o Options) findPods() (unified string, locator *pods.Locator, err error) {
	if unified, err = pods.FindUnified(o.CgroupDir); err != nil {
		return
	}
	locator, err = pods.NewLocator(unified, "/proc")
	return
}

// captureConfig returns the configuration of the capture below a cgroup hierarchy.
func (o Options) captureConfig(unified string, m *telemetry.Metrics) capture.Config {
	return capture.Config{
		Mode: o.Capture, Address: o.AddressListen, PinDir: PinDir(o.BPFDir), Logger: o.Logger,
		// The node's view of the hierarchy, which on nodes that are containers is a part
		// of the machine's. NewLocator has found pods below it.
		CgroupRoot: unified,
		// Anybody in the cluster can connect: a line for each would flood the log.
		Refused: func(peer netip.Addr, why capture.Refusal) {
			m.RefusedCapture(why)
			o.Logger.Debug("a connection was closed", "peer", peer, "reason", string(why))
		},
	}
}
