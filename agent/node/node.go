// Package node is the state of one node: its labelled pods, what is captured of them, and
// the policy of each.
//
// All state belongs to one goroutine (Node.Run). The pod watch, the manager's stream, the
// container runtime and the ticker only hand it work, so nothing here needs a lock, and
// the events of a pod are handled in one order.
package node

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
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
	Proxy   *proxy.Server
	Store   *state.Store
	Journal *journal.Journal
	Manager Manager
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

// Node joins pods, capture, policies and proxy.
type Node struct {
	Config
	watcher  *pods.Watcher
	work     chan func()
	podsPing chan struct{}
	started  time.Time

	losses losses
	turn   atomic.Pointer[turn]

	// The rest belongs to the goroutine of Run, except where departure says otherwise.
	departure
	destinations
	pods    map[string]*pod // by uid
	earlier *inflight.Earlier
}

// New returns a Node that serves nothing until TakeOver and Run.
func New(c Config) *Node {
	n := &Node{
		Config: c, work: make(chan func()), podsPing: make(chan struct{}, 1), started: time.Now(),
		departure: departure{yielded: make(chan struct{}), drained: make(chan struct{})},
		pods:      map[string]*pod{}, earlier: inflight.New(c.Journal, c.Logger),
	}
	n.enter(serving)
	return n
}

// OpenJournal creates the journal of this agent in dir. Without room for a file, the agent
// serves all the same: it knows its own writes, and only the next agent waits for all pods.
func OpenJournal(dir string, events *telemetry.Recorder, logger *slog.Logger) *journal.Journal {
	j, err := journal.Create(dir)
	if err != nil {
		logger.Error("failed to create the journal: after this agent, handovers wait for all pods of the node", "error", err)
		events.Node("JournalUnavailable", fmt.Sprintf("after the next restart of the agent, handovers wait for all pods of this node: %v", err))
		return journal.InMemory(dir)
	}
	return j
}

// Watch starts to watch the pods of the named node until ctx ends.
func (n *Node) Watch(ctx context.Context, client kubernetes.Interface, name string) (err error) {
	n.watcher, err = pods.Watch(ctx, client, name, n.podsChanged)
	return err
}

// Yielded is closed when another agent serves the pods, or this one has stopped.
func (n *Node) Yielded() <-chan struct{} { return n.yielded }

// Drained is closed when, after Yielded, nothing of the pods is in flight any more.
func (n *Node) Drained() <-chan struct{} { return n.drained }

// podsChanged wakes the loop after a change of the pod watch. It never blocks.
func (n *Node) podsChanged() {
	select {
	case n.podsPing <- struct{}{}:
	default:
	}
}

// do runs f in the loop and waits for it.
func (n *Node) do(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	select {
	case n.work <- func() { done <- f() }:
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

// policies returns the policies of all pods, nil for a pod without one.
func (n *Node) policies() map[string]*meshv1.PodPolicy {
	policies := map[string]*meshv1.PodPolicy{}
	for uid, p := range n.pods {
		policies[uid] = p.policy
	}
	return policies
}

// Run is the loop. It returns when ctx ends.
func (n *Node) Run(ctx context.Context) {
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	n.noteTurn()
	for {
		var eager <-chan time.Time
		if n.awaitsSandbox() {
			eager = time.After(pods.PollInterval)
		}
		select {
		case <-ctx.Done():
			n.stop()
			return
		case f := <-n.work:
			f()
		case <-n.podsPing:
			n.syncPods()
			n.captureMissing()
		case <-eager:
			n.captureMissing()
		case <-ticker.C:
			n.tick()
		}
		n.reportChanges()
		n.noteTurn()
	}
}

// tick repeats what nobody announces, and retries what has failed.
func (n *Node) tick() {
	if err := n.redirect(); err != nil {
		n.Logger.Error("the apiserver's addresses are not redirected, and pods that start are not captured: trying again", "error", err)
	}
	n.checkSandboxes()
	n.captureMissing()
	n.saveMissing()
	n.retryEgress()
	n.earlier.Tidy()
	if n.awaitsExit() {
		n.syncPods()
	}
}
