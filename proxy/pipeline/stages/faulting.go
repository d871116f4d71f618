package stages

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// faultStage decides on a request's faults, and injects those that come before it is
// sent on. A request that starts over keeps its faults, but waits once.
type faultStage struct {
	policy    *Policy
	resources *fault.Resources // nil: no rule is about such requests
	paths     *fault.Rules     // not nil: the request is for a path
	stale     *staleness       // nil: lists are never stale
}

// newFaultStage returns nil where there are no rules. Where there are some it returns the
// stage even if none is about such requests: they may have started over, and keep the
// faults of an earlier policy.
func newFaultStage(p *Policy, key match.Kind) pipeline.Stage {
	if len(p.Traffic.faults.Names()) == 0 {
		return nil
	}
	if !isResource(key) {
		return &faultStage{policy: p, paths: p.Traffic.faults}
	}
	stale, _ := newStaleness(p, key).(*staleness)
	return &faultStage{policy: p, resources: p.Traffic.faults.OfKind(key), stale: stale}
}

func (s *faultStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if !x.Injection.Decided {
		x.Injection.Decided = true
		if refused := s.decide(x); refused != nil {
			return pipeline.RefusalFor(meshv1.RefusedFault, refused)
		}
	}
	f := x.Injection.Faults
	if f == nil {
		return nil
	}
	if f.Watch != nil {
		f.Watch.Report = s.policy.CountFault
		x.Out.Drop("Accept-Encoding") // from 1.37 the apiserver compresses initial events
	}
	x.Responses.Add(s)
	if f.Delay > 0 {
		s.delay(x)
		if f.Delay = 0; s.policy.env.Lift(x.Injection.Faults) != s.policy { // another came meanwhile
			return pipeline.Restart
		}
		if gone := x.Req.Gone(); gone != nil { // an abort would count as a failure
			return pipeline.Failure(gone)
		}
	}
	switch {
	case f.Reset:
		return pipeline.Reset
	case f.Abort != nil && f.Abort.Status < http.StatusBadRequest:
		return &pipeline.Outcome{Kind: pipeline.RespondEmpty, Code: f.Abort.Status}
	case f.Abort != nil:
		return pipeline.RefusalFor(meshv1.RefusedFault, injected(s.policy.env.Info.Namespace, &x.Req, f.Abort))
	case f.Stale > 0 && s.stale != nil:
		s.stale.ask(x, f.Stale)
	}
	return nil
}

// decide decides on the request's faults, or refuses it.
func (s *faultStage) decide(x *pipeline.State) *apierrors.StatusError {
	if s.stale != nil {
		if refused := s.stale.refuseInitialEvents(x); refused != nil {
			return refused
		}
	}
	if s.policy.env.Draining.Err() != nil {
		return nil // what the rules counted, and have left of their counts, is the next proxy's
	}
	if s.paths != nil {
		x.Injection.Faults = s.paths.DecidePath(time.Now(), x.Req.Info.Verb, x.Req.Info.Path)
	} else if s.resources != nil {
		o := x.Object()
		x.Injection.Faults = s.resources.Decide(time.Now(), &o)
	}
	return nil
}

// delay waits before the request is sent on.
func (s *faultStage) delay(x *pipeline.State) {
	// A client over HTTP/1 is only seen to go away when its body was read.
	if x.Gathers() && x.Gather() != nil {
		return // sending it finds out what is wrong
	}
	x.Allowed.Waits()
	s.policy.env.Wait(x, func() time.Duration { return x.Injection.Faults.Delay })
}

// Respond injects the faults of a response: into a watch's events, or its end before it
// began.
func (s *faultStage) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	s.injectEvents(x, resp)
	if s.policy.env.Lift(x.Injection.Faults); x.Injection.Faults.ResetAfter {
		x.Injection.Broke = true
		return pipeline.Reset
	}
	return nil
}

// injected returns what an apiserver would answer to a request that a rule of a namespace
// aborts.
func injected(namespace string, r *pipeline.Request, a *fault.Abort) *apierrors.StatusError {
	usual := apierrors.NewGenericServerResponse(a.Status, r.Method, schema.GroupResource{}, "", "", 0, false)
	reason, retry := usual.ErrStatus.Reason, 0
	switch a.Status {
	case http.StatusGone:
		reason = metav1.StatusReasonExpired
	case http.StatusRequestEntityTooLarge:
		reason = metav1.StatusReasonRequestEntityTooLarge
	case http.StatusTooManyRequests:
		retry = 1
	}
	err := status.New(a.Status, cmp.Or(metav1.StatusReason(a.Reason), reason), retry,
		"injected by FaultInjection %s/%s, in place of the apiserver's answer", namespace, a.Rule)
	if r.Info.IsResourceRequest {
		if err.ErrStatus.Details == nil {
			err.ErrStatus.Details = &metav1.StatusDetails{}
		}
		d := err.ErrStatus.Details
		d.Group, d.Kind, d.Name = r.Info.APIGroup, r.Info.Resource, r.Info.Name
	}
	return err
}

// CountFault counts one fault.
func (p *Policy) CountFault(by fault.Injected) {
	p.Tally.Injected.Count(by.Injection, by.Rule, by.Kind.String())
}

// CountInjected counts what was done to the request, when it is over: stale if it was a stale
// list.
func (p *Policy) CountInjected(i *pipeline.Injection, stale bool) {
	if i.Faults != nil {
		i.Faults.Broke = i.Broke
	}
	for _, by := range i.Faults.Done(stale) {
		p.CountFault(*by)
	}
}

// injectEvents injects faults into the events of a watch, if they can be read. The head
// is not sent yet.
func (s *faultStage) injectEvents(x *pipeline.State, resp *upstream.Response) {
	if x.Injection.Faults == nil || x.Injection.Faults.Watch == nil {
		return
	}
	if x.Resumption.Ticket == nil || x.Req.Info.Verb != "watch" || resp.Status != http.StatusOK {
		x.Injection.Faults.Over()
		return
	}
	if encoding := resp.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		x.Injection.Skip("the events are encoded", x.Injection.Faults.Over)
		return
	}
	openGap(x)
	o := events.Options{
		ContentType: resp.Get("Content-Type"),
		Faults:      x.Injection.Faults.Watch,
		Interrupt:   x.Interrupt,
		Still:       func() (bool, <-chan struct{}) { return s.stillInjecting(x) },
		Hold:        x.Memory.HoldRead,
		Release:     x.Memory.GiveFiltered,
		Take:        x.Memory.Budgets.Withhold,
		Give:        x.Memory.Budgets.Filtered.Give,
	}
	if x.Resumption.Gap != nil {
		o.Gap = &x.Resumption.Gap.Gap
	}
	injected, err := events.New(resp.Body, o)
	if err != nil {
		x.Injection.Skip(pipeline.Bounded(err.Error()), x.Injection.Faults.Over)
		return
	}
	resp.Body = &injectedBody{injected, resp.Body, x.Ctx}
	resp.Header.Drop("Content-Length")
}

// openGap makes room for what the watch's client will miss, or has it miss nothing.
func openGap(x *pipeline.State) {
	w := x.Injection.Faults.Watch
	overtakes := w.Exempt != nil && x.Req.Info.Namespace == "" && (w.Stall != nil || w.Delay != nil)
	if w.Drop == nil && !overtakes {
		return
	}
	if x.Resumption.Gap = x.Resumption.Ticket.Gap(); x.Resumption.Gap == nil && w.Drop != nil {
		w.Drop = nil
		x.Injection.Skip("too many watches miss events", func() { x.Injection.Faults.Missed(fault.WatchDrop) })
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
func (s *faultStage) stillInjecting(x *pipeline.State) (still bool, changed <-chan struct{}) {
	pol := s.policy.env.Lift(x.Injection.Faults)
	return s.policy.env.Draining.Err() == nil && x.Injection.Faults.Watch != nil, pol.Succession.Replaced
}
