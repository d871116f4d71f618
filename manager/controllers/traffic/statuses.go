package traffic

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// breaker queues the write of a CircuitBreaker's status.
func (r *round) breaker(b compile.Breaker) {
	name := client.ObjectKeyFromObject(b)
	r.opened[name] = b.Status.Opened
	p, current := newest(r, b.CircuitBreaker, &v1alpha1.CircuitBreaker{})
	if p == nil {
		return
	}
	b.CircuitBreaker = current
	record, fits := r.State.Book.Record(current)
	next := status.OfBreaker(b, r.in, record, fits)
	r.opened[name] = next.Opened
	before := current.Status
	// Shares that must be recorded are written even if the cached status has them, because
	// the cache may be outdated.
	waits := fits && r.State.Book.Unrecorded(name)
	if !waits && equality.Semantic.DeepEqual(before, next) {
		return
	}
	gap := writeGap
	switch {
	case waits:
		gap = 0
	case status.CountsAlone(before, next):
		gap = countGap
	}
	updated := current.DeepCopy()
	updated.Status = next
	r.writes = append(r.writes, statusWrite{p, current, updated, gap, func() {
		r.State.Book.Recorded(name, next.Shares)
		if waits {
			r.State.Changed.Recorded.Notify()
		}
		r.reportTurns(p, updated, before)
	}})
}

// reportTurns emits Events for breakers that opened or closed.
func (r *Controller) reportTurns(p *pace, c *v1alpha1.CircuitBreaker, before v1alpha1.CircuitBreakerStatus) {
	for _, turn := range status.Turns(before.TargetStatus, c.Status.TargetStatus) {
		switch {
		case !p.events.Allow():
			return
		case turn.Opened:
			r.Recorder.Eventf(c, nil, corev1.EventTypeWarning, "BreakerOpened", "Limit", "rule %s opened in pod %s: requests that it matches are refused", turn.Rule, turn.Pod)
		default:
			r.Recorder.Eventf(c, nil, corev1.EventTypeNormal, "BreakerClosed", "Limit", "rule %s closed in pod %s", turn.Rule, turn.Pod)
		}
	}
}

// injection queues the write of a FaultInjection's status.
func (r *round) injection(f compile.Injection) {
	name := client.ObjectKeyFromObject(f)
	r.injected[name] = f.Status.PodsInForce
	p, current := newest(r, f.FaultInjection, &v1alpha1.FaultInjection{})
	if p == nil {
		return
	}
	f.FaultInjection = current
	next := status.OfInjection(f, r.in)
	if next.ExpirationTime != nil && next.ExpirationTime.After(r.in.Now) {
		r.again(next.ExpirationTime.Sub(r.in.Now))
	}
	r.injected[name] = next.PodsInForce
	before := current.Status
	if equality.Semantic.DeepEqual(before, next) {
		return
	}
	gap := writeGap
	switch {
	case next.ExpirationGeneration != before.ExpirationGeneration:
		gap = 0 // the object has no effect before
	case next.ExpirationTime != nil && next.ExpirationTime.Time.Before(r.in.Now.Add(countGap)):
		// Counts that are not written by then are lost: agents report none after the expiry.
	case status.FaultCountsAlone(before, next):
		gap = countGap
	}
	updated := current.DeepCopy()
	updated.Status = next
	r.writes = append(r.writes, statusWrite{p, current, updated, gap, func() { r.reportFaults(p, updated, before) }})
}

// reportFaults emits Events when faults begin and when they expire.
func (r *Controller) reportFaults(p *pace, f *v1alpha1.FaultInjection, before v1alpha1.FaultInjectionStatus) {
	reason := func(s v1alpha1.FaultInjectionStatus) string {
		if c := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionReady); c != nil {
			return c.Reason
		}
		return ""
	}
	begin := f.Status.PodsInForce > 0 && before.PodsInForce == 0
	expire := reason(f.Status) == string(v1alpha1.ReasonExpired) && reason(before) != string(v1alpha1.ReasonExpired)
	switch {
	case !begin && !expire || !p.events.Allow():
	case begin:
		r.Recorder.Eventf(f, nil, corev1.EventTypeWarning, "FaultsBegin", "Inject", "faults are injected in %d of %d pods", f.Status.PodsInForce, f.Status.Pods)
	default:
		r.Recorder.Eventf(f, nil, corev1.EventTypeNormal, string(v1alpha1.ReasonExpired), "Inject", "%s", status.Note(meta.FindStatusCondition(f.Status.Conditions, v1alpha1.ConditionReady).Message))
	}
}
