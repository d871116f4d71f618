package agent

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"sync/atomic"
	"time"

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

// mesh joins pods, capture, policy and proxy.
type mesh struct {
	logger   *slog.Logger
	watcher  *pods.Watcher
	locator  *pods.Locator
	capture  capture.Backend
	proxy    *proxy.Server
	store    *state.Store
	journal  *journal.Journal
	report   func(*meshv1.PodReport)
	forget   func(uid string)
	renew    func() // asks for a serving certificate with other names
	events   *telemetry.Recorder
	metrics  *telemetry.Metrics
	work     chan func()
	podsPing chan struct{}
	started  time.Time
	podStart time.Duration // when its pod started, since the node booted

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

// podsChanged wakes the loop after a change of the pod watch. It never blocks.
func (m *mesh) podsChanged() {
	select {
	case m.podsPing <- struct{}{}:
	default:
	}
}

// do runs f in the loop and waits for it.
func (m *mesh) do(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	select {
	case m.work <- func() { done <- f() }:
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
func (m *mesh) restore(handed []takeover.Pod, drained <-chan struct{}) {
	cluster, policies, err := m.store.Load()
	if err != nil {
		m.logger.Error("some saved policies cannot be used; those pods wait for the manager", "error", err)
	}
	known, err := m.store.LoadPods()
	if err != nil {
		m.logger.Error("some saved pods cannot be used; those wait for the API", "error", err)
	}
	if cluster != nil {
		if err := m.setCluster(cluster); err != nil {
			m.logger.Error("the saved apiserver addresses cannot be used", "error", err)
		}
	}
	add := func(uid, namespace, name string) *member {
		mb := m.members[uid]
		if mb == nil {
			mb = &member{pod: pods.Pod{UID: uid, Namespace: namespace, Name: name}, since: time.Now(), restored: true}
			m.members[uid] = mb
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
	m.addEarlier(handed, drained)
	// Of a pod without a process just now, the listeners stay open until there is
	// one: connections wait, rather than be refused.
	m.captureMissing()
	m.logger.Info("restored", "pods", len(m.members), "handed_over", len(handed), "cluster", cluster != nil)
}

func (m *mesh) run(ctx context.Context) {
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	m.noteTurn()
	for {
		var eager <-chan time.Time
		if m.waiting() {
			eager = time.After(pods.PollInterval)
		}
		select {
		case <-ctx.Done():
			m.stop()
			return
		case f := <-m.work:
			f()
		case <-m.podsPing:
			m.syncPods()
			m.captureMissing()
		case <-eager:
			m.captureMissing()
		case <-ticker.C:
			if err := m.redirect(); err != nil {
				m.logger.Error("the apiserver's addresses are not redirected, and pods that start are not captured: trying again", "error", err)
			}
			m.lookAtCaptured()
			m.captureMissing()
			m.keepUnsaved()
			m.retryEgress()
			m.earlier.tidy()
			maps.DeleteFunc(m.ended, func(uid, _ string) bool { return m.earlier[uid] == nil })
			if m.lateEnds() {
				m.syncPods()
			}
		}
		m.reportChanges()
		m.noteTurn()
	}
}
