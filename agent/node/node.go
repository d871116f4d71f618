// Package node is the state of one node: its labelled pods, their captures and their
// policies.
//
// All state belongs to one goroutine (Node.Run). The pod watch, the manager's stream, the
// container runtime and the ticker only send it work, so nothing here needs a lock, and
// the events of a pod are handled in one order.
//
// Each job has a type. All share a core, and use each other in one direction:
// presence (which pods exist) uses capturer (which are captured), which uses effects (what
// follows from the state machine of package lifecycle).
package node

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/inbound"
	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/ticks"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

const (
	// checkInterval is how often captured pods are checked: a sandbox that was replaced has
	// another network namespace.
	checkInterval = time.Second
	// eagerFor is how long a pod whose sandbox is missing is looked for each
	// pods.PollInterval; later, each checkInterval.
	eagerFor = 30 * time.Second
)

// Config is what a Node works with.
type Config struct {
	Locator *pods.Locator
	Capture capture.Backend
	// Inbound captures the connections to webhooks. It is nil if NoInbound says why that is
	// impossible on this node.
	Inbound   *inbound.Node
	NoInbound error
	Proxy     *proxy.Server
	Store     *state.Store
	Journal   *journal.Journal
	Manager   Manager
	// RenewLeaf requests a serving certificate with the names of a new cluster.
	RenewLeaf func()
	Events    *telemetry.Recorder
	Metrics   *telemetry.Metrics
	// PodStart is when the pod of this agent started, as time since the node booted.
	PodStart time.Duration
	Logger   *slog.Logger
}

// Manager receives the reports of pods.
type Manager interface {
	Report(*meshv1.PodReport)
	Forget(uid string)
}

// core is what all jobs share. It belongs to the loop, except for do, and for shown.
type core struct {
	Config
	work    chan func()
	pods    map[string]*pod // by uid
	earlier *inflight.Earlier
	// webhooks are how reviews are routed, by the uids of pods.
	webhooks map[string]*meshv1.Webhook
	phase    phase
	shown    atomic.Int32 // phase, for other goroutines than the loop
}

// do runs f in the loop and waits for it.
func (c *core) do(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	select {
	case c.work <- func() { done <- f() }:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run is do for an f that cannot fail.
func (c *core) run(ctx context.Context, f func()) error {
	return c.do(ctx, func() error { f(); return nil })
}

// with calls f in the loop, if the pod is known.
func (c *core) with(ctx context.Context, uid string, f func(*pod)) {
	_ = c.run(ctx, func() {
		if p := c.pods[uid]; p != nil {
			f(p)
		}
	})
}

func (c *core) enter(p phase) {
	c.phase = p
	c.shown.Store(int32(p))
}

// uids returns the uids of the pods that f reports.
func (c *core) uids(f func(*pod) bool) map[string]bool {
	uids := map[string]bool{}
	for uid, p := range c.pods {
		if f(p) {
			uids[uid] = true
		}
	}
	return uids
}

// policies returns the policies of all pods, nil for a pod without one.
func (c *core) policies() map[string]*meshv1.PodPolicy {
	policies := map[string]*meshv1.PodPolicy{}
	for uid, p := range c.pods {
		policies[uid] = p.assignment.policy
	}
	return policies
}

// logError logs err with the pod, if p is not nil. It does nothing if err is nil.
func (c *core) logError(err error, failure string, p *pod, more ...any) {
	if err == nil {
		return
	}
	if p != nil {
		more = append(more, "pod", p.info.String())
	}
	c.Logger.Error(failure, append(more, "error", err)...)
}

// Node joins pods, capture, policies and proxy.
type Node struct {
	*core
	destinations *destinations
	effects      *effects
	capturer     *capturer
	presence     *presence
	departure    *departure
	losses       losses
	podsPing     chan struct{}
	turn         atomic.Pointer[turn]
}

// New returns a Node that serves nothing until TakeOver and Run.
func New(c Config) *Node {
	shared := &core{Config: c, work: make(chan func()), pods: map[string]*pod{}, earlier: inflight.New(c.Journal, c.Logger)}
	n := &Node{
		core: shared, destinations: &destinations{core: shared}, effects: &effects{core: shared},
		departure: &departure{core: shared, yielded: make(chan struct{}), drained: make(chan struct{})},
		podsPing:  make(chan struct{}, 1),
	}
	n.departure.effects = n.effects
	n.capturer = &capturer{core: shared, effects: n.effects, destinations: n.destinations}
	n.presence = &presence{core: shared, effects: n.effects, capturer: n.capturer, started: time.Now()}
	n.enter(serving)
	return n
}

// OpenJournal creates the journal of this agent in dir. If that fails, the agent serves
// nevertheless, because it knows its own writes. Only the next agent must wait for all pods.
func OpenJournal(dir string, events *telemetry.Recorder, logger *slog.Logger) *journal.Journal {
	j, err := journal.Create(dir)
	if err != nil {
		logger.Error("failed to create the journal: after this agent, handovers wait for all pods of the node", "error", err)
		events.Node("JournalUnavailable", fmt.Sprintf("after the next restart of the agent, handovers wait for all pods of this node: %v", err))
		return journal.InMemory(dir)
	}
	return j
}

// Watch starts to watch the labelled pods of this node until ctx ends.
func (n *Node) Watch(ctx context.Context, labelled cache.ListerWatcher) (err error) {
	n.presence.watcher, err = pods.Watch(ctx, labelled, n.podsChanged)
	return err
}

// Yielded is closed when another agent serves the pods, or this one has stopped.
func (n *Node) Yielded() <-chan struct{} { return n.departure.yielded }

// Drained is closed when, after Yielded, nothing of the pods is in flight any more.
func (n *Node) Drained() <-chan struct{} { return n.departure.drained }

// podsChanged wakes the loop after a change of the pod watch. It never blocks.
func (n *Node) podsChanged() {
	select {
	case n.podsPing <- struct{}{}:
	default:
	}
}

// Run is the loop. It returns when ctx ends.
func (n *Node) Run(ctx context.Context) {
	timer := time.NewTimer(ticks.Until(checkInterval))
	defer timer.Stop()
	n.noteTurn()
	for {
		var eager <-chan time.Time
		if n.capturer.awaitsSandbox() {
			eager = time.After(pods.PollInterval)
		}
		select {
		case <-ctx.Done():
			n.departure.stop()
			return
		case f := <-n.work:
			f()
		case <-n.podsPing:
			n.presence.sync()
			n.capturer.captureMissing()
		case <-eager:
			n.capturer.captureMissing()
		case <-timer.C:
			n.tick()
			timer.Reset(ticks.Until(checkInterval))
		}
		n.reportChanges()
		n.noteTurn()
	}
}

// tick does what no event triggers, and retries what has failed.
func (n *Node) tick() {
	n.logError(n.destinations.redirect(), "failed to redirect the apiserver's addresses: pods that start are not captured until a retry succeeds", nil)
	n.capturer.checkSandboxes()
	n.capturer.captureMissing()
	n.effects.retry()
	for _, p := range n.pods {
		n.effects.setWebhook(p)
	}
	n.earlier.Tidy()
	if len(n.uids((*pod).deleted)) > 0 {
		n.presence.sync()
	}
}
