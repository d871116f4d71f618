package proxy

import (
	"cmp"
	"context"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// object is what rules ask of a request for a resource beside its kind. The lock has
// the name that the client gives it.
func (x *exchange) object() match.Object {
	o := match.Object{Namespace: x.req.info.Namespace, Name: x.req.info.Name, Header: x.out.header}
	switch {
	case x.lock != nil:
		o.Name, o.Lock = x.lock.Name(), true
	case x.req.info.APIGroup == "coordination.k8s.io" && x.req.info.Resource == "leases":
		o.Lock = x.req.info.Name != "" || x.req.info.Verb == "create"
	}
	return o
}

// faultStage decides on a request's faults, and injects those that come before it is
// sent on. A request that starts over keeps its faults, but waits once.
type faultStage struct {
	resources *fault.Resources // nil: no rule is about such requests
	paths     *fault.Rules     // not nil: the request is for a path
	stale     *staleness       // nil: lists are never stale
}

// faultStage returns nil where there are no rules. Where there are some it returns the
// stage even if none is about such requests: they may have started over, and keep the
// faults of an earlier policy.
func (p *policy) faultStage(key match.Kind, isResource bool, stale *staleness) stage {
	if len(p.faults.Names()) == 0 {
		return nil
	}
	if !isResource {
		return &faultStage{paths: p.faults}
	}
	return &faultStage{resources: p.faults.OfKind(key), stale: stale}
}

func (s *faultStage) apply(x *exchange) *outcome {
	if !x.decided {
		x.decided = true
		if refused := s.decide(x); refused != nil {
			return refusalBy(meshv1.RefusedFault, refused)
		}
	}
	f := x.faults
	if f == nil {
		return nil
	}
	x.responses.add(s)
	if f.Delay > 0 {
		x.delay()
		if f.Delay = 0; x.lift(x.pod) != x.policy { // another came meanwhile
			return restart
		}
	}
	switch {
	case f.Reset:
		return reset
	case f.Abort != nil && f.Abort.Status < http.StatusBadRequest:
		return &outcome{kind: respondEmpty, code: f.Abort.Status}
	case f.Abort != nil:
		return refusalBy(meshv1.RefusedFault, injected(x.pod.info.Namespace, &x.req, f.Abort))
	case f.Stale > 0 && s.stale != nil:
		s.stale.ask(x, f.Stale)
	}
	return nil
}

// decide decides on the request's faults, or refuses it.
func (s *faultStage) decide(x *exchange) *apierrors.StatusError {
	if s.stale != nil {
		if refused := s.stale.refuseInitialEvents(x); refused != nil {
			return refused
		}
	}
	if x.pod.draining.Err() != nil {
		return nil // what the rules counted, and have left of their counts, is the next proxy's
	}
	if s.paths != nil {
		x.faults = s.paths.DecidePath(time.Now(), x.req.info.Verb, x.req.info.Path)
	} else if s.resources != nil {
		o := x.object()
		x.faults = s.resources.Decide(time.Now(), &o)
	}
	if x.faults != nil && x.faults.Watch != nil {
		x.faults.Watch.Report = func(by fault.Injected) { x.policy.countFault(by) }
	}
	return nil
}

// lift takes out of the request's faults what is not in effect any more, under the
// policy that it returns.
func (i *injection) lift(p *Pod) *policy {
	pol := p.policy.Load()
	pol.faults.Lift(time.Now(), i.faults)
	return pol
}

// delay waits before the request is sent on.
func (x *exchange) delay() {
	// A client over HTTP/1 is only seen to go away when its body was read.
	if x.gathers() && x.gather() != nil {
		return // forward finds out what is wrong
	}
	x.allowed.waits()
	x.wait(func() time.Duration { return x.faults.Delay })
}

// injection is what faults do to a request.
type injection struct {
	faults  *fault.Faults // nil: none
	skipped string        // why no fault was injected into the events of a watch, where one was to be
	decided bool          // on them
}

// wait waits for a fault, as long as it is in effect. It reports false if the time did not
// pass: the client or the answer is gone, or another proxy takes over.
func (x *exchange) wait(left func() time.Duration) bool {
	ctx, cancel := context.WithCancel(x.ctx)
	defer cancel()
	defer context.AfterFunc(x.req.ctx, cancel)()
	return fault.Wait(ctx, x.pod.draining.Done(), func() <-chan struct{} { return x.lift(x.pod).replaced }, left)
}

// respond injects the faults of a response: into a watch's events, or its end before it
// began.
func (s *faultStage) respond(x *exchange, resp *upstream.Response) *outcome {
	x.injectEvents(resp)
	if x.lift(x.pod); x.faults.ResetAfter {
		x.broke = true
		return reset
	}
	return nil
}

// injected returns what an apiserver would answer to a request that a rule of a namespace
// aborts.
func injected(namespace string, r *request, a *fault.Abort) *apierrors.StatusError {
	usual := apierrors.NewGenericServerResponse(a.Status, r.method, schema.GroupResource{}, "", "", 0, false)
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
	if r.info.IsResourceRequest {
		if err.ErrStatus.Details == nil {
			err.ErrStatus.Details = &metav1.StatusDetails{}
		}
		d := err.ErrStatus.Details
		d.Group, d.Kind, d.Name = r.info.APIGroup, r.info.Resource, r.info.Name
	}
	return err
}

// writeFaulty writes p, slowly or in part if a fault says so.
func (x *exchange) writeFaulty(p []byte) bool {
	f := x.faults
	for len(p) > 0 && !f.Harmless() {
		n := f.Limit(len(p))
		pass, pause := f.Pass(time.Now(), n)
		if pass > 0 && !x.pass(p[:pass]) {
			return false
		}
		p = p[pass:]
		if pass < n {
			if x.lift(x.pod); f.ResetAfter || f.Truncate >= 0 {
				x.breakOff()
			}
			continue
		}
		if f.Slow > 0 {
			x.client.flush()
			if !x.wait(func() time.Duration { return pause * time.Duration(min(f.Slow, 1)) }) {
				f.Slow = 0 // the rest is not slow any more
			}
		}
	}
	return len(p) == 0 || x.pass(p)
}

// breakOff ends the response so that the client detects that it is incomplete.
func (x *exchange) breakOff() {
	x.broke = true
	x.client.flush()
	if x.req.proto == proto10 { // whose bodies end with the connection
		x.client.reset()
	}
	panic(errAbort)
}

// countFault counts one fault.
func (p *policy) countFault(by fault.Injected) {
	p.injected.Count(by.Injection, by.Rule, by.Kind.String())
}

// countInjected counts what was done to the request, when it is over: whether its response was
// broken off, and whether it was a stale list.
func (i *injection) countInjected(under *policy, broke, stale bool) {
	if i.faults != nil {
		i.faults.Broke = broke
	}
	for _, by := range i.faults.Done(stale) {
		under.countFault(*by)
	}
}
