package review

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/relay"
)

// A connection that arrives before a certificate is usable leads to the application for as
// long as its client keeps it, which may be hours. It is ended once a certificate is usable, so
// that the client connects again. A review in progress fails when it ends. So it is ended when
// it is quiet: the application has sent an answer since anything arrived, and nothing for some time
// after that. A connection that is never quiet for long is ended after a shorter time, and at last in
// any case.
const (
	quietAtFirst = 100 * time.Millisecond
	quietLater   = 5 * time.Millisecond
	laterAfter   = 5 * time.Second
	endWithin    = 30 * time.Second
	// leastAnswer is the length of the TLS record with the shortest AdmissionReview. Records that
	// say that a request was read, by a WINDOW_UPDATE of HTTP/2, are shorter.
	leastAnswer = 150
)

var errUnread = errors.New("connections that were made before the certificate was known lead to the webhook: they are ended when they are quiet, and within " + endWithin.String())

// tunnel is a connection that is passed to the application unread.
type tunnel struct {
	net.Conn              // of the client
	asked    atomic.Int64 // when the client has sent last, in Unix nanoseconds
	answered atomic.Int64 // when the application has sent an answer
	records  records      // of the application
}

// records finds the TLS records in a stream of bytes.
type records struct {
	head [5]byte // of a record that begins
	have int     // bytes of head
	rest int     // bytes of a record that are to come
}

// longest returns the length of the longest record that begins in the next bytes of the stream.
func (r *records) longest(b []byte) (length int) {
	for len(b) > 0 {
		if r.rest > 0 {
			n := min(r.rest, len(b))
			r.rest, b = r.rest-n, b[n:]
			continue
		}
		n := copy(r.head[r.have:], b)
		r.have, b = r.have+n, b[n:]
		if r.have == len(r.head) {
			r.have, r.rest = 0, int(binary.BigEndian.Uint16(r.head[3:]))
			length = max(length, r.rest)
		}
	}
	return length
}

func (t *tunnel) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	if n > 0 {
		t.asked.Store(time.Now().UnixNano())
	}
	return n, err
}

func (t *tunnel) Write(b []byte) (int, error) {
	before := time.Now().UnixNano() // the next request may be read before Write returns
	n, err := t.Conn.Write(b)
	if t.records.longest(b[:n]) >= leastAnswer {
		t.answered.Store(before)
	}
	return n, err
}

// CloseWrite is for relay.Both.
func (t *tunnel) CloseWrite() error {
	c, ok := t.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return c.CloseWrite()
}

// quiet reports whether the connection has been quiet for some time.
func (t *tunnel) quiet(least time.Duration) bool {
	answered := t.answered.Load()
	return answered >= t.asked.Load() && time.Now().UnixNano()-answered >= int64(least)
}

// tunnel passes a connection to the application unread.
func (s *Server) tunnel(c *downstream.Conn) {
	defer func() { _ = c.Close() }()
	t := &tunnel{Conn: c.Bare()}
	t.asked.Store(time.Now().UnixNano())
	s.tunnels.Add(t)
	defer s.tunnels.Remove(t)
	ctx, cancel := context.WithTimeout(c.Life, localTimeout)
	up, err := s.Dial(ctx, "tcp", addressOf(c.LocalAddr()).String())
	cancel()
	if err != nil {
		c.Reset()
		return
	}
	defer func() { _ = up.Close() }()
	relay.Both(t, up, downstream.TunnelIdle)
}

// EndUnread ends connections that are passed to the application unread although a certificate
// is usable, once they are quiet. It returns why reviews are not routed that arrive on them;
// nil if there are none. Call it every second or so.
func (s *Server) EndUnread() error {
	since, usable := s.certificate.usableSince()
	if !usable {
		return nil
	}
	age, least := time.Since(since), quietAtFirst
	if age > laterAfter {
		least = quietLater
	}
	left := s.tunnels.List()
	for _, t := range left {
		if age > endWithin || t.quiet(least) {
			_ = t.Close() // relay.Both returns
		}
	}
	if len(left) > 0 {
		return errUnread
	}
	return nil
}
