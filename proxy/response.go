package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// response is what the client gets.
type response struct {
	client client
	code   int   // of the status; 0: none yet
	bytes  int64 // of the body
	begun  bool  // its head was sent
}

// deliver sends a response to the client.
func (x *exchange) deliver(resp *upstream.Response) {
	x.sendHead(resp)
	switch {
	case x.Whole != nil:
		x.write(x.Whole)
	case x.Plan.Delivery == pipeline.DeliveryStream:
		if x.Narrowed.Unmarked {
			defer x.NoteMethod() // also when the client ends the watch
		}
		x.settleIn()
		if whole := x.copyStream(resp.Body); whole {
			x.end = x.completion(resp, nil)
		}
	default:
		x.copyShort(resp.Body)
		x.NoteMethod()
	}
	x.response.client.trailer(resp.Trailer)
}

// sendHead sends the status and header of a response, and counts and records what depends
// on them.
func (x *exchange) sendHead(resp *upstream.Response) {
	pipeline.DropHopByHop(&resp.Header)
	if x.Resumption.Ticket != nil && x.Resumption.Fills && resp.Status == http.StatusOK {
		x.Resumption.Ticket.Listed()
	}
	x.response.head(resp.Status, resp.Header, resp.Trailer)
	x.added = x.sending.Sent.Sub(x.start) + time.Since(x.received)
	x.Plan.Meters.Added.Observe(x.added.Seconds())
	if x.Plan.Delivery == pipeline.DeliveryStream {
		if x.Resumption.Initial == nil && !x.Resumption.Behind {
			x.Resumption.Begun(resp.Status == http.StatusOK)
		}
		x.response.client.Flush() // the client of a watch without events must see that it began
		x.account()
	}
}

// head sends a head to the client.
func (r *response) head(code int, fields header.Fields, trailer *upstream.Trailer) {
	r.begun, r.code = true, code
	r.client.head(code, fields, trailer)
}

// refuse sends a refusal of a request to the client.
func (r *response) refuse(req *pipeline.Request, err *apierrors.StatusError) {
	fields, body := status.Encode(req.Header.Get("Accept"), req.Query, err)
	r.head(int(err.ErrStatus.Code), fields, nil)
	if req.Method != http.MethodHead {
		r.pass(body)
	}
}

// copyShort copies a body in large pieces.
func (x *exchange) copyShort(r io.Reader) {
	buf := upstream.Buffer()
	defer buf.Free()
	for {
		n, err := pipeline.Fill(r, buf.B)
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

// settleIn frees what only the beginning of a stream needs. A stream with a body of the
// client's may need it as long as it lasts.
func (x *exchange) settleIn() {
	if x.Req.Length == 0 {
		x.Opened()
		x.strip(0)
		x.sending = upstream.Request{Sent: x.sending.Sent}
	}
}

// copyStream copies a body, and flushes after each read. It reports whether the client got
// the whole body.
func (x *exchange) copyStream(r io.Reader) (whole bool) {
	if m := x.Plan.Meters.Watches; m != nil && x.response.code == http.StatusOK {
		m.Inc()
		defer m.Dec()
		if a := x.Plan.Activity; a != nil {
			if over := a.Watched(&x.State); over != nil {
				defer over()
			}
		}
	}
	b := streamBuffer{budgets: x.Memory.Budgets}
	defer b.free()
	for {
		p, err := b.read(r)
		if len(p) > 0 && !x.writeStream(p) {
			return false
		}
		switch {
		case err == nil:
		case err == io.EOF: //nolint:errorlint // a wrapped one is a body cut short
			return true
		case x.ended():
			if errors.Is(context.Cause(x.Ctx), relist.ErrPolicyChanged) {
				x.delayEnd()
			}
			return false // a clean end: the client resumes
		case errors.Is(err, events.ErrCut):
			panic(errAbort)
		default:
			x.end = x.completion(nil, err)
			x.broken()
		}
	}
}

// writeStream writes p and flushes it; false when the client is gone.
func (x *exchange) writeStream(p []byte) bool {
	began := time.Now()
	if !x.write(p) {
		return false
	}
	x.response.client.Flush()
	if d := x.Plan.Meters.Delivery; d != nil {
		d.Add(time.Since(began).Seconds())
	}
	if x.Resumption.Initial != nil && x.Resumption.Initial.Passed(p) {
		x.Resumption.Initial = nil
		x.NoteMethod()
		x.Resumption.Begun(x.response.code == http.StatusOK)
	}
	return true
}

// streamBuffer is taken from a pool while there are bytes to copy. It is small, and large
// after a read that filled it if the pod's budget has room.
type streamBuffer struct {
	budgets *pipeline.Budgets
	buf     *upstream.Buf // nil: none is taken
	large   bool          // buf is in the budget
	full    bool          // the last read filled it
}

// read returns the next bytes of r. They are valid until the next call.
func (b *streamBuffer) read(r io.Reader) ([]byte, error) {
	b.free()
	// A read of nothing waits without a buffer, where r can: in HTTP/2, in chunks, and in
	// what is filtered.
	if _, err := r.Read(nil); err != nil {
		return nil, err
	}
	b.take()
	n, err := r.Read(b.buf.B)
	b.full = n == len(b.buf.B)
	return b.buf.B[:n], err
}

func (b *streamBuffer) take() {
	if b.large = b.full && b.budgets.Withhold(upstream.BufferSize); b.large {
		b.buf = upstream.Buffer()
	} else {
		b.buf = upstream.SmallBuffer()
	}
}

func (b *streamBuffer) free() {
	if b.buf != nil {
		b.buf.Free()
		b.buf = nil
	}
	if b.large {
		b.budgets.Filtered.Give(upstream.BufferSize)
		b.large = false
	}
}

// ended reports whether the proxy itself ended the request.
func (x *exchange) ended() bool {
	cause := context.Cause(x.Ctx)
	return errors.Is(cause, relist.ErrPolicyChanged) || errors.Is(cause, errShutdown) || errors.Is(cause, errDraining)
}

// write sends p to the client; false when it is gone.
func (x *exchange) write(p []byte) bool {
	if x.Injection.Faults != nil {
		return x.writeFaulty(p)
	}
	return x.response.pass(p)
}

// pass sends p as it is; false when the client is gone.
func (r *response) pass(p []byte) bool {
	n, err := r.client.Write(p)
	r.bytes += int64(n)
	return err == nil
}

// writeFaulty writes p, slowly or in part if a fault says so.
func (x *exchange) writeFaulty(p []byte) bool {
	f := x.Injection.Faults
	for len(p) > 0 && !f.Harmless() {
		n := f.Limit(len(p))
		pass, pause := f.Pass(time.Now(), n)
		if pass > 0 && !x.response.pass(p[:pass]) {
			return false
		}
		p = p[pass:]
		if pass < n {
			if x.pod.env.Lift(x.Injection.Faults); f.ResetAfter || f.Truncate >= 0 {
				x.breakOff()
			}
			continue
		}
		if f.Slow > 0 {
			x.response.client.Flush()
			if !x.pod.env.Wait(&x.State, func() time.Duration { return pause * time.Duration(min(f.Slow, 1)) }) {
				f.Slow = 0 // the rest is not slow any more
			}
		}
	}
	return len(p) == 0 || x.response.pass(p)
}

// breakOff ends the response so that the client detects that it is incomplete.
func (x *exchange) breakOff() {
	x.Injection.Broke = true
	x.response.client.Flush()
	if x.Req.Proto == pipeline.HTTP10 { // whose bodies end with the connection
		x.response.client.reset()
	}
	panic(errAbort)
}
