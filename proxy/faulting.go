package proxy

import (
	"cmp"
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

// faultStage decides on a request's faults, and injects those that come before it is
// sent on. A request that starts over keeps its faults, but waits once.
type faultStage struct {
	policy    *policy
	resources *fault.Resources // nil: no rule is about such requests
	paths     *fault.Rules     // not nil: the request is for a path
	stale     *staleness       // nil: lists are never stale
}

// newFaultStage returns nil where there are no rules. Where there are some it returns the
// stage even if none is about such requests: they may have started over, and keep the
// faults of an earlier policy.
func newFaultStage(p *policy, key match.Kind, isResource bool, stale *staleness) stage {
	if len(p.faults.Names()) == 0 {
		return nil
	}
	if !isResource {
		return &faultStage{policy: p, paths: p.faults}
	}
	return &faultStage{policy: p, resources: p.faults.OfKind(key), stale: stale}
}

func (s *faultStage) apply(x *state) *outcome {
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
	if f.Watch != nil {
		f.Watch.Report = s.policy.countFault
	}
	x.responses.add(s)
	if f.Delay > 0 {
		s.delay(x)
		if f.Delay = 0; s.policy.env.lift(x.faults) != s.policy { // another came meanwhile
			return restart
		}
	}
	switch {
	case f.Reset:
		return reset
	case f.Abort != nil && f.Abort.Status < http.StatusBadRequest:
		return &outcome{kind: respondEmpty, code: f.Abort.Status}
	case f.Abort != nil:
		return refusalBy(meshv1.RefusedFault, injected(s.policy.env.info.Namespace, &x.req, f.Abort))
	case f.Stale > 0 && s.stale != nil:
		s.stale.ask(x, f.Stale)
	}
	return nil
}

// decide decides on the request's faults, or refuses it.
func (s *faultStage) decide(x *state) *apierrors.StatusError {
	if s.stale != nil {
		if refused := s.stale.refuseInitialEvents(x); refused != nil {
			return refused
		}
	}
	if s.policy.env.draining.Err() != nil {
		return nil // what the rules counted, and have left of their counts, is the next proxy's
	}
	if s.paths != nil {
		x.faults = s.paths.DecidePath(time.Now(), x.req.info.Verb, x.req.info.Path)
	} else if s.resources != nil {
		o := x.object()
		x.faults = s.resources.Decide(time.Now(), &o)
	}
	return nil
}

// delay waits before the request is sent on.
func (s *faultStage) delay(x *state) {
	// A client over HTTP/1 is only seen to go away when its body was read.
	if x.gathers() && x.gather() != nil {
		return // forward finds out what is wrong
	}
	x.allowed.waits()
	s.policy.env.wait(x, func() time.Duration { return x.faults.Delay })
}

// respond injects the faults of a response: into a watch's events, or its end before it
// began.
func (s *faultStage) respond(x *state, resp *upstream.Response) *outcome {
	s.injectEvents(x, resp)
	if s.policy.env.lift(x.faults); x.faults.ResetAfter {
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

// countFault counts one fault.
func (p *policy) countFault(by fault.Injected) {
	p.injected.Count(by.Injection, by.Rule, by.Kind.String())
}

// countInjected counts what was done to the request, when it is over: stale if it was a stale
// list.
func (p *policy) countInjected(i *injection, stale bool) {
	if i.faults != nil {
		i.faults.Broke = i.broke
	}
	for _, by := range i.faults.Done(stale) {
		p.countFault(*by)
	}
}
