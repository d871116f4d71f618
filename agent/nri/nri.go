package nri

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Socket is where runtimes offer the interface.
const Socket = "/run/nri/nri.sock"

const (
	// answerWithin is less than the 2 s after which a runtime disconnects a plugin.
	answerWithin = 1500 * time.Millisecond
	// startWithin bounds a registration.
	startWithin = 10 * time.Second
	// stableAfter is how long a connection lasts before the backoff starts over.
	stableAfter = 15 * time.Second
)

var connectBackoff = wait.Backoff{Duration: 250 * time.Millisecond, Factor: 2, Jitter: 0.5, Cap: 15 * time.Second, Steps: math.MaxInt}

// Sandbox is the sandbox of a labelled pod that the mesh admitted.
type Sandbox struct {
	// ID is the runtime's name of it. Another sandbox of the same pod has another.
	ID  string
	Pod pods.Pod
}

// Handler receives sandboxes. Its methods return when ctx ends, at the latest.
type Handler interface {
	// Started is called before a sandbox has a container. The runtime waits.
	Started(ctx context.Context, s Sandbox)
	// Stopped is called when the containers of a sandbox have exited for good, and again
	// when it is removed: the pod may have another sandbox by then.
	Stopped(ctx context.Context, s Sandbox)
	// Synchronize receives all sandboxes after each registration, in any order. With runtimes that
	// do not say which have exited, those are among them.
	Synchronize(ctx context.Context, all []Sandbox)
}

// Run registers with the runtime at socket, and again after each failure until ctx ends. It calls tried
// once, after the first registration or the first failure.
func Run(ctx context.Context, socket string, h Handler, logger *slog.Logger, tried func()) {
	logged := false
	tried = sync.OnceFunc(tried)
	for backoff := connectBackoff; ctx.Err() == nil; {
		start := time.Now()
		err := connect(ctx, socket, h, logger, tried)
		if ctx.Err() != nil {
			return
		}
		tried()
		if time.Since(start) > stableAfter {
			backoff, logged = connectBackoff, false
		}
		if !logged {
			logged = true
			logger.Info("no NRI connection to the container runtime: pods are captured shortly after they start", "reason", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(backoff.Step()):
		}
	}
}

// connect registers and answers until the runtime or ctx ends.
func connect(ctx context.Context, socket string, h Handler, logger *slog.Logger, tried func()) error {
	conn, err := (&net.Dialer{Timeout: startWithin}).DialContext(ctx, "unix", socket)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("no listener at %s", socket)
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	lost := make(chan struct{})
	s, err := stub.New(&plugin{h},
		stub.WithLogger(quiet{logger}), stub.WithPluginName("ctrlmesh"), stub.WithPluginIdx("10"),
		stub.WithConnection(conn), stub.WithOnClose(sync.OnceFunc(func() { close(lost) })))
	if err != nil {
		return fmt.Errorf("creating the plugin: %w", err)
	}
	started := make(chan error, 1)
	// Start does not end with its context, nor, at times, with its connection.
	go func() { started <- s.Start(ctx) }()
	select {
	case err = <-started:
	case <-time.After(startWithin):
		err = errors.New("no answer")
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("registering: %w", err)
	}
	logger.Info("connected to the container runtime (NRI)")
	tried()
	select {
	case <-lost:
		return errors.New("the runtime closed the connection")
	case <-ctx.Done():
		s.Stop()
		return ctx.Err()
	}
}

// plugin answers the runtime. It never rejects a sandbox: a pod that could not be captured
// trusts the mesh CA alone, and so cannot reach the apiserver.
type plugin struct{ handler Handler }

// Synchronize implements stub.SynchronizeInterface.
func (p *plugin) Synchronize(ctx context.Context, all []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	var known []Sandbox
	for _, s := range all {
		if b, ok := labelled(s); ok && !exited(s, containers) {
			known = append(known, b)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	p.handler.Synchronize(ctx, known)
	return nil, nil
}

// RunPodSandbox implements stub.RunPodInterface.
func (p *plugin) RunPodSandbox(ctx context.Context, s *api.PodSandbox) error {
	p.notify(ctx, s, p.handler.Started)
	return nil
}

// StopPodSandbox implements stub.StopPodInterface.
func (p *plugin) StopPodSandbox(ctx context.Context, s *api.PodSandbox) error {
	p.notify(ctx, s, p.handler.Stopped)
	return nil
}

// RemovePodSandbox implements stub.RemovePodInterface: not every sandbox is
// stopped before it is removed.
func (p *plugin) RemovePodSandbox(ctx context.Context, s *api.PodSandbox) error {
	p.notify(ctx, s, p.handler.Stopped)
	return nil
}

func (p *plugin) notify(ctx context.Context, s *api.PodSandbox, handle func(context.Context, Sandbox)) {
	if s, ok := labelled(s); ok {
		ctx, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		handle(ctx, s)
	}
}

// labelled returns the sandbox of a pod that has the label of the mesh, and the annotation
// that only admission writes.
func labelled(s *api.PodSandbox) (Sandbox, bool) {
	trust := s.GetAnnotations()[v1alpha1.TrustAnnotation]
	if s.GetLabels()[v1alpha1.EnableProxyLabel] != "true" || trust == "" || s.GetUid() == "" {
		return Sandbox{}, false
	}
	var addresses []netip.Addr
	for _, ip := range s.GetIps() { // some runtimes send none
		if at, err := netip.ParseAddr(ip); err == nil {
			addresses = append(addresses, at.Unmap())
		}
	}
	return Sandbox{ID: s.GetId(), Pod: pods.Pod{
		UID: s.GetUid(), Namespace: s.GetNamespace(), Name: s.GetName(),
		Trust:       trust,
		Capture:     s.GetAnnotations()[v1alpha1.CaptureAnnotation],
		Addresses:   addresses,
		HostNetwork: hostNetwork(s),
	}}, true
}

// hostNetwork reports whether a sandbox has no network namespace of its own.
func hostNetwork(s *api.PodSandbox) bool {
	return !slices.ContainsFunc(s.GetLinux().GetNamespaces(), func(ns *api.LinuxNamespace) bool { return ns.GetType() == "network" })
}

// exited reports whether a sandbox seems to have exited: containerd leaves out its network namespace
// then, and its process. Runtimes that start no process for a sandbox look so under hostNetwork, too.
func exited(s *api.PodSandbox, containers []*api.Container) bool {
	return hostNetwork(s) && s.GetPid() == 0 && !slices.ContainsFunc(containers, func(c *api.Container) bool {
		return c.GetPodSandboxId() == s.GetId() && c.GetState() == api.ContainerState_CONTAINER_RUNNING
	})
}

// quiet logs the messages of the stub at debug level.
type quiet struct{ *slog.Logger }

func (q quiet) Debugf(ctx context.Context, format string, args ...any) { q.say(ctx, format, args) }
func (q quiet) Infof(ctx context.Context, format string, args ...any)  { q.say(ctx, format, args) }
func (q quiet) Warnf(ctx context.Context, format string, args ...any)  { q.say(ctx, format, args) }
func (q quiet) Errorf(ctx context.Context, format string, args ...any) { q.say(ctx, format, args) }
func (q quiet) say(ctx context.Context, format string, args []any) {
	q.DebugContext(ctx, "nri: "+fmt.Sprintf(format, args...))
}
