package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/readiness"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// askAgain is the time after which a refused eviction is requested again.
const askAgain = 10 * time.Second

// evictions is what is known of the evictions of members that must be replaced, one after the
// other.
type evictions struct {
	evicted string    // uid of the pod that was evicted last
	name    string    // of the same pod
	at      time.Time // when its eviction was requested
	retry   time.Time // when a refused eviction may be requested again
	why     string    // what is in progress, or blocks it

	owed   int             // number of pods that were evicted since known was set
	known  map[string]bool // the workload's pods at that time, by uid
	scaled time.Time       // when the size of the workload was read
}

// Eviction is an eviction to request.
type Eviction struct {
	Pod *corev1.Pod
	// Why is the reason why the pod must be replaced.
	Why string
	// after is what is known once the pod is evicted.
	after evictions
}

// Evicted returns what a leader remembers after an eviction.
func (m Memory) Evicted(e *Eviction) Memory {
	m.evictions = e.after
	return m
}

// EvictionRefused returns what a leader remembers after an eviction was refused for now.
func (m Memory) EvictionRefused(e *Eviction, why error, now time.Time) Memory {
	m.evictions.retry = now.Add(askAgain)
	m.evictions.why = fmt.Sprintf("pod %s must be restarted, and may not be evicted now: %v", e.Pod.Name, why)
	return m
}

// NeedsScale reports whether the number of pods that the workloads should have must be read. It
// needs the configuration and the pods of f.
func NeedsScale(m Memory, f Facts, now time.Time) bool {
	e := m.evictions
	if f.Spec.Problem != nil && !compile.Withdrawn(f.Spec.Config) {
		return false
	}
	return e.lacking(f.Pods.Workload) > 0 && now.Sub(e.at) >= askAgain && now.Sub(e.scaled) >= askAgain
}

// restart returns the next pod that must be replaced, if it may be evicted now.
func (d *deciding) restart() *Eviction {
	v, e := d.v, &d.memory.evictions
	if v.Spec.Problem != nil && !compile.Withdrawn(v.Spec.Config) {
		return nil
	}
	if v.Scale != nil {
		e.scaled = v.now
		if v.Scale.Err != nil {
			return nil
		}
		e.forgive(v)
	}
	uid, why := d.mayRestart()
	pod := v.Pods.ByUID[uid]
	if uid == "" {
		e.awaitSuccessor(v)
		return nil
	}
	if v.now.Before(e.retry) || uid == e.evicted && v.now.Sub(e.at) < askAgain {
		return nil
	}
	after := *e
	if e.lacking(v.Pods.Workload) == 0 {
		after.owed, after.known = 0, map[string]bool{}
		for _, p := range v.Pods.Workload {
			after.known[string(p.UID)] = true
		}
	}
	after.owed++
	after.evicted, after.name, after.at = uid, pod.Name, v.now
	after.why = fmt.Sprintf("pod %s is being restarted", pod.Name)
	return &Eviction{pod, why, after}
}

// awaitSuccessor sets why while no pod may be evicted.
func (e *evictions) awaitSuccessor(v *view) {
	if v.now.After(e.retry) {
		e.why = ""
	}
	if e.lacking(v.Pods.Workload) > 0 {
		e.why = fmt.Sprintf("pod %s was evicted, and its successor does not exist yet", e.name)
	}
}

// mayRestart returns the pod that may be evicted now, and why it must be replaced.
func (d *deciding) mayRestart() (uid, why string) {
	v, e, state := d.v, d.memory.evictions, d.next
	if compile.Withdrawn(v.Spec.Config) && (state.Holds() || v.unreleased()) {
		return "", "" // its successor could not lead yet
	}
	if p := e.misfit(v, state.Members); p != nil {
		return string(p.UID), "its clients trust the wrong CAs: pods in a shard must trust the mesh CA alone, pods without shards the cluster's CA too"
	}
	uid = state.Restarts(e.wanted(v, state.Members), d.rollout.replaces,
		func(uid string) handover.Health { return v.health(state.Members[uid]) },
		func(uid string) bool { return v.observe(state.Members[uid].Node, uid).LockHolder })
	switch surplus := d.rollout.surplus; {
	case uid == "" && surplus != nil && e.lacking(v.Pods.Workload) == 0:
		return string(surplus.UID), d.rollout.why()
	case state.Members[uid].Stale:
		return uid, "it is in another shard now, or has objects of other shards in its caches"
	}
	return uid, d.rollout.why()
}

// misfit returns the next misfit to evict: one after the other, and while all other pods are
// ready.
func (e evictions) misfit(v *view, members map[string]handover.Member) *corev1.Pod {
	candidates := v.misfits(members)
	if len(candidates) == 0 || e.lacking(v.Pods.Workload) > 0 {
		return nil
	}
	unready := collect.Filter(v.Pods.Workload, func(p *corev1.Pod) bool { return !readiness.Of(p) })
	switch {
	case len(unready) == 0:
		return slices.MinFunc(candidates, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	case len(unready) == 1 && slices.Contains(candidates, unready[0]):
		return unready[0]
	}
	return nil
}

// wanted returns how many members must be ready before another one is evicted: all that
// exist, and the pods and successors that will join, as far as shards have room.
func (e evictions) wanted(v *view, assigned map[string]handover.Member) int {
	shards := layout.Shards(v.Spec.Config.Spec.Root)
	room, open := 0, len(shards) == 0
	for _, s := range shards {
		room += s.Replicas
		open = open || s.Replicas == 0
	}
	members, coming := 0, e.lacking(v.Pods.Workload)
	for _, m := range assigned {
		if !v.exists(m) {
			continue
		}
		members++
		if slices.ContainsFunc(shards, func(s layout.Shard) bool { return s.Name == m.Shard }) {
			room--
		}
	}
	for _, p := range v.Pods.Workload {
		if _, ok := assigned[string(p.UID)]; !ok && p.DeletionTimestamp == nil && !v.unsharded(p) {
			coming++
		}
	}
	if !open {
		coming = min(coming, max(room, 0))
	}
	return members + coming
}

// lacking returns how many evicted pods have no successor yet.
func (e evictions) lacking(pods []*corev1.Pod) int {
	n := e.owed
	for _, p := range pods {
		if !e.known[string(p.UID)] {
			n--
		}
	}
	return max(n, 0)
}

// forgive stops waiting for successors that will not be created, because the workload has been
// scaled down since.
func (e *evictions) forgive(v *view) {
	lacking, replicas := e.lacking(v.Pods.Workload), v.Scale.Replicas
	for _, p := range v.Pods.Workload {
		if p.DeletionTimestamp == nil {
			replicas--
		}
	}
	e.owed -= lacking - min(lacking, max(replicas, 0))
}
