package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/policy"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
	"google.golang.org/protobuf/proto"
)

const (
	// checkInterval is how often captured pods are looked at again: a sandbox
	// that was made anew has another network namespace.
	checkInterval = time.Second
	// eagerFor is how long a pod whose sandbox is not there yet is looked for at
	// pods.PollInterval; then at checkInterval.
	eagerFor = 30 * time.Second
	// shutdownGrace is how long requests under way may take when a pod goes.
	shutdownGrace = time.Second
)

// mesh joins pods, capture, policy and proxy.
type mesh struct {
	logger   *slog.Logger
	watcher  *pods.Watcher
	locator  *pods.Locator
	capture  capture.Method
	proxy    *proxy.Server
	store    *policy.Store
	report   func(*meshv1.PodReport)
	forget   func(uid string)
	renew    func() // asks for a serving certificate with other names
	metrics  *metrics
	work     chan func()
	podsPing chan struct{}
	started  time.Time

	// The rest belongs to run.
	cluster      *meshv1.Cluster
	destinations []netip.AddrPort // of cluster
	redirected   bool             // capture knows destinations
	members      map[string]*member
}

// member is a labelled pod of this node.
type member struct {
	pod      pods.Pod
	since    time.Time
	restored bool // from disk, not yet seen in the API
	policy   *meshv1.PodPolicy

	// What the caches of the pod's clients were filled under: saved, unless this
	// agent was there from the pod's start, when there are none.
	fresh bool
	saved policy.Saved

	inode    uint64 // of the captured network namespace
	captured *capture.Pod
	proxied  *proxy.Pod
	problem  string // why it is not captured

	reported *meshv1.PodReport
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

// restore takes up where the last agent of this node stopped, before the API or
// the manager have said anything.
func (m *mesh) restore() {
	cluster, policies, err := m.store.Load()
	if err != nil {
		m.logger.Error("some saved policies cannot be used; those pods wait for the manager", "error", err)
	}
	if cluster != nil {
		if err := m.setCluster(cluster); err != nil {
			m.logger.Error("the saved apiserver addresses cannot be used", "error", err)
		}
	}
	for _, p := range policies {
		m.members[p.GetUid()] = &member{
			pod:   pods.Pod{UID: p.GetUid(), Namespace: p.GetNamespace(), Name: p.GetName()},
			since: time.Now(), restored: true, policy: p.PodPolicy, saved: p,
		}
	}
	m.captureMissing()
	m.logger.Info("restored", "pods", len(policies), "cluster", cluster != nil)
}

func (m *mesh) run(ctx context.Context) {
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
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
				m.logger.Error("trying again in a moment", "error", err)
			}
			m.checkCaptured()
			m.captureMissing()
		}
		m.reportChanges()
	}
}

// stop leaves the redirections in place: until the next agent listens, members
// are refused, and nothing goes around the mesh.
func (m *mesh) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	for _, mb := range m.members {
		if mb.proxied != nil {
			_ = mb.proxied.Shutdown(ctx)
		}
	}
	if err := m.capture.Close(); err != nil {
		m.logger.Error("closing the capture", "error", err)
	}
}

// syncPods brings members in step with the pod watch.
func (m *mesh) syncPods() {
	if !m.watcher.Synced() {
		return
	}
	seen := m.watcher.List()
	for uid, pod := range seen {
		if pod.Ended {
			continue
		}
		mb := m.members[uid]
		if mb == nil {
			mb = &member{since: time.Now()}
			m.members[uid] = mb
		}
		mb.pod, mb.restored = pod, false
		mb.fresh = mb.fresh || pod.Created.After(m.started)
	}
	for uid, mb := range m.members {
		if pod, ok := seen[uid]; ok && !pod.Ended || mb.pod.UID == "" {
			continue // without a uid: a policy that came before the pod was seen
		}
		m.drop(uid, mb)
	}
	if err := m.capture.Sweep(func(uid string) bool { return m.members[uid] != nil }); err != nil {
		m.logger.Error("clearing redirections of pods that are gone", "error", err)
	}
}

func (m *mesh) drop(uid string, mb *member) {
	m.release(mb)
	delete(m.members, uid)
	m.forget(uid)
	m.metrics.forget(mb.pod.Namespace, mb.pod.Name)
	if err := m.store.DeletePolicy(uid); err != nil {
		m.logger.Error("forgetting a pod that is gone", "pod", mb.pod.String(), "error", err)
	}
	m.logger.Info("pod gone", "pod", mb.pod.String())
}

func (m *mesh) release(mb *member) {
	if mb.captured == nil {
		return
	}
	if err := mb.captured.Release(); err != nil {
		m.logger.Error("releasing a pod", "pod", mb.pod.String(), "error", err)
	}
	p := mb.proxied
	go func() { // its requests may take a moment to end; no other pod waits for them
		ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
		defer cancel()
		_ = p.Shutdown(ctx)
	}()
	mb.captured, mb.proxied, mb.inode = nil, nil, 0
}

// capturable says why a pod cannot be captured; "" when it can.
func (mb *member) capturable() string {
	switch {
	case mb.pod.HostNetwork:
		return pods.ErrHostNetwork.Error()
	case mb.pod.Trust == "" && !mb.restored:
		return "the pod was made before the mesh was there to admit it: delete it, so that its controller makes it anew"
	}
	return ""
}

// waiting says whether a pod's sandbox is expected any moment.
func (m *mesh) waiting() bool {
	if !m.redirected {
		return false
	}
	for _, mb := range m.members {
		if mb.captured == nil && mb.pod.UID != "" && mb.capturable() == "" && time.Since(mb.since) < eagerFor {
			return true
		}
	}
	return false
}

// captureMissing captures the pods that can be and are not.
func (m *mesh) captureMissing() {
	if !m.redirected {
		return // it is not known what to redirect yet
	}
	missing := map[string]bool{}
	for uid, mb := range m.members {
		if mb.captured != nil || mb.pod.UID == "" {
			continue
		}
		if why := mb.capturable(); why != "" {
			mb.problem = why
			continue
		}
		missing[uid] = true // an earlier problem stays known until it is captured
	}
	processes, err := m.locator.Processes(missing)
	if err != nil {
		m.logger.Error("looking for pods on this node", "error", err)
		return
	}
	for uid, pids := range processes {
		if err := m.capturePod(m.members[uid], pids); err != nil {
			mb := m.members[uid]
			if mb.problem != err.Error() {
				m.logger.Error("capturing a pod", "pod", mb.pod.String(), "error", err)
			}
			mb.problem = err.Error()
		}
	}
}

func (m *mesh) capturePod(mb *member, pids []int) error {
	ns, err := m.locator.Open(mb.pod.UID, pids)
	if err != nil || ns == nil {
		return err
	}
	defer ns.Close()
	start := time.Now()
	captured, err := m.capture.Capture(capture.Request{UID: mb.pod.UID, NetNS: ns.Path()})
	if err != nil {
		return err
	}
	mb.inode, mb.captured, mb.problem = ns.Inode, captured, ""
	mb.proxied = m.proxy.Pod(proxy.PodInfo{UID: mb.pod.UID, Namespace: mb.pod.Namespace, Name: mb.pod.Name}, captured.DialContext)
	if mb.policy != nil {
		if err := m.applyPolicy(mb); err != nil {
			m.logger.Error("applying a policy", "pod", mb.pod.String(), "error", err)
		}
	}
	for _, l := range captured.Listeners() {
		go m.serve(mb.proxied, l, mb.pod)
	}
	m.metrics.captureSeconds.Observe(time.Since(start).Seconds())
	m.logger.Info("captured", "pod", mb.pod.String(), "uid", mb.pod.UID, "mode", string(captured.Mode()))
	return nil
}

func (m *mesh) serve(p *proxy.Pod, l net.Listener, pod pods.Pod) {
	if err := p.Serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
		m.logger.Error("serving a pod", "pod", pod.String(), "error", err)
	}
}

// checkCaptured captures anew the pods that got another network namespace: their
// sandbox was replaced. A pod that shows no process is left as it is, for it may
// be between two of them; what is gone for good, the pod watch tells.
func (m *mesh) checkCaptured() {
	captured := map[string]bool{}
	for uid, mb := range m.members {
		if mb.captured != nil {
			captured[uid] = true
		}
	}
	processes, err := m.locator.Processes(captured)
	if err != nil {
		m.logger.Error("looking for captured pods on this node", "error", err)
		return
	}
	for uid := range captured {
		mb := m.members[uid]
		ns, err := m.locator.Open(uid, processes[uid])
		if err != nil {
			m.logger.Error("looking at a captured pod", "pod", mb.pod.String(), "error", err)
			continue
		}
		if ns == nil {
			continue
		}
		ns.Close()
		if ns.Inode != mb.inode {
			m.logger.Info("the pod has a new sandbox", "pod", mb.pod.String())
			m.release(mb)
			mb.since, mb.fresh = time.Now(), true
		}
	}
}

func (m *mesh) setCluster(c *meshv1.Cluster) error {
	destinations, err := parseAddresses(c)
	if err != nil {
		return err
	}
	if err := m.proxy.SetCluster(c); err != nil {
		return err
	}
	if m.cluster != nil && !sameLeaf(m.cluster, c) {
		m.renew()
	}
	m.cluster, m.destinations, m.redirected = c, destinations, false
	if err := m.store.SaveCluster(c); err != nil {
		m.logger.Error("keeping the apiserver's addresses for the next start", "error", err)
	}
	return m.redirect()
}

// redirect tells the capture what to redirect, if it does not know yet.
func (m *mesh) redirect() error {
	if m.redirected || m.cluster == nil {
		return nil
	}
	if err := m.capture.SetDestinations(m.destinations, nil); err != nil {
		return fmt.Errorf("redirecting to the apiserver's addresses: %w", err)
	}
	m.redirected = true
	return nil
}

func parseAddresses(c *meshv1.Cluster) ([]netip.AddrPort, error) {
	var parsed []netip.AddrPort
	for _, list := range [][]string{c.GetServiceAddresses(), c.GetEndpointAddresses()} {
		for _, s := range list {
			a, err := netip.ParseAddrPort(s)
			if err != nil {
				return nil, fmt.Errorf("apiserver address: %w", err)
			}
			parsed = append(parsed, a)
		}
	}
	if len(parsed) == 0 {
		return nil, errors.New("the manager named no apiserver address")
	}
	return parsed, nil
}

// sameLeaf says whether a serving certificate that was signed under a is right
// under b.
func sameLeaf(a, b *meshv1.Cluster) bool {
	return a.GetMeshCa() == b.GetMeshCa() &&
		slices.Equal(a.GetServiceAddresses(), b.GetServiceAddresses()) &&
		slices.Equal(a.GetEndpointAddresses(), b.GetEndpointAddresses())
}

// applyPolicy puts a member's policy in force and keeps it for the next agent.
func (m *mesh) applyPolicy(mb *member) error {
	if mb.proxied == nil {
		return nil // applied when the pod is captured
	}
	since := time.Now()
	if mb.proxied.Version() == "" {
		// What the pod's clients hold need not be listed again if it was filled
		// under this policy.
		filled := mb.saved
		if mb.fresh {
			since = policy.Always
			filled = policy.Saved{PodPolicy: mb.policy, Since: since}
		}
		if filled.PodPolicy != nil {
			if err := mb.proxied.Restore(filled.PodPolicy, filled.Since); err != nil {
				return err
			}
		}
	}
	if err := mb.proxied.SetPolicy(mb.policy); err != nil {
		return err
	}
	if err := m.store.SavePolicy(policy.Saved{PodPolicy: mb.policy, Since: since}); err != nil {
		m.logger.Error("keeping a policy for the next start", "error", err)
	}
	return nil
}

// reportChanges tells the manager, and the metrics, what is new.
func (m *mesh) reportChanges() {
	counts := map[string]int{}
	for uid, mb := range m.members {
		if mb.pod.UID == "" {
			continue
		}
		r := &meshv1.PodReport{Uid: uid, Message: mb.problem}
		if mb.captured != nil {
			r.Capture = string(mb.captured.Mode())
			r.Version = mb.proxied.Version()
			r.LockHolder = mb.proxied.LockHolder()
		}
		counts[r.GetCapture()]++
		if !proto.Equal(r, mb.reported) {
			mb.reported = r
			m.report(r)
			if s := mb.policy.GetSharding(); s.GetLock() != nil {
				m.metrics.setLockHolder(mb.pod.Namespace, mb.pod.Name, s.GetShard(), r.GetLockHolder())
			}
		}
	}
	m.metrics.setPods(counts)
}

// handler brings the manager's word into the loop.
type handler struct {
	ctx context.Context
	*mesh
}

func (h handler) SetCluster(c *meshv1.Cluster) error {
	return h.do(h.ctx, func() error {
		if err := h.setCluster(c); err != nil {
			return err
		}
		h.captureMissing()
		return nil
	})
}

func (h handler) SetPolicy(p *meshv1.PodPolicy) error {
	return h.do(h.ctx, func() error {
		mb := h.members[p.GetUid()]
		if mb == nil {
			// The manager may hear of a pod before this agent does.
			mb = &member{since: time.Now()}
			h.members[p.GetUid()] = mb
		}
		before := mb.policy
		mb.policy = p
		if err := h.applyPolicy(mb); err != nil {
			mb.policy = before
			return err
		}
		return nil
	})
}

func (h handler) RemovePolicy(uid string) error {
	return h.do(h.ctx, func() error { h.removePolicy(uid); return nil })
}

func (h handler) Synced(uids map[string]bool) {
	_ = h.do(h.ctx, func() error {
		for uid, mb := range h.members {
			if !uids[uid] && mb.policy != nil {
				h.removePolicy(uid)
			}
		}
		h.metrics.managerSynced.Set(1)
		return nil
	})
}

func (h handler) Versions() map[string]string {
	versions := map[string]string{}
	_ = h.do(h.ctx, func() error {
		for uid, mb := range h.members {
			if mb.policy != nil {
				versions[uid] = mb.policy.GetVersion()
			}
		}
		return nil
	})
	return versions
}

// removePolicy leaves a pod that is still here without a policy: it is refused,
// not let through.
func (m *mesh) removePolicy(uid string) {
	mb := m.members[uid]
	if mb == nil {
		return
	}
	if mb.pod.UID == "" {
		delete(m.members, uid) // never seen on this node
		return
	}
	mb.policy = nil
	if mb.proxied != nil {
		_ = mb.proxied.SetPolicy(&meshv1.PodPolicy{
			Uid: uid, Namespace: mb.pod.Namespace, Name: mb.pod.Name,
			Refuse: "the mesh has no policy for this pod any more",
		})
	}
	if err := m.store.DeletePolicy(uid); err != nil {
		m.logger.Error("forgetting a policy", "error", err)
	}
}
