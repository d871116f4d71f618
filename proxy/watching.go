package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// injectEvents injects faults into the events of a watch, if they can be read. The head
// is not sent yet.
func (s *faultStage) injectEvents(x *state, resp *upstream.Response) {
	if x.faults == nil || x.faults.Watch == nil {
		return
	}
	if x.ticket == nil || x.req.info.Verb != "watch" || resp.Status != http.StatusOK {
		x.faults.Over()
		return
	}
	if encoding := resp.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		x.skip("the events are encoded", x.faults.Over)
		return
	}
	openGap(x)
	o := events.Options{
		ContentType: resp.Get("Content-Type"),
		Faults:      x.faults.Watch,
		Interrupt:   x.interrupt,
		Still:       func() (bool, <-chan struct{}) { return s.stillInjecting(x) },
		Hold:        x.holdRead,
		Take:        x.accounts.withhold,
		Give:        x.accounts.filtered.Give,
	}
	if x.gap != nil {
		o.Gap = &x.gap.Gap
	}
	injected, err := events.New(resp.Body, o)
	if err != nil {
		x.skip(bounded(err.Error()), x.faults.Over)
		return
	}
	resp.Body = &injectedBody{injected, resp.Body, x.ctx}
	delete(resp.Header, "Content-Length")
}

// openGap makes room for what the watch's client will miss, or has it miss nothing.
func openGap(x *state) {
	w := x.faults.Watch
	overtakes := w.Exempt != nil && x.req.info.Namespace == "" && (w.Stall != nil || w.Delay != nil)
	if w.Drop == nil && !overtakes {
		return
	}
	if x.gap = x.ticket.Gap(); x.gap == nil && w.Drop != nil {
		w.Drop = nil
		x.skip("too many watches miss events", func() { x.faults.Missed(fault.WatchDrop) })
	}
}

// injectedBody is a watch with injected faults, and the response that it comes from.
type injectedBody struct {
	*events.Reader
	body io.Closer
	ctx  context.Context
}

// Read reads nothing more when a policy has ended the watch: what is held back may be
// none of the client's business now. It misses nothing, as it resumes from before that
// or lists.
func (b *injectedBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if cause := context.Cause(b.ctx); errors.Is(cause, relist.ErrPolicyChanged) {
		return 0, cause
	}
	return n, err
}

// Close closes the response when the faults are done with it.
func (b *injectedBody) Close() error {
	_ = b.Reader.Close()
	return b.body.Close()
}

// stillInjecting reports whether rules that inject into x are in effect, and what is closed when
// they may not be any more. While another proxy takes over they are not: it would not
// know what was kept from the client.
func (s *faultStage) stillInjecting(x *state) (still bool, changed <-chan struct{}) {
	pol := s.policy.env.lift(x.faults)
	return s.policy.env.draining.Err() == nil && x.faults.Watch != nil, pol.replaced
}
