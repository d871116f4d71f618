package pipeline

import (
	"bytes"
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// State is one request, and what the stages have decided about it.
type State struct {
	Req       Request
	Debug     bool      // an access line is written
	Memory    Holding   // of the pod's budgets
	Allowed   allowance // of limits
	Injection Injection // of faults
	Decision            // of the stages under the policy in force
}

// Decision is the result of the stages for a request under one policy. A request that
// starts over begins with a new one.
type Decision struct {
	Plan *Plan // nil: the gate has not passed the request
	Ctx  context.Context
	// Interrupt ends Ctx of a request that may last: no more of the response is read.
	Interrupt func()

	Out       Outgoing
	Responses responseStages
	Whole     []byte // not nil: the body of the response, as a stage made it

	Exempt    bool   // isolation does not apply: a lock, a shared object, or nothing is left to narrow
	Protocol  string // to which the connection changes, or empty
	Would     string // action that a dry run or isolation Observe withholds, or empty
	Last      bool   // close the connection after the response
	Connected bool   // it is among the open connections into pods and services

	Lock       aboutLock
	Narrowed   narrowed
	Resumption Resumption
	Stale      StaleList
}

// aboutLock is what a request about a lock does.
type aboutLock struct {
	Named      *lock.Lock // nil: the request is about none
	Holder     string     // of the lock, by the request itself
	AnyVersion bool       // a write that applies to whatever version of the lock there is
}

// Renew has a request evaluated anew, as it came.
func (x *State) Renew() { x.Decision = Decision{Ctx: x.Req.Ctx, Out: x.Req.Outgoing()} }

// Opened gives back what only the beginning of a stream takes.
func (x *State) Opened() {
	n := max(0, x.Req.Weight()-StreamWeight)
	x.Memory.Held -= n
	x.Memory.Budget.Give(n)
}

// Gathers reports whether Gather has anything to do: a stage may have read the body.
func (x *State) Gathers() bool {
	return x.Plan.Delivery == DeliveryShort && x.Req.Length != 0 && !x.Req.Body.begun()
}

// Gather waits for the body, or as much of it as a buffer takes, before the request is
// sent. A client that announces bodies which never come uses memory here, and nothing that
// the apiserver shares among all its clients.
func (x *State) Gather() error {
	err := x.Req.Body.begin()
	x.Out.Body = x.Req.Body.reader()
	return err
}

// Peek returns the request's body if all of it fits into a buffer. The body is sent
// unchanged.
func (x *State) Peek() (body []byte, whole bool) {
	if x.Out.Header.Get("Content-Encoding") != "" {
		return nil, false
	}
	if r, read := x.Out.Body.(*bytes.Reader); read { // by a stage
		body = make([]byte, min(r.Len(), upstream.BufferSize))
		_, err := r.ReadAt(body, r.Size()-int64(r.Len()))
		return body, err == nil && r.Len() == len(body)
	}
	if !x.Gathers() || x.Gather() != nil {
		return nil, false
	}
	return x.Req.Body.early.B, x.Req.Body.ended
}

// ReadBody reads all of the request's body, up to limit bytes. It can be read again when
// the request starts over.
func (x *State) ReadBody(limit int) ([]byte, *apierrors.StatusError) {
	if x.Out.Header.Get("Content-Encoding") != "" {
		return nil, status.UnsupportedMediaType("a body that the proxy must read must not be encoded")
	}
	if kept := x.Req.Body.whole; kept != nil {
		if len(kept) > limit {
			return nil, status.TooLarge(limit)
		}
		return kept, nil
	}
	raw, err := x.Memory.ReadAll(x.Req.Body.reader(), limit)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return nil, refused
	}
	if err != nil {
		return nil, status.BadRequest("the body cannot be read")
	}
	x.Req.Body.whole = raw
	return raw, nil
}
