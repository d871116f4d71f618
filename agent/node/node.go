package node

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

const (
	// lookInterval is how often captured pods are looked at again: a sandbox
	// that was made anew has another network namespace.
	lookInterval = time.Second
	// eagerFor is how long a pod whose sandbox is not there yet is looked for at
	// pods.PollInterval; then at lookInterval.
	eagerFor = 30 * time.Second
	// shutdownGrace is how long requests under way may take when a pod goes.
	shutdownGrace = time.Second
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

	health  health
	yielded chan struct{} // closed when no pod is captured anew any more
	drained chan struct{} // closed when nothing of the pods is under way any more
	now     atomic.Int32  // phase, for others than run
	turn    atomic.Pointer[turn]

	// The rest belongs to run.
	phase        phase
	cluster      *meshv1.Cluster
	destinations []netip.AddrPort // of cluster
	agents       []netip.AddrPort // of cluster
	redirected   bool             // capture knows destinations
	members      map[string]*member
	earlier      earlier
	ended        map[string]string // namespaces of pods that are gone but for their writes in earlier, by uid
	// The takeover sockets of the agent before this one, and of this one.
	lastSocket, socket takeover.ID
	// Until then a pod that no agent before this one knew may have writes in flight.
	strangers time.Time
	left      map[string]*proxy.Pod // to the next agent
	draining  int                   // pods whose requests are being waited for
	unsettled int                   // pods whose writes are
}

// New returns a Node that serves nothing until TakeOver and Run.
func New(c Config) *Node {
	n := &Node{
		Config: c, work: make(chan func()), podsPing: make(chan struct{}, 1), started: time.Now(),
		yielded: make(chan struct{}), drained: make(chan struct{}),
		members: map[string]*member{}, earlier: earlier{}, ended: map[string]string{},
	}
	n.enter(serving)
	return n
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

// restore takes up where the last agent of this node stopped, or what the one
// that still runs hands over, before the API or the manager have said anything. The
// one before sends nothing any more when drained is closed; nil: it died.
func (n *Node) restore(handed []takeover.Pod, drained <-chan struct{}) {
	cluster, policies, err := n.Store.Load()
	if err != nil {
		n.Logger.Error("some saved policies cannot be used; those pods wait for the manager", "error", err)
	}
	known, err := n.Store.LoadPods()
	if err != nil {
		n.Logger.Error("some saved pods cannot be used; those wait for the API", "error", err)
	}
	if cluster != nil {
		if err := n.setCluster(cluster); err != nil {
			n.Logger.Error("the saved apiserver addresses cannot be used", "error", err)
		}
	}
	add := func(uid, namespace, name string) *member {
		mb := n.members[uid]
		if mb == nil {
			mb = &member{pod: pods.Pod{UID: uid, Namespace: namespace, Name: name}, since: time.Now(), restored: true}
			n.members[uid] = mb
		}
		return mb
	}
	for uid, pod := range known {
		add(uid, "", "").pod = pod
	}
	for _, p := range policies {
		mb := add(p.GetUid(), p.GetNamespace(), p.GetName())
		mb.policy, mb.saved, mb.floor = p.PodPolicy, p, p.GetSerial()
		mb.serial = p.GetSerial()
		if p.GetRefuse() != "" && mb.serial > 0 {
			mb.serial-- // the saved serial of a refusal is the floor
		}
		if mb.traffic = p.InForce; mb.traffic == nil {
			mb.traffic = p.GetTraffic()
		}
	}
	for _, p := range handed {
		mb := add(p.UID, p.Namespace, p.Name)
		mb.handed, mb.confirmed, mb.counted = p.Handed, p.Version, p.Traffic
	}
	n.addEarlier(handed, drained)
	// Of a pod without a process just now, the listeners stay open until there is
	// one: connections wait, rather than be refused.
	n.captureMissing()
	n.Logger.Info("restored", "pods", len(n.members), "handed_over", len(handed), "cluster", cluster != nil)
}

// Run is the loop, until ctx ends.
func (n *Node) Run(ctx context.Context) {
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	n.noteTurn()
	for {
		var eager <-chan time.Time
		if n.waiting() {
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
			if err := n.redirect(); err != nil {
				n.Logger.Error("the apiserver's addresses are not redirected, and pods that start are not captured: trying again", "error", err)
			}
			n.lookAtCaptured()
			n.captureMissing()
			n.keepUnsaved()
			n.retryEgress()
			n.earlier.tidy()
			maps.DeleteFunc(n.ended, func(uid, _ string) bool { return n.earlier[uid] == nil })
			if n.lateEnds() {
				n.syncPods()
			}
		}
		n.reportChanges()
		n.noteTurn()
	}
}
