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
	// rotation is how long after a change of the certificate the application is probed each
	// time: it may read the directory only every ten seconds.
	rotation = 30 * time.Second
	// lastFor is how long the last certificate is presented after its process has exited.
	// Nothing shows meanwhile what the webhook presents.
	lastFor = 5 * time.Second
	// maxTried bounds the processes whose files are read in one turn. The next turn goes on
	// with others.
	maxTried = 16
	// firstLoad bounds how long connections wait, that a predecessor passes on, for the
	// certificate: the pod's file system may block.
	firstLoad = 5 * time.Second
)

// Server terminates the connections.
type Server interface {
	SetCertificate(*tls.Certificate)
	// ForgetCertificates forgets those of another directory.
	ForgetCertificates()
	// Probe connects to the application. It returns why its connections cannot be terminated,
	// nil if they can. ok is false if the application did not answer. If they could be terminated
	// before, and its certificate is not known, they still are until the next Probe.
	Probe(ctx context.Context, at netip.AddrPort) (why error, ok bool)
	// EndUnread ends connections that are passed to the application although they could be
	// terminated. It returns why reviews on them are not routed; nil if there are none.
	EndUnread() error
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
	// Addresses returns the pod's own, where the webhook may listen. It is called on another
	// goroutine, and waits no longer than ctx.
	Addresses func(ctx context.Context) []netip.Addr
	// Processes returns the processes of the pod. It is called on another goroutine.
	Processes func() ([]int, error)
	// Owns reports whether a process is the pod's. It fails if the process has exited.
	Owns func(pid int) (bool, error)
	// Files is held while the pod's files are read, and has room for one holder. Its file
	// system may block a thread for ever; another Pod for the same pod then waits.
	Files chan struct{}
	// Steered is true if a predecessor steered the connections until now.
	Steered bool
	Server  Server
	Log     *slog.Logger
}

// Pod is the webhook of one pod. It is safe for concurrent use.
type Pod struct {
	Config
	stop  context.CancelFunc
	first chan struct{} // closed after the first attempt to load the certificate
	once  sync.Once     // of closing it

	// The loop's own:
	source  certdir.Source
	dir     *certdir.Dir
	known   time.Time // when dir was last that of a process
	skip    int       // processes that are tried later: they have no such files, or other ones
	loaded  bool      // the server has had a certificate
	fit     bool      // by the last probe that was answered
	probed  int       // turns since
	rotated time.Time // when the certificate changed last

	mu      sync.Mutex // also of the end of ctx
	problem error
}

// Start begins to keep a webhook's connections going through the server, until Stop.
func Start(c Config) *Pod {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Pod{Config: c, stop: cancel, first: make(chan struct{}), source: certdir.Source{Path: c.CertDir, Owns: c.Owns}, fit: c.Steered, problem: certdir.ErrNone}
	c.Server.ForgetCertificates()
	go p.run(ctx)
	return p
}

// Stop ends the work. The steering stays as it is. The server is given no certificate after
// Stop has returned.
func (p *Pod) Stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stop()
}

// Problem returns why the reviews are not routed; nil if they are.
func (p *Pod) Problem() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.problem
}

func (p *Pod) run(ctx context.Context) {
	go p.serve(ctx)
	defer func() {
		if p.dir != nil {
			_ = p.dir.Close()
		}
	}()
	for {
		err := p.turn(ctx)
		if err == nil {
			err = errors.Join(p.Captured.Direct(), p.Server.EndUnread())
		}
		p.mu.Lock()
		p.problem = err
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval):
		}
	}
}

// serve serves the listeners once the certificate may be known.
func (p *Pod) serve(ctx context.Context) {
	select {
	case <-p.first:
	case <-time.After(firstLoad):
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
	changed, err := p.load(ctx)
	p.once.Do(func() { close(p.first) })
	switch {
	case p.dir != nil:
		p.known = time.Now()
	case p.loaded && p.fit && time.Since(p.known) < lastFor:
		return nil // between two processes the last certificate stays
	default:
		p.fit = false
		return errors.Join(err, p.steer(false))
	}
	if changed {
		p.rotated = time.Now()
	}
	if p.probed++; !p.fit || p.probed >= probeEvery || time.Since(p.rotated) < rotation {
		p.probed = 0
		if why := p.fits(ctx); why != nil {
			return errors.Join(why, p.steer(false))
		}
	}
	if p.fit {
		return p.steer(true)
	}
	return nil
}

// load reads the certificate from a process of the pod.
func (p *Pod) load(ctx context.Context) (changed bool, err error) {
	select {
	case p.Files <- struct{}{}:
		defer func() { <-p.Files }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	if p.dir != nil {
		changed, err = p.dir.Load()
		if err == nil || !errors.Is(err, certdir.ErrExited) {
			return changed && p.publish(ctx), nil // the last valid certificate stays
		}
		_ = p.dir.Close()
		p.dir = nil
	}
	pids, err := p.Processes()
	if err != nil {
		return false, fmt.Errorf("finding the processes of the webhook: %w", err)
	}
	err = certdir.ErrExited
	for range min(len(pids), maxTried) {
		dir, failed := p.source.Open(pids[p.skip%len(pids)])
		if failed == nil {
			if _, failed = dir.Load(); failed == nil {
				p.dir = dir
				return p.publish(ctx), nil
			}
			_ = dir.Close()
		}
		p.skip++
		err = failed
	}
	return false, err
}

func (p *Pod) publish(ctx context.Context) bool {
	pair, err := p.dir.GetCertificate(nil)
	if err != nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	p.Server.SetCertificate(pair)
	p.loaded = true
	return true
}

// fits finds out whether the connections can be terminated. It returns why not, and nil if that is
// still unknown. If they could be before, it reads the directory again, which may have changed since
// it was loaded, and probes once more.
func (p *Pod) fits(ctx context.Context) error {
	before := p.fit
	why, answered := p.probe(ctx)
	if answered && why != nil && before {
		if changed, err := p.load(ctx); changed && err == nil {
			p.rotated = time.Now()
		}
		if p.dir == nil {
			return why
		}
		why, answered = p.probe(ctx)
	}
	if answered && why != nil { // another process may have another file system
		_ = p.dir.Close()
		p.dir = nil
		p.skip++
	}
	return why
}

// probe connects to the application. It returns why its connections cannot be terminated, or why it
// did not answer; nil if they can, or could before.
func (p *Pod) probe(ctx context.Context) (why error, answered bool) {
	for _, a := range append(p.Addresses(ctx), listener.Loopback4, listener.Loopback6) {
		if why, answered = p.Server.Probe(ctx, netip.AddrPortFrom(a, p.Port)); answered {
			p.fit = why == nil
			return why, true
		}
	}
	if p.fit {
		return nil, false
	}
	return why, false
}

// steer steers the connections to the server, or leaves them to the application.
func (p *Pod) steer(yes bool) error {
	var ports []uint16
	if yes {
		ports = []uint16{p.Port}
	}
	return p.Captured.SetPorts(ports)
}
