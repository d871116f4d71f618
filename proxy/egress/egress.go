package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Conn is a connection of the pod that was redirected. If it has a method NetConn as
// tls.Conn has, it adds nothing to the connection which that returns.
type Conn interface {
	net.Conn
	// To is where the pod meant to connect.
	To() netip.AddrPort
}

// Account is what a pod has taken of something.
type Account interface {
	// Take takes n and reports whether that is within bounds; it is taken either way.
	Take(n int64) bool
	Give(n int64)
}

// Bounds are what a pod's connections may take.
type Bounds struct {
	// Open connections; those that speak HTTP/2; bytes of handshakes and heads; bytes
	// of requests under way.
	Open, HTTP2, Unserved, Held Account
	// Reached is told what was refused.
	Reached func(what string)
}

// Config is what a Server needs from its host. All is required but where said.
type Config struct {
	Namespace, Pod, UID string // the pod's; Pod is namespace/name

	// Dial connects from the pod's network namespace. addr is a literal IP and port.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Policy is the one in force. Before ok is true nothing passes.
	Policy func() (p *Policy, ok bool)
	// Forbidden reports whether nothing may be passed to an address.
	Forbidden func(netip.AddrPort) bool
	// Leaf returns what the pod's clients take for a host's certificate. Nil: there is
	// none for any.
	Leaf func(ctx context.Context, host string) (*tls.Certificate, error)
	// Roots verify the servers of what is decrypted. Nil: the system's.
	Roots  *x509.CertPool
	Bounds Bounds
	Log    *slog.Logger

	// Count is told what became of each request, or of each connection of which no
	// more is seen: one of the protocols and verdicts.
	Count func(protocol, verdict string)
	// Limited is told of each refusal of a rule that limits.
	Limited func(*limit.Refusal)
	// Harmed is told of each injected fault.
	Harmed func(fault.Injected)
	// Panicked is told of a bug.
	Panicked func()
}

// Protocols that Count is told.
const (
	ProtocolHTTP    = "http"
	ProtocolHTTPS   = "https" // decrypted
	ProtocolTLS     = "tls"
	ProtocolConnect = "connect"
	ProtocolOther   = "other"
)

// Verdicts that Count is told.
const (
	VerdictPassed    = "passed"
	VerdictDenied    = "denied"    // by an intercept rule
	VerdictUnseen    = "unseen"    // for what cannot be seen
	VerdictLimited   = "limited"   // beyond a limit
	VerdictOpened    = "opened"    // by an open breaker
	VerdictFault     = "fault"     // answered by an injected fault
	VerdictMalformed = "malformed" // not understood
	VerdictBound     = "bound"     // beyond the proxy's own bounds
	VerdictFailed    = "failed"    // the other side did not answer
	VerdictCut       = "cut"       // under way when the policy changed
)

const (
	dialTimeout = 30 * time.Second
	// delayStep is how often a delayed request looks whether its rule is still there.
	delayStep = 200 * time.Millisecond
	// leafTimeout is for a certificate to be signed in.
	leafTimeout = 5 * time.Second
	// tunnelIdle is how long a tunnel may say nothing in either direction.
	tunnelIdle = 5 * time.Hour
	idle       = 120 * time.Second
	// cutGrace is for HTTP/2 connections that are cut to end after GOAWAY, which
	// net/http gives a second.
	cutGrace = 2 * time.Second

	maxHandshakes  = 4 // computed at once, with the pod and with servers
	maxHeaderBytes = 128 << 10
	maxStreams     = 256
)

// Server serves the redirected connections of one pod. Its methods are safe for
// concurrent use.
type Server struct {
	Config

	http       *http.Server
	proxy      *httputil.ReverseProxy
	seen       *handed
	start      sync.Once
	draining   atomic.Bool
	refusing   atomic.Int32 // requests for which there is no room
	handshakes chan struct{}
	leafless   rate.Sometimes // tells so
	stall      time.Duration  // of an HTTP/2 stream

	mu        sync.Mutex
	listeners []net.Listener
	conns     conns
	flows     flows
}

// NewServer makes a server that serves nothing yet.
func NewServer(c Config) *Server {
	s := &Server{Config: c, seen: newHanded(), leafless: rate.Sometimes{Interval: 10 * time.Second}, handshakes: make(chan struct{}, maxHandshakes), stall: stall}
	discard := slog.NewLogLogger(c.Log.Handler(), slog.LevelDebug)
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	s.http = &http.Server{
		Handler:                      s,
		ReadHeaderTimeout:            headTimeout,
		IdleTimeout:                  idle,
		MaxHeaderBytes:               maxHeaderBytes,
		DisableGeneralOptionsHandler: true,
		ErrorLog:                     discard,
		Protocols:                    protocols,
		ConnContext:                  connContext,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			MaxReceiveBufferPerStream:     256 << 10,
			MaxReceiveBufferPerConnection: 512 << 10,
		},
	}
	s.proxy = &httputil.ReverseProxy{
		Rewrite:        rewrite,
		Transport:      roundTripper{},
		FlushInterval:  -1,
		ErrorLog:       discard,
		BufferPool:     buffers{},
		ModifyResponse: answered,
		ErrorHandler:   failed,
	}
	return s
}

// Serve accepts connections on l, Conns, and closes it. It returns nil after Stop.
func (s *Server) Serve(l net.Listener) error {
	defer func() { _ = l.Close() }()
	s.start.Do(func() { go func() { _ = s.http.Serve(s.seen) }() })
	s.mu.Lock()
	if s.draining.Load() {
		s.mu.Unlock()
		return nil
	}
	s.listeners = append(s.listeners, l)
	s.mu.Unlock()
	for {
		raw, err := l.Accept()
		if err != nil {
			if s.draining.Load() {
				return nil
			}
			return fmt.Errorf("accept egress of pod %s: %w", s.Pod, err)
		}
		redirected, ok := raw.(Conn)
		if !ok {
			_ = raw.Close()
			return errors.New("egress: the listener does not tell where connections were meant to go")
		}
		if !s.Bounds.Open.Take(1) {
			s.Bounds.Open.Give(1)
			_ = raw.Close()
			s.Count(ProtocolOther, VerdictBound)
			s.Bounds.Reached("egress connections")
			continue
		}
		c := newConn(s, redirected)
		s.conns.add(c)
		go s.serve(c)
	}
}

// Changed decides again about all that is under way, after another policy came into
// force, and cuts what is refused now.
func (s *Server) Changed() { s.flows.decide(s) }

// Stop accepts no more.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining.Store(true)
	for _, l := range s.listeners {
		_ = l.Close()
	}
	s.listeners = nil
}

// Drain waits, after Stop, until all connections have ended; those on which requests
// are asked end after the next. What is left when ctx is done is cut, and its error
// returned.
func (s *Server) Drain(ctx context.Context) error {
	// Not http.Server.Shutdown before that: it drops what it reads on HTTP/1.
	err := s.conns.deserted(ctx)
	if err != nil {
		grace, cancel := context.WithTimeout(context.Background(), cutGrace)
		_ = s.http.Shutdown(grace)
		cancel()
	}
	s.Cut()
	return err
}

// Cut ends everything, after Stop.
func (s *Server) Cut() {
	_ = s.http.Close()
	_ = s.seen.Close()
	s.conns.cut()
}

// serve serves a connection that was accepted.
func (s *Server) serve(c *conn) {
	defer func() {
		if v := recover(); v != nil {
			s.panicked(v)
			_ = c.Close()
		}
	}()
	p, ok := s.Policy()
	switch to := c.to; {
	case !ok, !to.IsValid(), to.Addr().IsLoopback(), to.Addr().IsUnspecified(), to.Addr().IsMulticast(), s.itself(c), s.Forbidden(to):
		s.Count(ProtocolOther, VerdictDenied)
		_ = c.Close()
	case p == nil:
		s.tunnel(c, ProtocolOther, nil) // what it is shows if there are rules again: nobody looked
	default:
		s.hand(c, s.look(c))
	}
}

// itself reports whether c was meant for where it was accepted: nothing redirected it,
// and to pass it on would go round in circles.
func (s *Server) itself(c *conn) bool {
	local, ok := c.LocalAddr().(*net.TCPAddr)
	if !ok {
		return false
	}
	at := local.AddrPort()
	return c.to == netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
}

// look serves a connection by what it speaks, or returns what requests are to be read
// from: c, or what ends on c.
func (s *Server) look(c *conn) net.Conn {
	k, h := c.sniff()
	switch k {
	case speaksHTTP, speaksHTTP2:
		c.scheme, c.protocol, c.patient = "http", ProtocolHTTP, k == speaksHTTP
		if k == speaksHTTP2 && !c.takeHTTP2() {
			s.Count(ProtocolHTTP, VerdictBound)
			s.Bounds.Reached("egress HTTP/2 connections")
			_ = c.Close()
			return nil
		}
		c.transport = c.newTransport(k == speaksHTTP2)
		return c
	case speaksTLS:
		return s.tls(c, h)
	case speaksNothing:
		_ = c.Close()
	default:
		s.tunnel(c, ProtocolOther, c.opaque(match.HTTP{Port: c.port, Opaque: true}))
	}
	return nil
}

// hand has requests read from what look returned.
func (s *Server) hand(c *conn, served net.Conn) {
	if served == nil {
		return
	}
	c.upgraded.Store(false)
	if !s.seen.put(served) {
		_ = c.Close()
	}
}

// harmed tells what was done in the end.
func (s *Server) harmed(f *fault.Faults) {
	if f == nil {
		return
	}
	if !f.Broke { // there was no answer, or not as much of it
		f.Missed(fault.ResetAfter)
		f.Missed(fault.Truncate)
	}
	if !f.Slowed {
		f.Missed(fault.SlowBody)
	}
	for _, by := range f.Injected {
		s.Harmed(by)
	}
}

// harm decides on faults. While the server drains there are none: what the rules have
// left of their counts is the next one's.
func (s *Server) harm(p *Policy, met fault.Met, asked ...match.HTTP) *fault.Faults {
	if s.draining.Load() {
		return nil
	}
	return p.harm(met, asked...)
}

// delay waits for a fault's sake, until the server drains. It is false when ctx is done.
func (s *Server) delay(ctx context.Context, f *fault.Faults) bool {
	for start := time.Now(); ; s.lift(f) {
		left := f.Delay - time.Since(start)
		if left <= 0 || s.draining.Load() {
			return ctx.Err() == nil
		}
		if !sleep(ctx, min(left, delayStep)) {
			return false
		}
	}
}

// lift takes out of f what is not in effect any more.
func (s *Server) lift(f *fault.Faults) {
	var rules *fault.Rules
	if p, _ := s.Policy(); p != nil {
		rules = p.faults
	}
	rules.Lift(time.Now(), f)
}

func (s *Server) panicked(v any) {
	s.Panicked()
	s.Log.Error("panic", "pod", s.Pod, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
}

// handed is a listener of connections that others accepted.
type handed struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newHanded() *handed { return &handed{conns: make(chan net.Conn), done: make(chan struct{})} }

func (l *handed) put(c net.Conn) bool {
	select {
	case l.conns <- c:
		return true
	case <-l.done:
		return false
	}
}

func (l *handed) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *handed) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *handed) Addr() net.Addr { return &net.TCPAddr{} }

// flow is something that the rules let through and that is under way.
type flow struct {
	asked  []match.HTTP
	direct *match.HTTP // not nil: what it is to a server that is not the proxy it is asked to be
	opaque bool        // though what is asked could be decrypted
	within bool        // more will be seen, and decided about then
	failed bool        // it was to be decrypted, and could not be
	cut    func()
}

// flows are those of a pod.
type flows struct {
	mu  sync.Mutex
	all map[*flow]struct{}
}

// add must come before the policy is asked about f: later ones are then asked by
// decide.
func (f *flows) add(one *flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all == nil {
		f.all = map[*flow]struct{}{}
	}
	f.all[one] = struct{}{}
}

func (f *flows) remove(one *flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.all, one)
}

func (f *flows) decide(s *Server) {
	p, _ := s.Policy()
	if p == nil {
		return
	}
	f.mu.Lock()
	all := slices.Collect(maps.Keys(f.all))
	f.mu.Unlock()
	for _, one := range all { // without the lock: expressions take their time
		if p.refuses(one) == nil && !p.shuts(one) {
			continue
		}
		f.mu.Lock()
		_, under := f.all[one]
		delete(f.all, one)
		f.mu.Unlock()
		if under {
			go one.cut()
		}
	}
}

// shuts reports whether limits refuse what is asked, whatever they count.
func (p *Policy) shuts(f *flow) bool {
	return !f.within && len(f.asked) > 0 && p.limits.Shut(http.Header(f.asked[0].Header).Get("User-Agent"), f.asked...)
}

// refuses tells what refuses any of what is asked.
func (p *Policy) refuses(f *flow) *denial {
	if len(f.asked) == 0 {
		return &denial{unseen: true}
	}
	if f.direct != nil {
		if refused := p.forbids(f.direct); refused != nil {
			return refused
		}
	}
	for i := range f.asked {
		r := &f.asked[i]
		d := p.denied
		switch {
		case f.within:
			d = p.surely
		case r.Scheme == "":
			d = p.blind
		}
		if refused := d(r); refused != nil {
			return refused
		}
		if f.failed && r.Host != "" { // TLS to a host that a proxy was asked for may have no name
			if refused := p.suspects(r); refused != nil {
				return refused
			}
		}
	}
	if f.opaque && p.decrypts(f.asked...) {
		return &denial{unseen: true}
	}
	return nil
}
