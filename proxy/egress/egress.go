package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http/httputil"
	"net/netip"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/concurrent"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Conn is a redirected connection of the pod. If it has a method NetConn, as tls.Conn
// does, the connection that NetConn returns must carry the same bytes.
type Conn interface {
	net.Conn
	// To returns the original destination of the connection.
	To() netip.AddrPort
}

// Config is what a Server needs from its caller. All fields are required unless noted.
type Config struct {
	Namespace, Pod, UID string // the pod's; Pod is namespace/name

	// Dial connects from the pod's network namespace. addr is a literal IP and port.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Policy returns the policy in force. Nothing passes until ok is true.
	Policy func() (p *Policy, ok bool)
	// Forbidden reports whether connections to an address must be refused.
	Forbidden func(netip.AddrPort) bool
	// Leaf returns a certificate of a host that the pod's clients trust. If it is nil,
	// there are no certificates, and TLS is not decrypted.
	Leaf func(ctx context.Context, host string) (*tls.Certificate, error)
	// Roots verify the servers of decrypted connections. Nil: the system's roots.
	Roots *x509.CertPool
	Conns *downstream.Conns
	// Held counts the memory of requests under way in bytes.
	Held *bounds.Account
	Log  *slog.Logger

	// Count is called for each request, or for each opaque connection, with one of the
	// protocols and one of the verdicts below.
	Count func(protocol, verdict string)
	// Limited is called for each refusal by a limit.
	Limited func(*limit.Refusal)
	// Injected is called for each injected fault.
	Injected func(fault.Injected)
	// Panicked is called after each recovered panic.
	Panicked func()
}

// Protocols that are passed to Config.Count.
const (
	ProtocolHTTP    = "http"
	ProtocolHTTPS   = "https" // decrypted
	ProtocolTLS     = "tls"
	ProtocolConnect = "connect"
	ProtocolOther   = "other"
)

// Verdicts that are passed to Config.Count.
const (
	VerdictPassed    = "passed"
	VerdictDenied    = "denied"    // by an intercept rule
	VerdictUnseen    = "unseen"    // a rule needs what cannot be seen
	VerdictLimited   = "limited"   // above a limit
	VerdictOpened    = "opened"    // by an open breaker
	VerdictFault     = "fault"     // answered by an injected fault
	VerdictMalformed = "malformed" // not understood
	VerdictBound     = "bound"     // above the proxy's own bounds
	VerdictFailed    = "failed"    // the other side did not answer
	VerdictCut       = "cut"       // under way when the policy changed
)

const (
	dialTimeout = 30 * time.Second
	// leafTimeout is how long the signing of a certificate may take.
	leafTimeout = 5 * time.Second
	maxStreams  = 256
	// maxMatching is how many requests of the pod are matched by expressions at once: each may
	// take milliseconds, in which other pods' requests wait for a processor.
	maxMatching = 2
)

// Server serves the redirected connections of one pod. Its methods are safe for
// concurrent use.
type Server struct {
	Config

	http     *downstream.Server
	proxy    *httputil.ReverseProxy
	refusing atomic.Int32   // requests above the bounds that are being answered with 429
	leafless rate.Sometimes // limits the warning about missing certificates
	matching chan struct{}  // an element per request that expressions are matching
	flows    concurrent.Set[*flow]
	changed  atomic.Pointer[chan struct{}] // closed when the policy changes
	changing sync.Mutex
	underway []*flow // when the policy changed last; guarded by changing
	deciding bool    // about those; guarded by changing
}

// NewServer returns a Server that serves nothing until Serve is called.
func NewServer(c Config) *Server {
	s := &Server{Config: c, leafless: rate.Sometimes{Interval: 10 * time.Second}, matching: make(chan struct{}, maxMatching)}
	s.changed.Store(new(make(chan struct{})))
	s.http = downstream.NewServer(downstream.Config{
		Conns: c.Conns, Log: c.Log, Handler: s, Sniff: s.sniff,
		Refused: func() {
			s.Count(ProtocolOther, VerdictBound)
			s.Conns.Reached("egress connections")
		},
		MaxStreams: maxStreams, StreamWindow: 256 << 10, ConnWindow: 512 << 10,
	})
	s.proxy = &httputil.ReverseProxy{
		Rewrite:        rewrite,
		Transport:      roundTripper{},
		FlushInterval:  -1,
		ErrorLog:       s.http.ErrorLog,
		BufferPool:     upstream.BufferPool{},
		ModifyResponse: answered,
		ErrorHandler:   failed,
	}
	return s
}

// Serve accepts connections on l, which must be Conns, and closes l at the end. It
// returns nil after Stop.
func (s *Server) Serve(l net.Listener) error { return s.http.Serve(l) }

// Changed has the policy applied again to everything under way, which cuts what it refuses.
// Call it after each change of the policy. It does not wait: a pod may have many requests and
// costly rules, and other pods' policies are waiting behind its own.
func (s *Server) Changed() {
	close(*s.changed.Swap(new(make(chan struct{}))))
	s.changing.Lock()
	defer s.changing.Unlock()
	// A flow is added before the policy is read for it: later ones are decided by this policy.
	s.underway = s.flows.List()
	if !s.deciding {
		s.deciding = true
		go s.decideAll()
	}
}

// decideAll decides until nothing has changed meanwhile.
func (s *Server) decideAll() {
	for {
		s.changing.Lock()
		flows := s.underway
		s.underway, s.deciding = nil, len(flows) > 0
		s.changing.Unlock()
		if len(flows) == 0 {
			return
		}
		s.decide(flows)
	}
}

// turn waits until a request may be matched by the expressions of a policy, if there are any.
// Call done after the match.
func (s *Server) turn(p *Policy) (done func()) {
	if p == nil || p.steps == 0 {
		return func() {}
	}
	s.matching <- struct{}{}
	return func() { <-s.matching }
}

// decrypts is Policy.decrypts in its turn.
func (s *Server) decrypts(p *Policy, asked []match.HTTP) bool {
	defer s.turn(p)()
	return p.decrypts(asked...)
}

// Stop closes the listeners: no further connections are accepted.
func (s *Server) Stop() { s.http.Stop() }

// Drain waits, after Stop, until all connections have ended. Connections of HTTP end
// after their next request. When ctx is done, Drain cuts those that are left and
// returns its error.
func (s *Server) Drain(ctx context.Context) error { return s.http.Drain(ctx) }

// Close closes all listeners and connections.
func (s *Server) Close() { s.http.Close() }

// sniff serves an accepted connection.
func (s *Server) sniff(accepted *downstream.Conn) {
	redirected, ok := accepted.Conn.(Conn)
	if !ok {
		s.Log.Error("the listener does not report the original destination of connections", "pod", s.Pod)
		_ = accepted.Close()
		return
	}
	c := newConn(s, accepted, redirected.To())
	defer func() {
		if v := recover(); v != nil {
			s.panicked(v)
			_ = c.Close()
		}
	}()
	p, ok := s.Policy()
	switch to := c.target.to; {
	case !ok, !to.IsValid(), to.Addr().IsLoopback(), to.Addr().IsUnspecified(), to.Addr().IsMulticast(), s.itself(c), s.Forbidden(to):
		s.Count(ProtocolOther, VerdictDenied)
		_ = c.Close()
	case p == nil:
		s.tunnel(c, ProtocolOther, nil) // nothing is sniffed: if rules come later, it counts as unseen
	default:
		if served := s.look(c); served != nil {
			s.http.Hand(served)
		}
	}
}

// itself reports whether the destination of c is the address that accepted it. Then
// nothing redirected it, and forwarding it would loop.
func (s *Server) itself(c *conn) bool {
	local, ok := c.LocalAddr().(*net.TCPAddr)
	if !ok {
		return false
	}
	at := local.AddrPort()
	return c.target.to == netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
}

// look sniffs the protocol of a connection. For HTTP and decrypted TLS it returns the
// connection to read requests from: c, or the TLS connection on top of c. Everything
// else it serves itself, and returns nil.
func (s *Server) look(c *conn) net.Conn {
	k, h := c.sniff()
	switch k {
	case speaksHTTP, speaksHTTP2:
		c.target.scheme, c.target.protocol, c.patience.patient = "http", ProtocolHTTP, k == speaksHTTP
		if k == speaksHTTP2 && !c.TakeHTTP2() {
			s.Count(ProtocolHTTP, VerdictBound)
			s.Conns.Reached("egress HTTP/2 connections")
			_ = c.Close()
			return nil
		}
		c.server.transport = c.newTransport(k == speaksHTTP2)
		return c
	case speaksTLS:
		return s.tls(c, h)
	case speaksNothing:
		_ = c.Close()
	default:
		s.tunnel(c, ProtocolOther, c.opaque(match.HTTP{Port: c.target.port, Opaque: true}))
	}
	return nil
}

// wait waits for a fault, as long as it is in effect. Within a second after Stop it ends
// the wait: not at once, because Cut may follow. It reports false if ctx is done.
func (s *Server) wait(ctx context.Context, f *fault.Faults, left func() time.Duration) bool {
	fault.Wait(ctx, nil, func() <-chan struct{} { return s.lift(f) }, func() time.Duration {
		if s.http.Draining() {
			return 0
		}
		return left()
	})
	return ctx.Err() == nil
}

// delay waits for an injected delay.
func (s *Server) delay(ctx context.Context, f *fault.Faults) bool {
	return s.wait(ctx, f, func() time.Duration { return f.Delay })
}

// lift removes from f the faults that are not in effect any more. changed is closed when
// the policy changes.
func (s *Server) lift(f *fault.Faults) (changed <-chan struct{}) {
	changed = *s.changed.Load()
	var rules *fault.Rules
	if p, _ := s.Policy(); p != nil {
		rules = p.faults
	}
	rules.Lift(time.Now(), f)
	return changed
}

// faulty reads an answer and injects faults into its bytes, as long as they are in effect.
func (s *Server) faulty(ctx context.Context, f *fault.Faults, b []byte, read func([]byte) (int, error)) (int, error) {
	n, err := read(b[:f.Limit(len(b))])
	if f.Harmless() {
		return n, err
	}
	s.lift(f)
	pass, pause := f.Pass(time.Now(), n)
	if pass < n {
		return pass, errInjected
	}
	if pause > 0 && !s.wait(ctx, f, func() time.Duration { return pause * time.Duration(min(f.Slow, 1)) }) {
		return n, context.Cause(ctx)
	}
	return n, err
}

func (s *Server) panicked(v any) {
	s.Panicked()
	s.Log.Error("panic", "pod", s.Pod, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
}
