package pipeline

import (
	"net/http"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
)

// Object is what rules ask of a request for a resource beside its kind. The lock has
// the name that the client gives it.
func (x *State) Object() match.Object {
	o := match.Object{Cluster: x.Req.Cluster, Namespace: x.Req.Info.Namespace, Name: x.Req.Info.Name, Header: x.Out.Header}
	switch {
	case x.Lock.Named != nil:
		o.Name, o.Lock = x.Lock.Named.Name(), true
	case x.Req.Info.APIGroup == "coordination.k8s.io" && x.Req.Info.Resource == "leases":
		o.Lock = x.Req.Info.Name != "" || x.Req.Info.Verb == "create"
	}
	return o
}

// allowance is what a request has of what rules allow.
type allowance struct {
	Taken  time.Time // zero: not asked yet, or no rule is about the request
	asked  time.Time // when all that the client had to do for an answer was done
	Ticket limit.Ticket
	// RefusedBy is the rule that refused, as breaker/rule.
	RefusedBy string
	// Unknown means that the response shows nothing about the apiserver.
	Unknown bool
	// Broken means that the response ended early.
	Broken bool
}

// Waits notes that the answer is due.
func (a *allowance) Waits() {
	if a.asked.IsZero() {
		a.asked = time.Now()
	}
}

// ReportResult reports the result of the request to the rules: the status code, and when
// the head of the response came. It is called when the request is accounted, which may go
// on then.
func (x *State) ReportResult(code int, received time.Time) {
	a := &x.Allowed
	if a.Taken.IsZero() || a.RefusedBy != "" {
		return
	}
	now := time.Now()
	broken := a.Broken || x.Injection.Broke || code == 0 && x.Injection.Faults != nil && x.Injection.Faults.Reset
	o := limit.Outcome{
		Failed: broken || failed(code),
		// A client that left before the whole answer came shows nothing about it,
		// except how long answers take, if it waited for long.
		Unknown: a.Unknown || code == metrics.ClientGone || code == 0 && !broken && x.Req.Gone() != nil,
	}
	// A watch, or a log that is followed, waits for events. A request that started over and
	// was refused before a plan was chosen has none.
	if !a.Unknown && x.Plan != nil && x.Plan.Delivery != DeliveryStream {
		o.Took = a.took(now, received, o.Unknown)
	}
	a.Ticket.Answered(now, o)
}

// failed reports whether a status code says that the apiserver is in trouble; 0 is none.
func failed(code int) bool {
	return code == 0 || code >= http.StatusInternalServerError || code == http.StatusTooManyRequests
}

// took returns how long the response took, 0 if that is not known.
func (a *allowance) took(now, received time.Time, unknown bool) time.Duration {
	switch {
	case !received.Before(a.Taken):
		return received.Sub(a.Taken)
	case !unknown: // nothing came
		return now.Sub(a.Taken)
	case !a.asked.IsZero():
		return now.Sub(a.asked)
	}
	return 0
}

// Injection is what faults do to a request.
type Injection struct {
	Faults  *fault.Faults // nil: none
	Skipped string        // why no fault was injected into the events of a watch, where one was to be
	Decided bool          // on them
	Broke   bool          // a fault broke the response off
}

// Skip notes why a fault is not injected into a watch, beside the rules that were to.
func (i *Injection) Skip(why string, missed func()) {
	rules := slices.Clone(i.Faults.Rules)
	missed()
	i.Faults.Rules, i.Skipped = rules, why
}
