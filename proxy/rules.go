package proxy

import (
	"net/http"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
)

// object is what rules ask of a request for a resource beside its kind. The lock has
// the name that the client gives it.
func (x *state) object() match.Object {
	o := match.Object{Namespace: x.req.info.Namespace, Name: x.req.info.Name, Header: x.out.header}
	switch {
	case x.lock != nil:
		o.Name, o.Lock = x.lock.Name(), true
	case x.req.info.APIGroup == "coordination.k8s.io" && x.req.info.Resource == "leases":
		o.Lock = x.req.info.Name != "" || x.req.info.Verb == "create"
	}
	return o
}

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

// waits notes that the answer is due.
func (a *allowance) waits() {
	if a.asked.IsZero() {
		a.asked = time.Now()
	}
}

// reportResult reports the result of the request to the rules: the status code, and when
// the head of the response came. It is called when the request is accounted, which may go
// on then.
func (x *state) reportResult(code int, received time.Time) {
	a := &x.allowed
	if a.taken.IsZero() || a.refusedBy != "" {
		return
	}
	now := time.Now()
	broken := a.broken || x.broke || code == 0 && x.faults != nil && x.faults.Reset
	o := limit.Outcome{
		Failed: broken || failed(code),
		// A client that left before the whole answer came shows nothing about it,
		// except how long answers take, if it waited for long.
		Unknown: a.unknown || code == metrics.ClientGone || code == 0 && !broken && x.req.gone() != nil,
	}
	if x.plan.route != stream && !a.unknown { // a watch, or a log that is followed, waits for what comes to pass
		o.Took = a.took(now, received, o.Unknown)
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

// injection is what faults do to a request.
type injection struct {
	faults  *fault.Faults // nil: none
	skipped string        // why no fault was injected into the events of a watch, where one was to be
	decided bool          // on them
	broke   bool          // a fault broke the response off
}

// skip notes why a fault is not injected into a watch, beside the rules that were to.
func (i *injection) skip(why string, missed func()) {
	rules := slices.Clone(i.faults.Rules)
	missed()
	i.faults.Rules, i.skipped = rules, why
}
