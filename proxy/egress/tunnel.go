package egress

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/relay"
)

// tunnel is an opaque connection, and what rules do to it.
type tunnel struct {
	line
	ticket    limit.Ticket
	injecting *fault.Faults // nil: none
}

// tunnel applies the rules to an opaque connection and relays it. asked is all that is
// seen of the connection.
func (s *Server) tunnel(c *conn, protocol string, asked []match.HTTP) {
	defer func() { _ = c.Close() }()
	c.Upgraded.Store(true)
	_ = c.Conn.SetDeadline(time.Time{})
	p, _ := s.Policy()
	f := &flow{asked: asked, failed: c.leafless, cut: func() { _ = c.Close() }}
	f.opaque = protocol == ProtocolTLS && !p.decrypts(asked...) // else decrypting was tried before
	s.flows.add(f)
	defer s.flows.remove(f)
	p, _ = s.Policy()
	t := &tunnel{line: line{s: s, c: c, protocol: protocol, asked: asked}}
	if !t.admit(p, f) {
		t.done()
		t.alert()
		return
	}
	defer t.end()
	t.injecting = s.faults(p, c.around.met, asked...)
	if t.inject() {
		t.relay()
	}
}

// admit reports whether the rules allow the connection.
func (t *tunnel) admit(p *Policy, f *flow) bool {
	if p == nil {
		return true
	}
	if d := p.refuses(f); d != nil {
		t.denied(d)
		return false
	}
	ticket, refusal := p.limits.TakeHTTP(time.Now(), t.c.around.ticket, "", t.asked...)
	if refusal != nil {
		t.limited(refusal)
		return false
	}
	t.ticket = ticket
	return true
}

// inject injects the faults that come before the connection to the server. It reports
// whether to connect.
func (t *tunnel) inject() bool {
	f := t.injecting
	if f == nil {
		return true
	}
	t.faults = f.Rules
	if t.s.delay(t.c.Life, f) && !f.Reset && f.Abort == nil {
		return true
	}
	t.verdict = VerdictFault
	t.done()
	if f.Abort != nil && t.protocol == ProtocolTLS {
		t.alert()
	} else {
		t.c.Reset()
	}
	return false
}

func (t *tunnel) relay() {
	c := t.c
	up, err := c.up(c.Life)
	if err != nil {
		t.verdict, t.err = VerdictFailed, err
		t.done()
		c.Reset() // as if the address did not answer
		return
	}
	defer func() { _ = up.Close() }()
	t.verdict = VerdictPassed
	t.done()
	early := c.early
	c.early = nil
	if len(early) > 0 {
		if _, err := up.Write(early); err != nil {
			return
		}
	}
	c.Forgive()
	for _, f := range []*fault.Faults{c.around.faults, t.injecting} {
		if f != nil && !f.Harmless() {
			up = &faultyConn{up, c, f}
		}
	}
	relay.Both(c.Bare(), up, downstream.TunnelIdle)
}

// end tells the rules how the connection ended.
func (t *tunnel) end() {
	failed := t.verdict == VerdictFailed
	t.ticket.Done(time.Now(), limit.Outcome{
		Failed:  failed || t.verdict == VerdictFault,
		Unknown: t.verdict == "" || failed && t.c.Life.Err() != nil,
	})
	t.s.report(t.injecting)
}

func hostOf(asked []match.HTTP) string {
	if len(asked) == 0 {
		return ""
	}
	return asked[0].Host
}

// alert sends access_denied to a client of TLS, and waits until the client has read it.
// It does nothing for other protocols.
func (t *tunnel) alert() {
	if t.protocol != ProtocolTLS {
		return
	}
	c := t.c.Conn
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write(accessDenied); err != nil || closeWrite(c.Bare()) != nil {
		return
	}
	// Read what the client sends: closing a socket with unread data sends a reset, and
	// the alert would be lost.
	_, _ = io.CopyN(io.Discard, c, maxHello)
}

var errInjected = errors.New("injected fault")

// faultyConn is a connection to a server that injects faults into the answer.
type faultyConn struct {
	net.Conn
	c      *conn
	faults *fault.Faults
}

func (f *faultyConn) Read(b []byte) (int, error) {
	n, err := f.c.s.faulty(f.c.Life, f.faults, b, f.Conn.Read)
	if errors.Is(err, errInjected) {
		f.c.Reset()
	}
	return n, err
}

func (f *faultyConn) CloseWrite() error { return closeWrite(f.Conn) }

// line is what the proxy counts and logs about a request or a connection.
type line struct {
	s        *Server
	c        *conn
	protocol string
	asked    []match.HTTP
	verdict  string
	by       string // CircuitBreaker and rule
	code     int
	faults   []string
	err      error
}

func (l *line) denied(d *denial) {
	l.verdict, l.by = VerdictDenied, d.breaker+"/"+d.rule
	if d.unseen {
		l.verdict = VerdictUnseen
	}
}

func (l *line) limited(r *limit.Refusal) {
	l.s.Limited(r)
	l.verdict, l.by = VerdictLimited, r.Breaker+"/"+r.Rule
	if r.Opened {
		l.verdict = VerdictOpened
	}
}

// done counts and logs the line. It never logs a path, a header or a body.
func (l *line) done() {
	l.s.Count(l.protocol, l.verdict)
	if !l.s.Log.Enabled(context.Background(), slog.LevelDebug) {
		return
	}
	attrs := []slog.Attr{
		slog.String("pod", l.s.Pod), slog.String("uid", l.s.UID),
		slog.String("protocol", l.protocol),
		slog.String("host", hostOf(l.asked)), slog.String("to", l.c.to.String()),
		slog.String("verdict", l.verdict),
	}
	if l.by != "" {
		attrs = append(attrs, slog.String("rule", l.by))
	}
	if l.code != 0 {
		attrs = append(attrs, slog.Int("code", l.code))
	}
	if len(l.faults) > 0 {
		attrs = append(attrs, slog.Any("faults", l.faults))
	}
	if l.err != nil {
		attrs = append(attrs, slog.String("error", l.err.Error()))
	}
	l.s.Log.LogAttrs(context.Background(), slog.LevelDebug, "egress", attrs...)
}
