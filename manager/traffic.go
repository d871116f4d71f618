package manager

import (
	"context"
	"errors"
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
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

const (
	// writeGap is the least time between two writes of an object's status, and
	// countGap that while nothing changes but counts of requests.
	writeGap = 2 * time.Second
	countGap = 10 * time.Second
	// eventGap and eventBurst bound the Events of an object.
	eventGap   = 10 * time.Second
	eventBurst = 10
)

// openBook reads what is on record of CircuitBreakers whose members share, before
// anybody is told anything of them.
func (w *world) openBook(ctx context.Context, breakers []*v1alpha1.CircuitBreaker) error {
	there := map[types.NamespacedName]bool{}
	for _, c := range breakers {
		name := client.ObjectKeyFromObject(c)
		there[name] = true
		if w.book.Has(name) || !shares(c) {
			continue
		}
		live := &v1alpha1.CircuitBreaker{}
		if err := w.live.Get(ctx, name, live); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("reading the shares on record of CircuitBreaker %s: %w", name, err)
		}
		w.book.Open(name, live.Status)
	}
	w.book.Close(func(name types.NamespacedName) bool { return there[name] })
	return nil
}

func shares(c *v1alpha1.CircuitBreaker) bool {
	for _, l := range c.Spec.RateLimitings {
		if l.Scope == v1alpha1.LimitScopeWorkload {
			return true
		}
	}
	return false
}

// keepShares splits rules of scope Workload anew as members come, go and confirm.
func (w *world) keepShares(context.Context) error {
	w.sharing.Lock()
	defer w.sharing.Unlock()
	c := w.compiled.Load()
	if c == nil {
		return nil
	}
	tell, record := w.book.Round(c.Policies, func(p compile.Policy) bool {
		o := w.push.Observe(p.Node, p.Uid)
		return o.Version == p.Version && o.TrafficMessage == ""
	})
	if tell {
		w.policiesLoop.poke()
	}
	if record {
		w.trafficLoop.poke()
	}
	return nil
}

// traffic is what keepTraffic alone keeps.
type traffic struct {
	since time.Time // when this replica began to write
	paces map[types.UID]*pace
	// later wakes the loop for what was too early.
	later *time.Timer
}

// pace of writing about one object.
type pace struct {
	written time.Time
	// last is what was written then, in the place of what has version base.
	last   client.Object
	base   string
	events *rate.Limiter
}

// newest is an object as it is, if the cache has it but as it was before the last write.
func newest[T client.Object](p *pace, cached T) T {
	if last, ok := p.last.(T); ok && p.base == cached.GetResourceVersion() {
		return last
	}
	return cached
}

// keepTraffic writes the statuses of CircuitBreakers and FaultInjections.
func (w *world) keepTraffic(ctx context.Context) error {
	c := w.compiled.Load()
	if c == nil {
		return nil
	}
	now := time.Now()
	t := &w.traffic
	if t.since.IsZero() {
		t.since = now
	}
	round := &trafficRound{world: w, ctx: ctx, paces: map[types.UID]*pace{}, in: status.TrafficInput{
		Policy:  func(uid types.UID) *meshv1.PodPolicy { return c.Policies[uid].PodPolicy },
		Observe: w.push.Observe,
		Now:     now,
		Since:   t.since,
	}}
	metrics.BreakersOpened.Reset()
	for _, b := range c.Breakers {
		round.breaker(b)
	}
	metrics.FaultsInForce.Reset()
	for _, f := range c.Injections {
		round.injection(f)
	}
	t.paces = round.paces
	if t.later != nil {
		t.later.Stop()
	}
	if round.wait > 0 {
		t.later = time.AfterFunc(round.wait, w.trafficLoop.poke)
	}
	return errors.Join(round.errs...)
}

// trafficRound is one run of keepTraffic.
type trafficRound struct {
	*world
	ctx   context.Context
	in    status.TrafficInput
	paces map[types.UID]*pace
	wait  time.Duration // until there is more to write; 0 for ever
	errs  []error
}

func (r *trafficRound) pace(uid types.UID) *pace {
	p := r.traffic.paces[uid]
	if p == nil {
		p = &pace{events: rate.NewLimiter(rate.Every(eventGap), eventBurst)}
	}
	r.paces[uid] = p
	return p
}

// current reads the newest state of an object whose spec was compiled, and tells
// whether there is one.
func (r *trafficRound) current(compiled, into client.Object) bool {
	err := r.cache.Get(r.ctx, client.ObjectKeyFromObject(compiled), into)
	if client.IgnoreNotFound(err) != nil {
		r.errs = append(r.errs, err)
	}
	// If it is another one, the policies loop will be here soon.
	return err == nil && into.GetUID() == compiled.GetUID() && into.GetGeneration() == compiled.GetGeneration()
}

// write writes a status unless it is too early, and tells whether it did.
func (r *trafficRound) write(p *pace, current, updated client.Object, gap time.Duration) bool {
	if wait := p.written.Add(gap).Sub(r.in.Now); wait > 0 {
		r.again(wait)
		return false
	}
	p.written = r.in.Now
	err := r.live.Status().Update(r.ctx, updated)
	switch {
	case apierrors.IsNotFound(err):
	case apierrors.IsConflict(err):
		p.written, p.last = time.Time{}, nil
		r.again(firstRetry) // the cache will have it
	case err != nil:
		r.errs = append(r.errs, fmt.Errorf("status of %T %s: %w", updated, client.ObjectKeyFromObject(updated), err))
	default:
		p.base, p.last = current.GetResourceVersion(), updated
		return true
	}
	return false
}

func (r *trafficRound) again(wait time.Duration) {
	if r.wait == 0 || wait < r.wait {
		r.wait = wait
	}
}

func (r *trafficRound) breaker(b compile.Breaker) {
	cached := &v1alpha1.CircuitBreaker{}
	if !r.current(b.CircuitBreaker, cached) {
		return
	}
	p := r.pace(b.UID)
	current := newest(p, cached)
	name := client.ObjectKeyFromObject(current)
	b.CircuitBreaker = current
	record := r.book.Record(name)
	next := status.OfBreaker(b, r.in, record)
	metrics.BreakersOpened.WithLabelValues(b.Namespace, b.Name).Set(float64(next.Opened))
	before := current.Status
	if equality.Semantic.DeepEqual(before, next) {
		r.book.Recorded(name, record)
		return
	}
	gap := writeGap
	switch {
	case r.book.Unrecorded(name):
		gap = 0
	case status.CountsAlone(before, next):
		gap = countGap
	}
	updated := current.DeepCopy()
	updated.Status = next
	if !r.write(p, current, updated, gap) {
		return
	}
	r.book.Recorded(name, record)
	if len(record) > 0 {
		r.sharesLoop.poke()
	}
	r.tellTurns(p, updated, before)
}

// tellTurns makes Events of breakers that opened or closed.
func (w *world) tellTurns(p *pace, c *v1alpha1.CircuitBreaker, before v1alpha1.CircuitBreakerStatus) {
	for _, turn := range status.Turns(before.TargetStatus, c.Status.TargetStatus) {
		switch {
		case !p.events.Allow():
			return
		case turn.Opened:
			w.recorder.Eventf(c, nil, corev1.EventTypeWarning, "BreakerOpened", "Limit", "rule %s opened in pod %s: requests that it matches are refused", turn.Rule, turn.Pod)
		default:
			w.recorder.Eventf(c, nil, corev1.EventTypeNormal, "BreakerClosed", "Limit", "rule %s closed in pod %s", turn.Rule, turn.Pod)
		}
	}
}

func (r *trafficRound) injection(f compile.Injection) {
	cached := &v1alpha1.FaultInjection{}
	if !r.current(f.FaultInjection, cached) {
		return
	}
	p := r.pace(f.UID)
	current := newest(p, cached)
	f.FaultInjection = current
	next := status.OfInjection(f, r.in)
	metrics.FaultsInForce.WithLabelValues(f.Namespace, f.Name).Set(float64(next.PodsInForce))
	before := current.Status
	if equality.Semantic.DeepEqual(before, next) {
		return
	}
	gap := writeGap
	switch {
	case next.ExpirationGeneration != before.ExpirationGeneration:
		gap = 0 // it has no effect before
	case status.FaultCountsAlone(before, next):
		gap = countGap
	}
	updated := current.DeepCopy()
	updated.Status = next
	if !r.write(p, current, updated, gap) {
		return
	}
	r.tellFaults(p, updated, before)
}

// tellFaults makes Events of when faults begin and when they expire.
func (w *world) tellFaults(p *pace, f *v1alpha1.FaultInjection, before v1alpha1.FaultInjectionStatus) {
	reason := func(s v1alpha1.FaultInjectionStatus) string {
		if c := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionReady); c != nil {
			return c.Reason
		}
		return ""
	}
	begin := f.Status.PodsInForce > 0 && before.PodsInForce == 0
	expire := reason(f.Status) == compile.ReasonExpired && reason(before) != compile.ReasonExpired
	switch {
	case !begin && !expire || !p.events.Allow():
	case begin:
		w.recorder.Eventf(f, nil, corev1.EventTypeWarning, "FaultsBegin", "Inject", "faults are injected in %d of %d pods", f.Status.PodsInForce, f.Status.Pods)
	default:
		w.recorder.Eventf(f, nil, corev1.EventTypeNormal, compile.ReasonExpired, "Inject", "%s", clip(meta.FindStatusCondition(f.Status.Conditions, v1alpha1.ConditionReady).Message))
	}
}
