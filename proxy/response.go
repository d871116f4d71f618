package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/upstream"
)

// response is what the client got so far.
type response struct {
	code  int   // of the status; 0: none yet
	bytes int64 // of the body
	begun bool  // its head was sent
	broke bool  // a fault broke it off
}

// responseStage edits a response on its way down, or ends the exchange.
type responseStage interface {
	respond(x *exchange, r *upstream.Response) *outcome
}

// responseStages are those that the stages of a request asked for, in their order.
type responseStages struct {
	n   int
	all [4]responseStage
}

func (s *responseStages) add(one responseStage) {
	s.all[s.n] = one
	s.n++
}

// only has a stage be the first, and those before it none.
func (s *responseStages) only(one responseStage) {
	s.n = 0
	s.add(one)
}

func (s *responseStages) respond(x *exchange, r *upstream.Response) *outcome {
	for _, one := range s.all[:s.n] {
		if end := one.respond(x, r); end != nil {
			return end
		}
	}
	return nil
}

// deliver sends a response to the client.
func (x *exchange) deliver(resp *upstream.Response) {
	x.sendHead(resp)
	switch {
	case x.whole != nil:
		x.write(x.whole)
	case x.plan.route == stream:
		if whole := x.copyStream(resp.Body); whole {
			x.end = x.completion(resp, nil)
		}
	default:
		x.copyShort(resp.Body)
		x.noteMethod(&x.pod.methods, x.req.info.Namespace)
	}
	x.client.trailer(resp.Trailer)
}

// sendHead sends the status and header of a response, and keeps the books that
// depend on them.
func (x *exchange) sendHead(resp *upstream.Response) {
	dropHopByHop(resp.Header)
	if x.ticket != nil && x.fills && resp.Status == http.StatusOK {
		x.pod.ledger.listed(x.ticket)
	}
	x.head(resp.Status, resp.Header, resp.Trailer)
	x.added = x.sending.Sent.Sub(x.start) + time.Since(x.received)
	x.plan.meters.added.Observe(x.added.Seconds())
	if x.plan.route == stream {
		x.client.flush() // a client of a quiet watch must see that it began
		if x.initial == nil {
			x.settled.Store(time.Now().UnixNano())
		}
		x.account()
	}
}

// head sends a head to the client.
func (x *exchange) head(code int, fields, trailer header) {
	x.responds(code)
	x.client.head(code, fields, trailer)
}

// responds notes that the response begins.
func (x *exchange) responds(code int) {
	x.client.last = x.client.last || x.pod.draining.Err() != nil
	x.begun, x.code = true, code
}

// copyShort copies a body in large pieces.
func (x *exchange) copyShort(r io.Reader) {
	buf := upstream.Buffer()
	defer buf.Free()
	for {
		n, err := fill(r, buf.B)
		if n > 0 && !x.write(buf.B[:n]) {
			return
		}
		if err == io.EOF { //nolint:errorlint // a wrapped one is a body cut short
			return
		}
		if err != nil {
			x.broken()
		}
	}
}

// fill reads until p is full or r has no more. Unlike io.ReadFull it keeps a
// truncated body apart from its end.
func fill(r io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		m, err = r.Read(p[n:])
		n += m
	}
	return n, err
}

// copyStream copies a body and flushes what each read gave. While nothing comes
// it holds a small buffer; it takes a large one while more comes than fits. It reports
// whether the client got the whole body.
func (x *exchange) copyStream(r io.Reader) (whole bool) {
	if m := x.plan.meters.watches; m != nil && x.code == http.StatusOK {
		m.Inc()
		defer m.Dec()
	}
	small := make([]byte, 4<<10)
	var big *upstream.Buf
	defer func() {
		if big != nil {
			big.Free()
		}
	}()
	for {
		p := small
		if big != nil {
			p = big.B
		}
		n, err := r.Read(p)
		if n > 0 {
			if !x.write(p[:n]) {
				return false
			}
			x.client.flush()
			if x.initial != nil && x.initial.passed(p[:n]) {
				x.initial = nil
				x.noteMethod(&x.pod.methods, x.req.info.Namespace)
				x.settled.Store(time.Now().UnixNano())
			}
		}
		switch {
		case err == io.EOF:
			return true
		case err != nil && x.ended():
			x.linger()
			return false // a clean end: the client resumes
		case errors.Is(err, events.ErrCut):
			panic(errAbort)
		case err != nil:
			x.end = x.completion(nil, err)
			x.broken()
		case n == len(small) && big == nil:
			big = upstream.Buffer()
		case n < len(small) && big != nil:
			big.Free()
			big = nil
		}
	}
}

// ended tells whether the proxy itself ended the request.
func (x *exchange) ended() bool {
	cause := context.Cause(x.ctx)
	return errors.Is(cause, errPolicyChanged) || errors.Is(cause, errShutdown) || errors.Is(cause, errDraining)
}

// write sends p to the client; false when it is gone.
func (x *exchange) write(p []byte) bool {
	if x.faults != nil {
		return x.spoil(p)
	}
	return x.pass(p)
}

func (x *exchange) pass(p []byte) bool {
	n, err := x.client.write(p)
	x.bytes += int64(n)
	return err == nil
}
