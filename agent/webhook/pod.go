// Package webhook keeps the connections to the webhooks of captured pods going through the
// agent: it reads a webhook's certificate from the pod's file system, and steers the
// connections to the agent while it can terminate them.
package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/inbound"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
	"github.com/ctrlmesh/ctrlmesh/agent/certdir"
)

const (
	// interval is how often the certificate is read.
	interval = time.Second
	// probeEvery is after how many of these the application is probed again.
	probeEvery = 10
	// firstTurn bounds how long connections wait that a predecessor passes on.
	firstTurn = time.Second
)

// Server terminates the connections.
type Server interface {
	SetCertificate(*tls.Certificate)
	// Probe connects to the application. It returns why its connections cannot be terminated,
	// nil if they can. ok is false if the application did not answer.
	Probe(ctx context.Context, at netip.AddrPort) (why error, ok bool)
	Serve(net.Listener) error
}

// Config is what a Pod works with.
type Config struct {
	// Captured has the pod's inbound connections.
	Captured *inbound.Pod
	// CertDir is the directory of the certificate in the pod's file system.
	CertDir string
	// Port is the webhook's.
	Port uint16
	// Addresses are the pod's own, where the webhook may listen.
	Addresses []netip.Addr
	// Processes returns the processes of the pod. It is called on another goroutine.
	Processes func() ([]int, error)
	// Steered is true if a predecessor steered the connections until now.
	Steered bool
	Server  Server
	Log     *slog.Logger
}

// Pod is the webhook of one pod. It is safe for concurrent use.
type Pod struct {
	Config
	stop context.CancelFunc

	// The loop's own:
	dir    *certdir.Dir
	skip   int  // processes that have another directory at the path
	loaded bool // the server has had a certificate
	fit    bool // by the last probe that was answered
	probed int  // turns since

	mu      sync.Mutex
	problem error
}

// Start begins to keep a webhook's connections going through the server, until Stop.
func Start(c Config) *Pod {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Pod{Config: c, stop: cancel, fit: c.Steered, problem: certdir.ErrNone}
	go p.run(ctx)
	return p
}

// Stop ends the work. The steering stays as it is.
func (p *Pod) Stop() { p.stop() }

// Problem returns why the reviews are not routed; nil if they are.
func (p *Pod) Problem() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.problem
}

func (p *Pod) run(ctx context.Context) {
	first := make(chan struct{})
	go p.serve(ctx, first)
	defer func() {
		if p.dir != nil {
			_ = p.dir.Close()
		}
	}()
	for {
		err := p.turn(ctx)
		p.mu.Lock()
		p.problem = err
		p.mu.Unlock()
		if first != nil {
			close(first)
			first = nil
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval):
		}
	}
}

// serve serves the listeners once the certificate may be known.
func (p *Pod) serve(ctx context.Context, first <-chan struct{}) {
	select {
	case <-first:
	case <-time.After(firstTurn):
	case <-ctx.Done():
		return
	}
	for _, l := range p.Captured.Listeners() {
		go func() {
			if err := p.Server.Serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
				p.Log.Error("failed to serve a webhook", "error", err)
			}
		}()
	}
}

// turn reads the certificate and steers the connections if they can be terminated. It
// returns why not.
func (p *Pod) turn(ctx context.Context) error {
	changed, err := p.load()
	switch {
	case p.dir != nil:
	case p.loaded && p.fit:
		return nil // between two processes the last certificate stays
	default:
		p.fit = false
		return errors.Join(err, p.steer(false))
	}
	if p.probed++; changed || !p.fit || p.probed >= probeEvery {
		p.probed = 0
		if why := p.probe(ctx); why != nil {
			return errors.Join(why, p.steer(false))
		}
	}
	if p.fit {
		return p.steer(true)
	}
	return nil
}

// load reads the certificate from a process of the pod.
func (p *Pod) load() (changed bool, err error) {
	if p.dir != nil {
		changed, err = p.dir.Load()
		if err == nil || !errors.Is(err, certdir.ErrExited) {
			return changed && p.publish(), nil // the last valid certificate stays
		}
		_ = p.dir.Close()
		p.dir = nil
	}
	pids, err := p.Processes()
	if err != nil {
		return false, fmt.Errorf("finding the processes of the webhook: %w", err)
	}
	err = certdir.ErrExited
	for i := range pids {
		dir, failed := certdir.Open(pids[(i+p.skip)%len(pids)], p.CertDir)
		if failed == nil {
			if _, failed = dir.Load(); failed == nil {
				p.dir, p.skip = dir, (i+p.skip)%len(pids)
				return p.publish(), nil
			}
			_ = dir.Close()
		}
		err = failed
	}
	return false, err
}

func (p *Pod) publish() bool {
	pair, err := p.dir.GetCertificate(nil)
	if err == nil {
		p.Server.SetCertificate(pair)
		p.loaded = true
	}
	return err == nil
}

// probe finds out whether the connections can be terminated. It returns why not, and nil if
// that is still unknown.
func (p *Pod) probe(ctx context.Context) error {
	var last error
	for _, a := range append(slices.Clone(p.Addresses), listener.Loopback4, listener.Loopback6) {
		why, ok := p.Server.Probe(ctx, netip.AddrPortFrom(a, p.Port))
		if !ok {
			last = why
			continue
		}
		p.fit = why == nil
		if why != nil { // another process may have another file system
			_ = p.dir.Close()
			p.dir = nil
			p.skip++
		}
		return why
	}
	if p.fit {
		return nil
	}
	return last
}

// steer steers the connections to the server, or leaves them to the application.
func (p *Pod) steer(yes bool) error {
	var ports []uint16
	if yes {
		ports = []uint16{p.Port}
	}
	return p.Captured.SetPorts(ports)
}
