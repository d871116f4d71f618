package traffic

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// pace limits the writes of one object's status.
type pace struct {
	at time.Time // of the last write
	// last is the object that was written then. It replaced the resource version base.
	last   client.Object
	base   string
	events *rate.Limiter
}

// round is one run of the controller.
type round struct {
	*Controller
	ctx   context.Context
	in    status.TrafficInput
	paces map[types.UID]*pace
	wait  time.Duration // until the next write is due; 0 if there is none
	errs  []error
	// writes are made once all objects have been read.
	writes []statusWrite
	calm   int // number of writes that were made and not urgent
	// opened and injected are numbers of pods, by object.
	opened, injected map[types.NamespacedName]int32
}

// statusWrite is a pending write of an object's status.
type statusWrite struct {
	*pace
	current, updated client.Object
	gap              time.Duration // since the last write; 0 if it is urgent
	written          func()
}

// newest returns the newest state of an object whose spec was compiled, and its pace. The
// pace is nil if the object was deleted, or its spec has changed and will be compiled soon.
// It reads into cached. The object is as it was last written if the cache is older.
func newest[T client.Object](r *round, compiled, cached T) (*pace, T) {
	err := r.Cache.Get(r.ctx, client.ObjectKeyFromObject(compiled), cached)
	if client.IgnoreNotFound(err) != nil {
		r.errs = append(r.errs, err)
	}
	if err != nil || cached.GetUID() != compiled.GetUID() || cached.GetGeneration() != compiled.GetGeneration() {
		return nil, cached
	}
	p := r.Controller.paces[cached.GetUID()]
	if p == nil {
		p = &pace{events: rate.NewLimiter(rate.Every(eventGap), eventBurst)}
	}
	r.paces[cached.GetUID()] = p
	if last, ok := p.last.(T); ok && p.base == cached.GetResourceVersion() {
		return p, last
	}
	return p, cached
}

// write writes a status, unless it is too early or too many others were written.
func (r *round) write(s statusWrite) {
	if wait := s.at.Add(s.gap).Sub(r.in.Now); wait > 0 {
		r.again(wait)
		return
	}
	if s.gap > 0 {
		if r.calm == calmWrites || s.gap == countGap && !r.counts.Allow() {
			r.again(writeRetry)
			return
		}
		r.calm++
	}
	s.at = r.in.Now
	err := r.Client.Status().Update(r.ctx, s.updated)
	switch {
	case apierrors.IsNotFound(err):
	case apierrors.IsConflict(err):
		s.at, s.last = time.Time{}, nil
		r.again(writeRetry) // until the cache has the new version
	case err != nil:
		r.errs = append(r.errs, fmt.Errorf("writing the status of %T %s: %w", s.updated, client.ObjectKeyFromObject(s.updated), err))
	default:
		s.base, s.last = s.current.GetResourceVersion(), s.updated
		s.written()
	}
}

func (r *round) again(wait time.Duration) {
	if r.wait == 0 || wait < r.wait {
		r.wait = wait
	}
}

// breaker queues the write of a CircuitBreaker's status.
func (r *round) breaker(b compile.Breaker) {
	name := client.ObjectKeyFromObject(b)
	others := r.opened[name] // of a TrafficPolicy of the same name
	r.opened[name] = others + b.Status.Opened
	p, current := newest(r, b.CircuitBreaker, &v1alpha1.CircuitBreaker{})
	if p == nil {
		return
	}
	b.CircuitBreaker = current
	record, fits := r.State.Allocator.Record(current)
	next := status.OfBreaker(b, r.in, record, fits)
	r.opened[name] = others + next.Opened
	before := current.Status
	// Shares that must be recorded are written even if the cached status has them, because
	// the cache may be outdated.
	waits := fits && r.State.Allocator.Unrecorded(name)
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
		r.State.Allocator.Recorded(name, next.Shares)
		if waits {
			r.State.Changed.Recorded.Notify()
		}
		r.reportTurns(p, updated, &updated.Status, before)
	}})
}

// reportTurns emits Events for breakers that opened or closed.
func (r *Controller) reportTurns(p *pace, c client.Object, now *v1alpha1.CircuitBreakerStatus, before v1alpha1.CircuitBreakerStatus) {
	for _, turn := range status.Turns(before.TargetStatus, now.TargetStatus) {
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
