package egress

import (
	"errors"
	"io"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/relay"
)

// tunnel is an opaque connection, and what rules do to it.
type tunnel struct{ line }

// tunnel applies the rules to an opaque connection and relays it. asked is all that is
// seen of the connection.
func (s *Server) tunnel(c *conn, protocol string, asked []match.HTTP) {
	defer func() { _ = c.Close() }()
	c.Upgraded.Store(true)
	_ = c.Conn.SetDeadline(time.Time{})
	p, _ := s.Policy()
	f := &flow{asked: asked, failed: c.server.leafless, cut: func() { _ = c.Close() }}
	f.opaque = protocol == ProtocolTLS && !s.decrypts(p, asked) // else decrypting was tried before
	s.flows.Add(f)
	defer s.flows.Remove(f)
	p, _ = s.Policy()
	t := &tunnel{line: line{s: s, c: c, protocol: protocol, asked: asked}}
	if t.apply(p, &subject{flow: f, around: c.around}) != nil {
		t.done()
		t.alert()
		return
	}
	defer func() {
		failed := t.verdict == VerdictFailed
		t.end(limit.Outcome{
			Failed:  failed || t.verdict == VerdictFault,
			Unknown: t.verdict == "" || failed && c.Life.Err() != nil,
		})
	}()
	if t.inject() {
		t.relay()
	}
}

// inject injects the faults that come before the connection to the server. It reports
// whether to connect.
func (t *tunnel) inject() bool {
	f := t.injecting
	if f == nil || t.s.delay(t.c.Life, f) && !f.Reset && f.Abort == nil {
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
	up, err := c.server.up(c.Life)
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
		if f == nil || f.Harmless() {
			continue
		}
		intact := up.Read
		up = &reading{up, func(b []byte) (int, error) {
			n, err := t.s.faulty(c.Life, f, b, intact)
			if errors.Is(err, errInjected) {
				c.Reset()
			}
			return n, err
		}}
	}
	relay.Both(c.Bare(), up, downstream.TunnelIdle)
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
