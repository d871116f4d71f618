package http2

import (
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// flushAt is how many bytes of frames a handler leaves in the buffer until it flushes, or returns.
const flushAt = 16 << 10

// response is the state of a response. The mutex of the connection guards it, except for last, undated and trailer.
type response struct {
	code     int   // 0: no head was sent
	declared int64 // the length of the body; -1: not declared
	sent     int64 // of the body
	// lastBatch and lastAt are where the last DATA is in the output.
	lastBatch, lastAt int
	bodyless          bool // of the method or status
	ended             bool // END_STREAM was sent
	last              bool // GOAWAY goes before it
	undated           bool // no Date is added
	trailer           header.Fields
	deadline          deadline
	stall             deadline // of the call that waits
}

// Last has the connection end after the response.
func (s *Stream) Last() { s.resp.last = true }

// Respond sends the head of the response. Informational ones are sent at once, others with the body. trailer has the
// names of the fields that Trailer sends.
func (s *Stream) Respond(status int, fields header.Fields, trailer []string) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.err != nil || s.resp.code != 0 {
		return
	}
	if status < 200 {
		if len(s.c.out.b) <= maxOut { // what a client does not read must not pile up, and is no answer
			s.inform(status, fields)
		}
		s.c.flush()
		return
	}
	s.head(status, fields, trailer)
}

// Trailer sets the fields that follow the body.
func (s *Stream) Trailer(fields header.Fields) { s.resp.trailer = fields }

// Write implements io.Writer. It waits until the client may be sent p, but not until it was.
func (s *Stream) Write(p []byte) (int, error) {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &s.resp
	if r.code == 0 {
		s.head(http.StatusOK, nil, nil)
	}
	switch {
	case s.err != nil:
		return 0, s.err
	case s.req.Method == http.MethodHead:
		return len(p), nil
	case r.bodyless:
		return 0, http.ErrBodyNotAllowed
	case r.declared >= 0 && r.sent+int64(len(p)) > r.declared:
		return 0, http.ErrContentLength
	}
	defer r.stall.stop()
	written := 0
	for written < len(p) {
		n, err := s.room(len(p) - written)
		if err != nil {
			return written, err
		}
		s.data(p[written : written+n])
		written += n
		if len(c.out.b) >= flushAt {
			c.flush()
		}
	}
	return written, nil
}

// data appends DATA.
func (s *Stream) data(p []byte) {
	r, o := &s.resp, &s.c.out
	r.sent += int64(len(p))
	o.window -= int64(len(p))
	s.window -= int64(len(p))
	r.lastBatch, r.lastAt = o.batch, len(o.open())
	o.appendData(s.id, p, 0)
}

// end ends the body: by the last DATA if that was not sent yet.
func (r *response) end(s *Stream) {
	if o := &s.c.out; r.sent > 0 && r.lastBatch == o.batch {
		o.b[r.lastAt+flagsAt] |= flagEndStream
	} else {
		o.appendData(s.id, nil, flagEndStream)
	}
}

// head appends the head of the response.
func (s *Stream) head(status int, fields header.Fields, trailer []string) {
	r := &s.resp
	for len(s.c.out.b) > maxOut && s.err == nil {
		s.await()
	}
	if r.stall.stop(); s.err != nil {
		return
	}
	r.code, r.declared = status, -1
	if length, n := fields.Count("Content-Length"); n == 1 {
		if n, err := strconv.ParseUint(length, 10, 63); err == nil {
			r.declared = int64(n)
		} else {
			fields.Drop("Content-Length")
		}
	}
	r.bodyless = s.req.Method == http.MethodHead || status == http.StatusNoContent || status == http.StatusNotModified
	if r.last {
		s.c.goAway()
	}
	r.ended = r.bodyless || r.declared == 0 && trailer == nil
	var more header.Fields
	for _, name := range trailer {
		more = append(more, header.Field{Name: "Trailer", Value: name})
	}
	if !r.undated && !fields.Has("Date") {
		more = append(more, header.Field{Name: "Date", Value: date()})
	}
	s.c.headers(s.id, r.ended, status, fields, more)
}

// inform appends an informational response, unless the final one was sent.
func (s *Stream) inform(status int, fields header.Fields) {
	if s.resp.code == 0 && s.err == nil {
		s.c.headers(s.id, false, status, fields, nil)
	}
}

// finish ends the response.
func (r *response) finish(s *Stream) {
	if r.deadline.stop(); r.code == 0 {
		if s.head(http.StatusOK, header.Fields{{Name: "Content-Length", Value: "0"}}, nil); s.err != nil {
			return
		}
	}
	switch {
	case r.ended:
	case r.declared >= 0 && r.sent != r.declared:
		s.reset(codeInternal, http.ErrContentLength)
	case len(r.trailer) > 0:
		s.c.headers(s.id, true, 0, r.trailer, nil)
	default:
		r.end(s)
	}
	r.ended = true
}

// Flush sends what was written.
func (s *Stream) Flush() { _ = s.flushError() }

func (s *Stream) flushError() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.c.flush()
	return s.err
}

func (s *Stream) setReadDeadline(t time.Time) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.body.late = false; s.err == nil {
		s.body.deadline.set(s, t, func() {
			s.body.late = true
			s.changed.Broadcast()
		})
	}
}

func (s *Stream) setWriteDeadline(t time.Time) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.err == nil {
		s.resp.deadline.set(s, t, s.giveUp)
	}
}

// dates is the last value of Date.
var dates atomic.Pointer[struct {
	second int64
	text   string
}]

func date() string {
	now := time.Now()
	if d := dates.Load(); d != nil && d.second == now.Unix() {
		return d.text
	}
	d := &struct {
		second int64
		text   string
	}{now.Unix(), now.UTC().Format(http.TimeFormat)}
	dates.Store(d)
	return d.text
}
