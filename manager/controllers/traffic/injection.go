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

func (r *round) injection(f compile.Injection) {
	name := client.ObjectKeyFromObject(f)
	r.injected[name] = f.Status.PodsInForce
	cached := &v1alpha1.FaultInjection{}
	if !r.current(f.FaultInjection, cached) {
		return
	}
	p := r.pace(f.UID)
	current := newest(p, cached)
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
		gap = 0 // it has no effect before
	case next.ExpirationTime != nil && next.ExpirationTime.Time.Before(r.in.Now.Add(countGap)):
		// What is not written by then is lost: agents report no counts of what expired.
	case status.FaultCountsAlone(before, next):
		gap = countGap
	}
	updated := current.DeepCopy()
	updated.Status = next
	r.writes = append(r.writes, statusWrite{p, current, updated, gap, func() { r.reportFaults(p, updated, before) }})
}

// reportFaults makes Events of when faults begin and when they expire.
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
