package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	// writeRetry is the time after which a write is tried again.
	writeRetry = 200 * time.Millisecond
	// countRate and countBurst bound the writes of all objects' mere counts, and calmWrites
	// those of one round that nobody waits for: what is urgent meanwhile comes after it.
	countRate, countBurst = 20, 20
	calmWrites            = 100
	// sharesPatience is how long policies wait for the shares on record, and after which
	// those that go on without ask again.
	sharesPatience = 10 * time.Second
	// pageOfBreakers are read at once; they may be large.
	pageOfBreakers = 20
	// eventGap and eventBurst bound the Events of an object.
	eventGap   = 10 * time.Second
	eventBurst = 10
)

// openBook reads what is on record of CircuitBreakers whose members share, or did, before
// anybody is told anything of them. For a while everybody waits for that; then none
// of what cannot be read is shared out, and the rest goes on.
func (w *world) openBook(ctx context.Context, breakers []*v1alpha1.CircuitBreaker) error {
	there, unread := map[types.NamespacedName]bool{}, map[types.NamespacedName]bool{}
	for _, c := range breakers {
		name := client.ObjectKeyFromObject(c)
		there[name] = true
		if w.Book.Lacks(c) {
			unread[name] = true
		}
	}
	if err := w.readShares(ctx, unread); err == nil {
		w.unread = time.Time{}
	} else {
		if w.unread.IsZero() {
			w.unread = time.Now()
		}
		if err = fmt.Errorf("reading the shares on record of CircuitBreakers: %w", err); time.Since(w.unread) < sharesPatience {
			return err
		}
		w.Log.Warn("rules of scope Workload that are not shared out yet refuse all requests", "error", err)
	}
	w.Book.Close(func(name types.NamespacedName) bool { return there[name] })
	return nil
}

// readShares opens the book at these CircuitBreakers, by what is in no cache.
func (w *world) readShares(ctx context.Context, unread map[types.NamespacedName]bool) error {
	if len(unread) == 0 {
		return nil
	}
	in := map[string]bool{}
	namespace := metav1.NamespaceAll
	for name := range unread {
		in[name.Namespace] = true
		namespace = name.Namespace
	}
	if len(in) > 1 {
		namespace = metav1.NamespaceAll
	}
	var live v1alpha1.CircuitBreakerList
	for page := ""; ; page = live.Continue {
		live = v1alpha1.CircuitBreakerList{}
		if err := w.live.List(ctx, &live, client.InNamespace(namespace), client.Limit(pageOfBreakers), client.Continue(page)); err != nil {
			return err
		}
		for i := range live.Items {
			if name := client.ObjectKeyFromObject(&live.Items[i]); unread[name] {
				w.Book.Open(name, live.Items[i].Status)
				delete(unread, name)
			}
		}
		if live.Continue == "" {
			break
		}
	}
	for name := range unread { // it is gone
		w.Book.Open(name, v1alpha1.CircuitBreakerStatus{})
	}
	return nil
}

// keepShares splits rules of scope Workload anew as members come, go and confirm.
func (w *world) keepShares(context.Context) error {
	w.Sharing.Lock()
	defer w.Sharing.Unlock()
	c := w.Compiled.Load()
	if c == nil {
		return nil
	}
	tell, record := w.Book.Round(c.Policies, func(p compile.Policy) bool {
		o := w.push.Observe(p.Node, p.Uid)
		return o.Version == p.Version && o.TrafficMessage == ""
	})
	if tell {
		w.Changed.Shares.Notify()
	}
	if record {
		w.Changed.Unrecorded.Notify()
	}
	return nil
}

// traffic is what keepTraffic alone keeps.
type traffic struct {
	since time.Time // when this replica began to write
	paces map[types.UID]*pace
	// counts bounds the writes of counts alone.
	counts *rate.Limiter
	// next is when there is more to write of what was too early; zero if there is none.
	next time.Time
}

// pace of writing about one object.
type pace struct {
	at time.Time // of the last write
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
	c := w.Compiled.Load()
	if c == nil {
		return nil
	}
	now := time.Now()
	t := &w.traffic
	if t.since.IsZero() {
		t.since, t.counts = now, rate.NewLimiter(countRate, countBurst)
	}
	round := &trafficRound{world: w, ctx: ctx, paces: map[types.UID]*pace{},
		opened: map[types.NamespacedName]int32{}, harmed: map[types.NamespacedName]int32{},
		in: status.TrafficInput{
			Policy:  func(uid types.UID) *meshv1.PodPolicy { return c.Policies[uid].PodPolicy },
			Observe: w.push.Observe,
			Now:     now,
			Since:   t.since,
		}}
	for _, b := range c.Breakers {
		round.breaker(b)
	}
	for _, f := range c.Injections {
		round.injection(f)
	}
	// What others wait for comes first, counts last.
	slices.SortStableFunc(round.writes, func(a, b statusWrite) int { return cmp.Compare(a.gap, b.gap) })
	for _, s := range round.writes {
		round.write(s)
	}
	t.paces = round.paces
	metrics.BreakersOpen.Set(round.opened)
	metrics.FaultsInForce.Set(round.harmed)
	t.next = time.Time{}
	if round.wait > 0 {
		t.next = time.Now().Add(round.wait)
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
	// writes are to be made, once all objects are looked at.
	writes []statusWrite
	calm   int // that were made and nobody waited for
	// opened and harmed are numbers of pods, by object.
	opened, harmed map[types.NamespacedName]int32
}

// statusWrite is one of an object's status.
type statusWrite struct {
	*pace
	current, updated client.Object
	gap              time.Duration // 0: others wait for it
	written          func()
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

// write writes a status unless it is too early, or others have their turn.
func (r *trafficRound) write(s statusWrite) {
	if wait := s.at.Add(s.gap).Sub(r.in.Now); wait > 0 {
		r.again(wait)
		return
	}
	if s.gap > 0 {
		if r.calm == calmWrites || s.gap == countGap && !r.traffic.counts.Allow() {
			r.again(writeRetry)
			return
		}
		r.calm++
	}
	s.at = r.in.Now
	err := r.live.Status().Update(r.ctx, s.updated)
	switch {
	case apierrors.IsNotFound(err):
	case apierrors.IsConflict(err):
		s.at, s.last = time.Time{}, nil
		r.again(writeRetry) // the cache will have it
	case err != nil:
		r.errs = append(r.errs, fmt.Errorf("status of %T %s: %w", s.updated, client.ObjectKeyFromObject(s.updated), err))
	default:
		s.base, s.last = s.current.GetResourceVersion(), s.updated
		s.written()
	}
}

func (r *trafficRound) again(wait time.Duration) {
	if r.wait == 0 || wait < r.wait {
		r.wait = wait
	}
}

func (r *trafficRound) breaker(b compile.Breaker) {
	name := client.ObjectKeyFromObject(b)
	r.opened[name] = b.Status.Opened
	cached := &v1alpha1.CircuitBreaker{}
	if !r.current(b.CircuitBreaker, cached) {
		return
	}
	p := r.pace(b.UID)
	current := newest(p, cached)
	b.CircuitBreaker = current
	record, fits := r.Book.Record(current)
	next := status.OfBreaker(b, r.in, record, fits)
	r.opened[name] = next.Opened
	before := current.Status
	// What is to be recorded is written even if it seems to be there: the cache may lag
	// behind what is.
	waits := fits && r.Book.Unrecorded(name)
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
		r.Book.Recorded(name, next.Shares)
		if waits {
			r.Changed.Recorded.Notify()
		}
		r.tellTurns(p, updated, before)
	}})
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
	name := client.ObjectKeyFromObject(f)
	r.harmed[name] = f.Status.PodsInForce
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
	r.harmed[name] = next.PodsInForce
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
	r.writes = append(r.writes, statusWrite{p, current, updated, gap, func() { r.tellFaults(p, updated, before) }})
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
	expire := reason(f.Status) == string(v1alpha1.ReasonExpired) && reason(before) != string(v1alpha1.ReasonExpired)
	switch {
	case !begin && !expire || !p.events.Allow():
	case begin:
		w.recorder.Eventf(f, nil, corev1.EventTypeWarning, "FaultsBegin", "Inject", "faults are injected in %d of %d pods", f.Status.PodsInForce, f.Status.Pods)
	default:
		w.recorder.Eventf(f, nil, corev1.EventTypeNormal, string(v1alpha1.ReasonExpired), "Inject", "%s", status.Note(meta.FindStatusCondition(f.Status.Conditions, v1alpha1.ConditionReady).Message))
	}
}
