// Package traffic writes the statuses of CircuitBreakers and FaultInjections.
package traffic

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

const (
	// writeGap is the minimum time between two writes of an object's status, and
	// countGap while only counts of requests change.
	writeGap = 2 * time.Second
	countGap = 10 * time.Second
	// writeRetry is the time after which a write is tried again.
	writeRetry = 200 * time.Millisecond
	// countRate and countBurst bound the writes that only change counts. calmWrites bounds the
	// writes of one round that are not urgent, so that urgent ones do not wait long.
	countRate, countBurst = 20, 20
	calmWrites            = 100
	// eventGap and eventBurst bound the Events of an object.
	eventGap   = 10 * time.Second
	eventBurst = 10
)

// Controller writes statuses and Events at a limited rate.
type Controller struct {
	// Client writes, and Cache reads.
	Client   client.Client
	Cache    client.Reader
	Recorder events.EventRecorder
	Push     *push.Server
	State    *controllers.State

	since time.Time // of the first run
	paces map[types.UID]*pace
	// counts bounds the writes of counts alone.
	counts *rate.Limiter
	// next is when the next delayed write is due; zero if there is none.
	next time.Time
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	changed := &r.State.Changed
	return controllers.Spec{
		Name: "traffic", Reconcile: r.Reconcile, Debounce: controllers.DebounceStatus, Resync: 10 * time.Second, Rests: true,
		Next: func() time.Time { return r.next },
		On:   []controllers.Source{&r.State.Compiled, &changed.Agents, &changed.Counts, &changed.Unrecorded},
	}
}

// Reconcile writes the statuses that have changed.
func (r *Controller) Reconcile(ctx context.Context) error {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	now := time.Now()
	if r.since.IsZero() {
		r.since, r.counts = now, rate.NewLimiter(countRate, countBurst)
	}
	run := &round{Controller: r, ctx: ctx, paces: map[types.UID]*pace{},
		opened: map[types.NamespacedName]int32{}, injected: map[types.NamespacedName]int32{},
		in: status.TrafficInput{
			Policy:  func(uid types.UID) *meshv1.PodPolicy { return c.Policies[uid].PodPolicy },
			Observe: r.Push.Observe,
			Now:     now,
			Since:   r.since,
		}}
	translated := run.policies(c)
	for _, b := range c.Breakers {
		if !translated[b.UID] {
			run.breaker(b)
		}
	}
	for _, f := range c.Injections {
		run.injection(f)
	}
	// Urgent writes come first, and those of counts last.
	slices.SortStableFunc(run.writes, func(a, b statusWrite) int { return cmp.Compare(a.gap, b.gap) })
	for _, s := range run.writes {
		run.write(s)
	}
	r.paces = run.paces
	metrics.BreakersOpen.Set(run.opened)
	metrics.FaultsInForce.Set(run.injected)
	r.next = time.Time{}
	if run.wait > 0 {
		r.next = time.Now().Add(run.wait)
	}
	return errors.Join(run.errs...)
}
