package controllers

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
)

const (
	firstRetry = 200 * time.Millisecond
	lastRetry  = 30 * time.Second
	// longestRest bounds how long a controller rests.
	longestRest = 2 * time.Second

	// DebounceEvents is how long controllers wait for more events.
	DebounceEvents = 50 * time.Millisecond
	// DebounceStatus is how long controllers wait that write statuses.
	DebounceStatus = 200 * time.Millisecond
	// DebounceAcks is how long controllers wait that each step of a handover depends on.
	DebounceAcks = 10 * time.Millisecond
)

// Reconciler is a controller of a package below this one.
type Reconciler interface {
	// Spec returns what the controller does, and what it reads.
	Spec() Spec
}

// Spec is what a controller does, and when it runs.
type Spec struct {
	Name string
	// Reconcile runs when a source of On has changed, and again if it failed.
	Reconcile func(context.Context) error
	On        []Source
	// Debounce is the time between a change and the run, so that changes which come
	// together are handled together.
	Debounce time.Duration
	// Resync is the time after which Reconcile runs again without a change; 0 for never.
	Resync time.Duration
	// Next returns when time alone makes a change, the zero time for never. It may be nil.
	Next func() time.Time
	// Rests makes the controller wait twice as long as its last run took, at most
	// longestRest, so that it takes no more than a third of a processor, and those that wait for
	// the same locks have their turn.
	Rests bool
}

// Controller runs a Spec. It is a Runnable of the leader.
type Controller struct {
	Spec
	log     *slog.Logger
	queue   workqueue.TypedDelayingInterface[struct{}]
	retries workqueue.TypedRateLimiter[struct{}]

	mu       sync.Mutex
	running  bool
	due      bool          // a source has changed since the last run began
	interval time.Duration // between a change and the run
}

// New returns a controller that has subscribed to its sources.
func New(log *slog.Logger, s Spec) *Controller {
	c := &Controller{
		Spec: s, log: log, interval: s.Debounce,
		queue:   workqueue.NewTypedDelayingQueue[struct{}](),
		retries: workqueue.NewTypedItemExponentialFailureRateLimiter[struct{}](firstRetry, lastRetry),
	}
	for _, source := range s.On {
		source.Subscribe(c.Trigger)
	}
	return c
}

// Trigger asks for a run. It never blocks.
func (c *Controller) Trigger() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.due {
		return
	}
	c.due = true
	if !c.running { // else the end of the run schedules the next
		c.schedule(c.interval)
	}
}

// schedule makes the next run the earlier one of what is scheduled and after. The queue
// replaces what is scheduled if the delay is positive.
func (c *Controller) schedule(after time.Duration) {
	c.queue.AddAfter(struct{}{}, max(after, time.Nanosecond))
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (c *Controller) NeedLeaderElection() bool { return true }

// Start implements manager.Runnable.
func (c *Controller) Start(ctx context.Context) error {
	defer context.AfterFunc(ctx, c.queue.ShutDown)()
	c.queue.Add(struct{}{})
	for {
		item, shutdown := c.queue.Get()
		if shutdown || ctx.Err() != nil {
			return nil
		}
		c.run(ctx)
		c.queue.Done(item)
	}
}

// run reconciles once and schedules the next run.
func (c *Controller) run(ctx context.Context) {
	c.mu.Lock()
	c.running, c.due = true, false
	c.mu.Unlock()

	began := time.Now()
	err := c.Reconcile(ctx)
	took := time.Since(began)
	after, again := c.after(ctx, err)

	c.mu.Lock()
	defer c.mu.Unlock()
	c.running, c.interval = false, c.Debounce
	if c.Rests {
		rest := min(2*took, longestRest)
		c.interval, after = max(c.interval, rest), max(after, rest)
	}
	if c.due && (!again || c.interval < after) {
		after, again = c.interval, true
	}
	if again {
		c.schedule(after)
	}
}

// after returns when to run again if nothing changes.
func (c *Controller) after(ctx context.Context, err error) (after time.Duration, again bool) {
	if err != nil && ctx.Err() == nil {
		after, again = c.retries.When(struct{}{}), true
		c.log.Warn("a controller failed and will run again", "controller", c.Name, "after", after, "error", err)
	} else {
		c.retries.Forget(struct{}{})
		after, again = c.Resync, c.Resync > 0
	}
	if c.Next == nil {
		return after, again
	}
	if at := c.Next(); !at.IsZero() {
		if next := time.Until(at) + c.Debounce; !again || next < after {
			return next, true
		}
	}
	return after, again
}
