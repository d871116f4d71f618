package http2

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2/hpack"
)

// flushAt is how many bytes of frames a handler leaves in the buffer until it flushes, or returns.
const flushAt = 16 << 10

// response is the state of a response. The mutex of the connection guards it, except for header.
type response struct {
	header   http.Header
	code     int   // 0: no head was sent
	declared int64 // the length of the body; -1: not declared
	sent     int64 // of the body
	// lastBatch and lastAt are where the last DATA is in the output.
	lastBatch, lastAt int
	bodyless          bool // of the method or status
	ended             bool // END_STREAM was sent
	trailer           []string
	deadline          deadline
	stall             deadline // of the call that waits
}

// Header implements http.ResponseWriter.
func (s *stream) Header() http.Header {
	if s.resp.header == nil {
		s.resp.header = http.Header{}
	}
	return s.resp.header
}

// WriteHeader implements http.ResponseWriter. Informational responses are sent at once, others with the body.
func (s *stream) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic("http2: invalid status code " + strconv.Itoa(status))
	}
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.err != nil || s.resp.code != 0 {
		return
	}
	if status < 200 {
		s.inform(status, s.resp.header)
		s.c.flush()
		return
	}
	s.head(status)
}

// Write implements io.Writer. It waits until the client may be sent p, but not until it was.
func (s *stream) Write(p []byte) (int, error) {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &s.resp
	if r.code == 0 {
		s.head(http.StatusOK)
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
func (s *stream) data(p []byte) {
	r, o := &s.resp, &s.c.out
	r.sent += int64(len(p))
	o.window -= int64(len(p))
	s.window -= int64(len(p))
	r.lastBatch, r.lastAt = o.batch, len(o.open())
	o.appendData(s.id, p, 0)
}

// end ends the body: by the last DATA if that was not sent yet.
func (r *response) end(s *stream) {
	if o := &s.c.out; r.sent > 0 && r.lastBatch == o.batch {
		o.b[r.lastAt+flagsAt] |= flagEndStream
	} else {
		o.appendData(s.id, nil, flagEndStream)
	}
}

// head appends the head of the response.
func (s *stream) head(status int) {
	r, h := &s.resp, s.Header()
	for len(s.c.out.b) > maxOut && s.err == nil {
		s.await()
	}
	if r.stall.stop(); s.err != nil {
		return
	}
	r.code, r.declared = status, -1
	if length := h["Content-Length"]; len(length) == 1 {
		if n, err := strconv.ParseUint(length[0], 10, 63); err == nil {
			r.declared = int64(n)
		} else {
			delete(h, "Content-Length")
		}
	}
	r.bodyless = s.req.Method == http.MethodHead || status == http.StatusNoContent || status == http.StatusNotModified
	r.trailer = announced(h["Trailer"])
	if _, ok := h["Date"]; !ok {
		h["Date"] = []string{date()}
	}
	if httpguts.HeaderValuesContainsToken(h["Connection"], "close") {
		s.c.goAway()
	}
	r.ended = r.bodyless || r.declared == 0 && r.trailer == nil
	s.c.headers(s.id, r.ended, func(e *hpack.Encoder) { encode(e, status, h, r.trailer) })
}

// inform appends an informational response, unless the final one was sent.
func (s *stream) inform(status int, h http.Header) {
	if s.resp.code == 0 && s.err == nil {
		s.c.headers(s.id, false, func(e *hpack.Encoder) { encode(e, status, h, nil) })
	}
}

// encode encodes a status and a header, without the fields of its trailer.
func encode(e *hpack.Encoder, status int, h http.Header, trailer []string) {
	if status != 0 {
		_ = e.WriteField(hpack.HeaderField{Name: ":status", Value: strconv.Itoa(status)})
	}
	for name, values := range h {
		if !ofHTTP1(name) && !strings.HasPrefix(name, http.TrailerPrefix) && !slices.Contains(trailer, name) {
			encodeField(e, name, values)
		}
	}
}

func encodeField(e *hpack.Encoder, name string, values []string) {
	name = lowerName(name)
	if _, known := canonical[name]; !known && !validName(name) {
		return
	}
	for _, v := range values {
		if httpguts.ValidHeaderFieldValue(v) {
			_ = e.WriteField(hpack.HeaderField{Name: name, Value: v})
		}
	}
}

// finish ends the response.
func (r *response) finish(s *stream) {
	if r.deadline.stop(); r.code == 0 {
		if _, declared := s.Header()["Content-Length"]; !declared && s.req.Method != http.MethodHead {
			s.Header()["Content-Length"] = []string{"0"}
		}
		if s.head(http.StatusOK); s.err != nil {
			return
		}
	}
	trailer := r.trailers()
	switch {
	case r.ended:
	case r.declared >= 0 && r.sent != r.declared:
		s.reset(codeInternal, http.ErrContentLength)
	case len(trailer) > 0:
		s.c.headers(s.id, true, func(e *hpack.Encoder) { encode(e, 0, trailer, nil) })
	default:
		r.end(s)
	}
	r.ended = true
}

// trailers returns the trailer: the fields that the header announced, and those with http.TrailerPrefix.
func (r *response) trailers() http.Header {
	var out http.Header
	for name, values := range r.header {
		late, prefixed := strings.CutPrefix(name, http.TrailerPrefix)
		if !prefixed && !slices.Contains(r.trailer, name) {
			continue
		}
		if out == nil {
			out = http.Header{}
		}
		out[http.CanonicalHeaderKey(late)] = values
	}
	return out
}

// FlushError is for http.ResponseController.
func (s *stream) FlushError() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.err == nil && s.resp.code == 0 {
		s.head(http.StatusOK)
	}
	s.c.flush()
	return s.err
}

// Flush implements http.Flusher.
func (s *stream) Flush() { _ = s.FlushError() }

// EnableFullDuplex is for http.ResponseController: a stream always is.
func (s *stream) EnableFullDuplex() error { return nil }

// SetReadDeadline is for http.ResponseController.
func (s *stream) SetReadDeadline(t time.Time) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.body.late = false; s.err == nil {
		s.body.deadline.set(s, t, func() {
			s.body.late = true
			s.changed.Broadcast()
		})
	}
	return nil
}

// SetWriteDeadline is for http.ResponseController. The stream is reset at the deadline.
func (s *stream) SetWriteDeadline(t time.Time) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.err == nil {
		s.resp.deadline.set(s, t, s.giveUp)
	}
	return nil
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
