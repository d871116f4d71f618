package egress

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"golang.org/x/time/rate"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/relay"
)

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
	line := line{s: s, c: c, protocol: protocol, asked: asked}
	if p != nil {
		if d := p.refuses(f); d != nil {
			line.denied(d)
			c.alert(protocol)
			return
		}
	}
	ticket, refusal := p.take(c.around.ticket, "", asked...)
	if refusal != nil {
		line.limited(refusal)
		c.alert(protocol)
		return
	}
	defer func() {
		gone := line.verdict == VerdictFailed && c.Life.Err() != nil
		ticket.Done(time.Now(), limit.Outcome{
			Failed:  line.verdict == VerdictFailed || line.verdict == VerdictFault,
			Unknown: gone || line.verdict != VerdictFailed && line.verdict != VerdictFault && line.verdict != VerdictPassed,
		})
	}()
	harm := s.harm(p, c.around.met, asked...)
	if harm != nil {
		line.faults = harm.Rules
		defer func() { s.harmed(harm) }()
		if !s.delay(c.Life, harm) || harm.Reset || harm.Abort != nil {
			line.verdict = VerdictFault
			line.done()
			if harm.Abort != nil && protocol == ProtocolTLS {
				c.alert(protocol)
			} else {
				c.Reset()
			}
			return
		}
	}
	up, err := c.up(c.Life)
	if err != nil {
		line.verdict, line.err = VerdictFailed, err
		line.done()
		c.Reset() // as if the address did not answer
		return
	}
	defer func() { _ = up.Close() }()
	line.verdict = VerdictPassed
	line.done()
	early := c.early
	c.early = nil
	if len(early) > 0 {
		if _, err := up.Write(early); err != nil {
			return
		}
	}
	c.Forgive()
	for _, f := range []*fault.Faults{c.around.faults, harm} {
		if f != nil && (f.ResetAfter || f.Truncate >= 0 || f.Slow > 0) {
			up = harmed(c, up, f)
		}
	}
	relay.Both(c.Bare(), up, downstream.TunnelIdle)
}

func hostOf(asked []match.HTTP) string {
	if len(asked) == 0 {
		return ""
	}
	return asked[0].Host
}

// alert sends access_denied to a client of TLS, and waits until the client has read it.
// It does nothing for other protocols.
func (c *conn) alert(protocol string) {
	if protocol != ProtocolTLS {
		return
	}
	_ = c.Conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Conn.Write(accessDenied); err != nil {
		return
	}
	if half, ok := c.Bare().(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
		return
	}
	// Read what the client sends: closing a socket with unread data sends a reset, and
	// the alert would be lost.
	var rest [4 << 10]byte
	for read := 0; read < maxHello; {
		n, err := c.Conn.Read(rest[:])
		if read += n; err != nil {
			return
		}
	}
}

// sleep reports whether the time passed before ctx was done.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

var errInjected = errors.New("injected fault")

// harmedConn is a connection to a server that injects faults into the answer.
type harmedConn struct {
	net.Conn
	c    *conn
	harm harm
}

func harmed(c *conn, up net.Conn, f *fault.Faults) net.Conn {
	out := &harmedConn{Conn: up, c: c, harm: newHarm(c.s, f)}
	if f.ResetAfter {
		out.harm.left = 0
	}
	return out
}

func (h *harmedConn) Read(b []byte) (int, error) {
	n, err := h.harm.read(h.c.Life, b, h.Conn.Read)
	if errors.Is(err, errInjected) {
		h.c.Reset()
	}
	return n, err
}

func (h *harmedConn) CloseWrite() error {
	if half, ok := h.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// harm injects faults into the bytes of an answer, as long as the rules are in effect.
type harm struct {
	s    *Server
	by   *fault.Faults
	left int64 // bytes until the answer is broken off; below 0: it is not
	pace *rate.Limiter
}

func newHarm(s *Server, f *fault.Faults) harm {
	out := harm{s: s, by: f, left: f.Truncate}
	if f.Slow > 0 {
		burst := int(min(max(f.Slow/10, 1), 32<<10)) // bounds each wait to a second, so that lifted rules take effect
		out.pace = rate.NewLimiter(rate.Limit(f.Slow), burst)
	}
	return out
}

func (h *harm) read(ctx context.Context, b []byte, read func([]byte) (int, error)) (int, error) {
	if h.pace != nil {
		b = b[:min(len(b), h.pace.Burst())]
	}
	n, err := read(b)
	if h.left >= 0 || h.pace != nil {
		h.s.lift(h.by)
	}
	if !h.by.ResetAfter && h.by.Truncate < 0 {
		h.left = -1
	}
	if h.by.Slow == 0 {
		h.pace = nil
	}
	if h.left >= 0 {
		if int64(n) > h.left || n > 0 && h.left == 0 {
			n, err = int(h.left), errInjected
			h.by.Broke = true
		}
		h.left -= int64(n)
	}
	if h.pace != nil && n > 0 {
		h.by.Slowed = true
		if h.pace.WaitN(ctx, n) != nil {
			return n, context.Cause(ctx)
		}
	}
	return n, err
}

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
	l.verdict = VerdictDenied
	if d.unseen {
		l.verdict = VerdictUnseen
	}
	l.by = d.breaker + "/" + d.rule
	l.done()
}

func (l *line) limited(r *limit.Refusal) {
	l.s.Limited(r)
	l.verdict = VerdictLimited
	if r.Opened {
		l.verdict = VerdictOpened
	}
	l.by = r.Breaker + "/" + r.Rule
	l.done()
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
