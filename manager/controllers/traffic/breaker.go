package traffic

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

func (r *round) breaker(b compile.Breaker) {
	name := client.ObjectKeyFromObject(b)
	r.opened[name] = b.Status.Opened
	cached := &v1alpha1.CircuitBreaker{}
	if !r.current(b.CircuitBreaker, cached) {
		return
	}
	p := r.pace(b.UID)
	current := newest(p, cached)
	b.CircuitBreaker = current
	record, fits := r.State.Book.Record(current)
	next := status.OfBreaker(b, r.in, record, fits)
	r.opened[name] = next.Opened
	before := current.Status
	// What is to be recorded is written even if it seems to be there: the cache may lag
	// behind what is.
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

// reportTurns makes Events of breakers that opened or closed.
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
