// Command ctrlmesh-agent is the mesh on one node.
//
//	ctrlmesh-agent [flags]          run
//	ctrlmesh-agent cleanup [flags]  remove every redirection from this node
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	_ "time/tzdata" // of fault rules; the image has no zones

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/ctrlmesh/ctrlmesh/agent"
	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/nri"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
)

// version is set by the linker.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends it at once
	// The log's other end is the container runtime's: its restart is not this program's end.
	signal.Ignore(syscall.SIGPIPE)
	if err := run(ctx, os.Args[1:]); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "ctrlmesh-agent:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	cleanup := len(args) > 0 && args[0] == "cleanup"
	if cleanup {
		args = args[1:]
	}
	c, err := parse(args, cleanup)
	if err != nil {
		return err
	}
	if c.printVersion {
		fmt.Println(version)
		return nil
	}
	o := c.options
	// Below debug the Kubernetes client logs bodies of requests.
	o.Logger = slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: max(c.level, slog.LevelDebug)}))
	slog.SetDefault(o.Logger)
	klog.SetSlogLogger(o.Logger)
	if cleanup {
		return agent.Cleanup(ctx, o, func() error {
			if !c.wait {
				return nil
			}
			return telemetry.ServeReady(ctx, o.ListenAddress)
		})
	}
	if o.Node == "" {
		return errors.New("--node is empty: set it, or NODE_NAME, to the name of this node")
	}
	if o.Client, err = newClient(); err != nil {
		return err
	}
	return agent.Run(ctx, o)
}

// command is a parsed command line.
type command struct {
	options      agent.Options
	level        slog.Level
	wait         bool
	printVersion bool
}

func parse(args []string, cleanup bool) (*command, error) {
	c := &command{options: agent.Options{Version: version}}
	o := &c.options
	var mode string
	fs := flag.NewFlagSet("ctrlmesh-agent", flag.ContinueOnError)
	fs.StringVar(&o.Node, "node", os.Getenv("NODE_NAME"), "name of this node")
	fs.StringVar(&o.Namespace, "namespace", envOr("POD_NAMESPACE", "ctrlmesh-system"), "the mesh's own namespace")
	fs.StringVar(&o.ManagerAddress, "manager", "ctrlmesh-manager.ctrlmesh-system.svc:8443", "host:port of the manager's Service")
	fs.StringVar(&o.TokenFile, "token-file", "/var/run/secrets/ctrlmesh/token", "service-account token for the manager")
	fs.StringVar(&o.StateDir, "state-dir", "/var/lib/ctrlmesh", "keeps the last policies")
	fs.StringVar(&o.RunDir, "run-dir", "/run/ctrlmesh", "keeps the serving certificate and the agents' own socket; in memory")
	fs.StringVar(&o.PodDir, "pod-dir", "", "kept over restarts of the container, by its pod alone; in memory")
	fs.StringVar(&o.CgroupDir, "cgroup-dir", "/host/sys/fs/cgroup", "the node's /sys/fs/cgroup")
	fs.StringVar(&o.BPFDir, "bpf-dir", "/sys/fs/bpf", "the node's BPF file system")
	fs.StringVar(&mode, "capture", "auto", "how pods are captured that do not say: ebpf, iptables, address, or auto for the first that works")
	fs.StringVar(&o.AddressListen, "address-listen", ":6443", "where pods that are captured by address find their agent; empty for nowhere")
	fs.StringVar(&o.NRISocket, "nri-socket", nri.Socket, "where the container runtime tells of pods")
	fs.StringVar(&o.ListenAddress, "listen", ":9090", "address of /healthz, /readyz and /metrics")
	fs.TextVar(&c.level, "log-level", slog.LevelInfo, "debug, info, warn or error; debug writes a line for each request")
	if cleanup {
		fs.BoolVar(&c.wait, "wait", false, "once clean, answer readiness probes until stopped: for a DaemonSet")
	}
	fs.BoolVar(&c.printVersion, "version", false, "print the version and exit")
	if err := fs.Parse(args); err != nil || c.printVersion {
		return c, err
	}
	switch mode {
	case "auto":
	case string(capture.EBPF), string(capture.IPTables), string(capture.Address):
		o.Capture = capture.Mode(mode)
	default:
		return nil, fmt.Errorf("--capture=%s: say ebpf, iptables, address or auto", mode)
	}
	return c, nil
}

func newClient() (kubernetes.Interface, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the apiserver: %w", err)
	}
	config.UserAgent = "ctrlmesh-agent/" + version
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making the apiserver client: %w", err)
	}
	return client, nil
}

func envOr(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}
