package proxy

import (
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// allowance is what a request has of what rules allow.
type allowance struct {
	taken  time.Time // zero: not asked yet, or no rule is about the request
	asked  time.Time // when all that the client had to do for an answer was done
	ticket limit.Ticket
	// refusedBy is the rule that refused, as breaker/rule.
	refusedBy string
	// unknown: how the apiserver fares does not show in the answer.
	unknown bool
	// broken: the answer ended half way.
	broken bool
}

// limitStage takes a request from what the rules allow.
type limitStage struct {
	resources *limit.Resources // nil: the request is for a path
	paths     *limit.Rules
}

// limitStage returns nil where no rule is about such requests.
func (p *policy) limitStage(key match.Kind, isResource bool) stage {
	if !isResource {
		if !p.rules.Paths() {
			return nil
		}
		return &limitStage{paths: p.rules}
	}
	if resources := p.rules.OfKind(key); resources != nil {
		return &limitStage{resources: resources}
	}
	return nil
}

// apply takes once: a request that starts over has taken already.
func (s *limitStage) apply(x *exchange) *outcome {
	if !x.allowed.taken.IsZero() {
		return nil
	}
	var refused *limit.Refusal
	now := time.Now()
	if s.resources != nil {
		o := x.object()
		x.allowed.ticket, refused = s.resources.Take(now, &o, x.out.header.get("User-Agent"))
	} else {
		x.allowed.ticket, refused = s.paths.TakePath(now, x.req.info.Verb, x.req.info.Path, x.out.header.get("User-Agent"))
	}
	x.allowed.taken = now
	if refused == nil {
		return nil
	}
	x.allowed.refusedBy = refused.Breaker + "/" + refused.Rule
	x.policy.limited.Count(refused.Breaker, refused.Rule, refused.Reason)
	reason := meshv1.RefusedLimited
	if refused.Opened {
		reason = meshv1.RefusedBreaker
	}
	return refusalBy(reason, limited(x.pod.info.Namespace, refused))
}

// limited returns the refusal of a request that is above a limit.
func limited(namespace string, r *limit.Refusal) *apierrors.StatusError {
	if r.Opened {
		return status.Unavailable(r.RetrySeconds(), "%s", r.Message(namespace))
	}
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, r.RetrySeconds(), "%s", r.Message(namespace))
}

// answeredWithin reports the result of the request to the rules. It is called when the
// request is accounted, which may go on then.
func (x *exchange) answeredWithin() {
	a := &x.allowed
	if a.taken.IsZero() || a.refusedBy != "" {
		return
	}
	now := time.Now()
	broken := a.broken || x.broke || x.code == 0 && x.faults != nil && x.faults.Reset
	o := limit.Outcome{
		Failed: broken || failed(x.code),
		// A client that left before the whole answer came shows nothing about it,
		// except how long answers take, if it waited for long.
		Unknown: a.unknown || x.code == metrics.ClientGone || x.code == 0 && !broken && x.req.gone() != nil,
	}
	if x.plan.route != stream && !a.unknown { // a watch, or a log that is followed, waits for what comes to pass
		o.Took = a.took(now, x.received, o.Unknown)
	}
	a.ticket.Answered(now, o)
}

// failed reports whether a status code says that the apiserver is in trouble; 0 is none.
func failed(code int) bool {
	return code == 0 || code >= http.StatusInternalServerError || code == http.StatusTooManyRequests
}

// took returns how long the response took, 0 if that is not known.
func (a *allowance) took(now, received time.Time, unknown bool) time.Duration {
	switch {
	case !received.Before(a.taken):
		return received.Sub(a.taken)
	case !unknown: // nothing came
		return now.Sub(a.taken)
	case !a.asked.IsZero():
		return now.Sub(a.asked)
	}
	return 0
}

// waits notes that the answer is due.
func (a *allowance) waits() {
	if a.asked.IsZero() {
		a.asked = time.Now()
	}
}
