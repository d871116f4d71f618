package proxy

import (
	"bytes"
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// state is one request, and what the stages have decided about it.
type state struct {
	req       request
	debug     bool      // an access line is written
	holding             // of the pod's budgets
	allowed   allowance // of limits
	injection           // of faults
	decision            // of the stages under the policy in force
}

// decision is the result of the stages for a request under one policy. A request that
// starts over begins with a new one.
type decision struct {
	plan *plan // nil: the gate has not passed the request
	ctx  context.Context
	// interrupt ends ctx of a request that may last: no more of the response is read.
	interrupt func()

	out       outgoing
	responses responseStages
	whole     []byte // not nil: the body of the response, as a stage made it

	lock      *lock.Lock // not nil: the request is about this lock
	exempt    bool       // neither narrowed nor fenced: a lock, or readable by every shard
	protocol  string     // to which the connection changes, or empty
	would     string     // action of a policy without the dry run, or empty
	last      bool       // close the connection after the response
	connected bool       // it is among the open connections into pods and services

	narrowed
	resumption
	staleList
}

// renew has a request evaluated anew, as it came.
func (x *state) renew() { x.decision = decision{ctx: x.req.ctx, out: x.req.outgoing()} }

// gathers reports whether gather has anything to do: a stage may have read the body.
func (x *state) gathers() bool {
	return x.plan.route == short && x.req.length != 0 && !x.req.body.begun()
}

// gather waits for the body, or as much of it as a buffer takes, before the apiserver
// hears of the request. A client that announces bodies which never come takes room here,
// and none of what the apiserver shares out among all its clients.
func (x *state) gather() error {
	err := x.req.body.begin()
	x.out.body = x.req.body.reader()
	return err
}

// peek returns the request's body if all of it fits into a buffer. The body is sent
// unchanged.
func (x *state) peek() (body []byte, whole bool) {
	if x.out.header.get("Content-Encoding") != "" {
		return nil, false
	}
	if r, read := x.out.body.(*bytes.Reader); read { // by a stage
		body = make([]byte, min(r.Len(), upstream.BufferSize))
		_, err := r.ReadAt(body, r.Size()-int64(r.Len()))
		return body, err == nil && r.Len() == len(body)
	}
	if !x.gathers() || x.gather() != nil {
		return nil, false
	}
	return x.req.body.early.B, x.req.body.ended
}

// readBody reads all of the request's body, up to limit bytes. It can be read again when
// the request starts over.
func (x *state) readBody(limit int) ([]byte, *apierrors.StatusError) {
	if x.out.header.get("Content-Encoding") != "" {
		return nil, status.UnsupportedMediaType("a body that the proxy must read must not be encoded")
	}
	if kept := x.req.body.whole; kept != nil {
		if len(kept) > limit {
			return nil, status.TooLarge(limit)
		}
		return kept, nil
	}
	raw, err := x.readAll(x.req.body.reader(), limit)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return nil, refused
	}
	if err != nil {
		return nil, status.BadRequest("the body cannot be read")
	}
	x.req.body.whole = raw
	return raw, nil
}
