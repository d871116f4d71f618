package roots

import (
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// plan is what shards are to hold. Who leads next goes on from what the state says
// was wanted last.
type plan struct {
	generation int64 // of the spec that it follows from
	scopes     map[string]sharding.Scope
	balancing
	// outdated are the pods that could be restarted for others to take their
	// place, and since when.
	outdated map[string]time.Time
}

// outdatedFor is how long a pod must be out of place to be restarted: in a rollout
// shards lack pods for a moment.
const outdatedFor = 30 * time.Second

// lasting are those that have been out of place for long enough.
func (p *plan) lasting(outdated []string, now time.Time) (out []string) {
	since := map[string]time.Time{}
	for _, uid := range outdated {
		since[uid] = now
		if at, ok := p.outdated[uid]; ok {
			since[uid] = at
		}
		if now.Sub(since[uid]) >= outdatedFor {
			out = append(out, uid)
		}
	}
	p.outdated = since
	return out
}

// step is what becomes of the state by all that happened.
func (rt *root) step(v view, now time.Time) (handover.State, []handover.Effect) {
	s := &stepping{root: rt, v: v, now: now, next: rt.state}
	s.learn()
	if s.assignKeys() {
		s.assignPods()
	}
	return s.next, s.effects
}

// stepping is one call of step. Its stages run in the order in which they are written.
type stepping struct {
	*root
	v       view
	now     time.Time
	next    handover.State // in the making
	effects []handover.Effect
}

func (s *stepping) do(e handover.Event) {
	next, effects := handover.Step(s.next, e)
	s.next, s.effects = next, append(s.effects, effects...)
}

// learn takes in what agents said since the last step.
func (s *stepping) learn() {
	s.ended.observe(s.next.Members, s.v, s.now)
	s.forget(s.next.Members, s.v)
	s.leftovers.observe(s.root, s.v, s.next, s.now)
	s.v.removed = s.removed(s.v, s.now)
	s.next.Evidence.LocksHeld, s.next.Evidence.OthersIdle = s.locksHeld(s.v), len(s.others(s.v, s.next)) == 0
	for _, e := range s.ahead(s.v, s.now) {
		s.do(e)
	}
	for _, uid := range slices.Sorted(maps.Keys(s.next.Members)) {
		if e := s.heard(s.next, s.next.Members[uid], s.v, s.now); e != nil {
			s.do(e)
		}
	}
	s.dropped = nil
	for uid := range s.forgotten {
		if _, member := s.next.Members[uid]; !member { // it may join again, once that is written
			s.dropped = append(s.dropped, uid)
		}
	}
}

// assignKeys makes the plan of keys, and follows it. It reports whether pods may be assigned:
// not while a pod outside the mesh may act, or the configuration is invalid.
func (s *stepping) assignKeys() bool {
	s.unsure, s.closed, s.ripe, s.unplanned = nil, nil, false, false
	first := !s.next.Holds() && !grantsNothing(s.v.config)
	if first {
		if s.unsure = s.unrefused(s.v); len(s.unsure) > 0 {
			return false
		}
	}
	if !s.heardAll(s.v, s.next, s.now) || !s.replan(s.v, s.next, s.now) {
		s.unplanned = true
	} else {
		if first && s.v.problem == nil && !s.mayGrant(s.v) {
			return false
		}
		s.do(handover.Want{
			Scopes:  s.scopes,
			Ready:   s.ready(s.v, s.next, s.now),
			Restart: s.v.config.Spec.Root.OnChange != v1alpha1.OnChangeRelist && !s.v.config.Spec.DryRun,
			Now:     s.now,
		})
		s.unplanned = !follows(s.next, s.scopes)
	}
	return s.v.problem == nil || compile.Withdrawn(s.v.config)
}

// assignPods lets pods join shards, and marks those that are to be replaced.
func (s *stepping) assignPods() {
	spec := s.v.config.Spec.Root
	if compile.Withdrawn(s.v.config) { // deleted or disabled: all members are to be replaced
		spec = spec.DeepCopy()
		spec.Disable = new(true)
	}
	placed, outdated := layout.Place(spec, s.v.pods, s.next.Members)
	if join := s.joining(s.v, placed); len(join) > 0 {
		s.do(handover.Join{Members: join})
	}
	for _, uid := range s.lasting(outdated, s.now) {
		s.do(handover.Outdated{UID: uid})
	}
	for uid := range s.next.Members {
		if p := s.v.all[uid]; p != nil && (!layout.Selects(s.v.config.Spec.Root, p) || !admitted(s.v, p)) {
			s.do(handover.Outdated{UID: uid})
		}
	}
}

// ahead is what agents said of serials, of members and of pods that wait: the core knows
// which of them the state does not account for.
func (rt *root) ahead(v view, now time.Time) (out []handover.Event) {
	nodes := map[string]string{} // by pod uid
	for _, p := range v.pods {
		nodes[string(p.UID)] = p.Spec.NodeName
	}
	for uid, m := range rt.state.Members {
		nodes[uid] = m.Node
	}
	for _, uid := range slices.Sorted(maps.Keys(nodes)) {
		o := rt.Observe(nodes[uid], uid)
		policy := v.world.Compiled.Policies[types.UID(uid)]
		switch served := policy.PodPolicy != nil && policy.Refuse == ""; {
		case o.Serial == 0:
		case served && policy.RequiredSerial == 0 && (o.Barred || rejects(o, policy)):
			out = append(out, handover.Barred{UID: uid, Serial: o.Serial, Now: now})
		default:
			out = append(out, handover.Ahead{UID: uid, Serial: o.Serial, Now: now})
		}
	}
	return out
}

// forget notes the members whose agents reject the policy of a member, because by their
// record the pod is none. A pod that was deleted after a backup was made exists again once
// that is restored: its agent refused it as one that is gone, or forgot it when it ended.
func (rt *root) forget(members map[string]handover.Member, v view) {
	forgotten := map[string]bool{}
	for uid, m := range members {
		o, policy := rt.Observe(m.Node, uid), v.world.Compiled.Policies[types.UID(uid)]
		required := policy.GetRequiredSerial()
		if rt.forgotten[uid] || required > 0 && o.Nacked == policy.Version && !o.Withheld && (o.Barred || uint64(o.Serial) < required) {
			forgotten[uid] = true
		}
	}
	rt.forgotten = forgotten
}

// rejects reports whether an agent rejected a policy that has the serial of another one in
// force: older agents do not say that this was a refusal, which bars its serial.
func rejects(o push.Observation, policy compile.Policy) bool {
	serial, _ := compile.Serial(o.Version)
	return serial > 0 && serial == int64(policy.Serial) && o.Serial == serial && o.Version != policy.Version && o.Nacked == policy.Version
}

// heard is what there is to say of a member; nil if nothing is new.
func (rt *root) heard(state handover.State, m handover.Member, v view, now time.Time) handover.Event {
	pod := v.all[m.UID]
	o := rt.Observe(m.Node, m.UID)
	policy := v.world.Compiled.Policies[types.UID(m.UID)]
	lost := pod == nil || compile.Ended(pod) || rt.forgotten[m.UID]
	switch {
	case rt.ended.over(m.UID, rt.silentSince(o), v.world.RequestTimeout, now) && !o.Connected:
		// A pod may be marked as failed before its containers end. So while its agent
		// is connected, only that counts.
		return handover.Gone{UID: m.UID, Now: now}
	case lost && policy.GetRefuse() != "" && policy.GetSerial() > 0 && o.Version == policy.Version:
		return handover.Refused{UID: m.UID, Serial: int64(policy.Serial), Now: now}
	}
	// An acknowledgement of the same serial with another hash may be of a policy that
	// another history of the state led to.
	serial := int64(policy.GetSerial())
	if serial == 0 || o.Version != policy.Version {
		return nil
	}
	refused := policy.Refuse != ""
	if _, verified := state.Evidence.Verified[m.Shard]; serial > m.Serial || !state.Evidence.Confirmed[m.UID] || !verified && !refused {
		return handover.Applied{UID: m.UID, Serial: serial, Refused: refused, Now: now}
	}
	return nil
}

// silentSince is since when no agent of a node is connected, as far as is known.
func (rt *root) silentSince(o push.Observation) time.Time {
	if o.Left.IsZero() {
		return rt.since
	}
	return o.Left
}

// grantsNothing reports whether the shards of a root are to own nothing. Under a dry run
// each pod acts on everything, so that what comes after it is a first grant.
func grantsNothing(c *v1alpha1.ShardingConfig) bool { return compile.Withdrawn(c) || c.Spec.DryRun }

// replan makes the plan what the configuration asks for now. Not ok: it is not known yet.
func (rt *root) replan(v view, state handover.State, now time.Time) (ok bool) {
	config, last := v.config, wanted(state)
	switch {
	case grantsNothing(config):
		rt.plan = plan{}
	case v.problem != nil:
		rt.plan = plan{scopes: last}
	case len(last) == 0:
		weights, ok := rt.Weigher.First(rt.uid)
		if !ok {
			return false
		}
		rt.plan = plan{generation: config.Generation, balancing: balancing{looked: now}, scopes: layout.First(config.Spec.Root, weights)}
	case rt.generation != config.Generation:
		weights, ok := rt.Weigher.First(rt.uid)
		if !ok {
			return false
		}
		rt.plan = plan{generation: config.Generation, balancing: balancing{looked: now}, scopes: layout.Next(config.Spec.Root, last, weights)}
	case layout.Rebalance(config.Spec.Root) == v1alpha1.RebalanceOff:
		rt.suggestion = ""
	default:
		rt.balance(config, state, now)
	}
	return true
}

// follows reports whether a state took a plan over.
func follows(state handover.State, scopes map[string]sharding.Scope) bool {
	for name, s := range scopes {
		if !state.Shards[name].Wanted.Equal(s) {
			return false
		}
	}
	return true
}

// heardAll reports whether it is known who is ready: a new leader must not take back
// what the last began only because no agent has come to it yet.
func (rt *root) heardAll(v view, state handover.State, now time.Time) bool {
	if now.Sub(rt.since) >= status.Grace {
		return true
	}
	for _, m := range state.Members {
		if isThere(v, m) && !rt.Observe(m.Node, m.UID).Known {
			return false
		}
	}
	return true
}

// ready are the shards with somebody who serves, or does so again as soon as its
// agent is back.
func (rt *root) ready(v view, state handover.State, now time.Time) map[string]bool {
	out := map[string]bool{}
	for _, m := range state.Members {
		o := rt.Observe(m.Node, m.UID)
		if serves(v, m, o) && (o.Connected || now.Before(o.Left.Add(status.Grace))) {
			out[m.Shard] = true
		}
	}
	return out
}

// serves reports whether a member is up and, when it was heard of last, acted on what
// it is told.
func serves(v view, m handover.Member, o push.Observation) bool {
	_, told := compile.Serial(o.Version)
	told = told && v.world.Compiled.Policies[types.UID(m.UID)].GetRefuse() == ""
	return isThere(v, m) && status.PodReady(v.all[m.UID]) && o.Capture != "" && told
}

// unrefused are the pods, for people, that may act on anything: while nothing was
// held they ran unsharded, or by a state that was lost. Nothing is given to anybody
// before their agents refuse them. Whoever comes later is refused from the start.
func (rt *root) unrefused(v view) []string {
	out := append(rt.leftovers.names(), describe(v.removed)...)
	for _, p := range v.pods {
		if p.Spec.NodeName == "" {
			continue
		}
		captured := rt.Observe(p.Spec.NodeName, string(p.UID)).Capture != ""
		if !rt.refuses(v, p) || !captured && p.Status.Phase != corev1.PodPending {
			out = append(out, fmt.Sprintf("pod %s on node %s, whose agent has not confirmed yet that it acts on nothing until it is in a shard", p.Name, p.Spec.NodeName))
		}
	}
	return out
}

// others are the pods, for people, that may act though they are no members: those without a
// shard that have not confirmed otherwise, and removed ones. After a restore they may be
// members that the state does not know.
func (rt *root) others(v view, state handover.State) []string {
	out := describe(v.removed)
	if v.world.Compiled.Policies == nil {
		out = append(out, "the first policies of this manager")
	}
	if rt.Young() {
		for _, node := range v.world.Unheard {
			out = append(out, fmt.Sprintf("the agent of node %s, which may have pods that the apiserver does not know", node))
		}
	}
	for _, p := range v.pods {
		_, member := state.Members[string(p.UID)]
		if !member && p.Spec.NodeName != "" && !rt.refuses(v, p) && !rt.observesDryRun(v, p) {
			out = append(out, fmt.Sprintf("pod %s on node %s", p.Name, p.Spec.NodeName))
		}
	}
	return out
}

func describe(removed []push.Removed) (out []string) {
	for _, p := range removed {
		out = append(out, fmt.Sprintf("the pod with uid %s on node %s, which was deleted or has ended, and may run on", p.UID, p.Node))
	}
	return out
}

// removed are the pods without a policy that may act under a root: without an agent, until a
// request timeout after that fell silent and the pod was gone.
func (rt *root) removed(v view, now time.Time) []push.Removed {
	out := slices.DeleteFunc(slices.Clone(v.world.Removed), func(p push.Removed) bool {
		over := !p.Left.IsZero() && expired(p.Left, v.world.RequestTimeout, now)
		return over || p.Namespace != "" && p.Namespace != v.config.Namespace
	})
	for uid, p := range v.world.Compiled.Policies { // it is about to be removed
		_, member := rt.state.Members[string(uid)]
		if pod := v.all[string(uid)]; member || p.Namespace != v.config.Namespace || p.Node == "" || pod != nil && !compile.Ended(pod) {
			continue
		}
		if !standsBy(p.PodPolicy) || !rt.confirms(v, p.Node, uid) {
			out = append(out, push.Removed{Node: p.Node, Namespace: p.Namespace, UID: string(uid)})
		}
	}
	return out
}

// observesDryRun reports whether a pod acts on everything because the root's dry run lets it,
// as its agent has confirmed: so it is in no shard.
func (rt *root) observesDryRun(v view, p *corev1.Pod) bool {
	return v.config.Spec.DryRun && rt.confirms(v, p.Spec.NodeName, p.UID)
}

// confirms reports whether an agent has confirmed the present policy of a pod.
func (rt *root) confirms(v view, node string, uid types.UID) bool {
	policy := v.world.Compiled.Policies[uid]
	return policy.PodPolicy != nil && rt.Observe(node, string(uid)).Version == policy.Version
}

// refuses reports whether a pod acts on nothing, as its agent has confirmed: it is
// refused, or in standby.
func (rt *root) refuses(v view, p *corev1.Pod) bool {
	return standsBy(v.world.Compiled.Policies[p.UID].PodPolicy) && rt.confirms(v, p.Spec.NodeName, p.UID)
}

// joining are the pods that may be assigned now: their agents refuse them all.
func (rt *root) joining(v view, placed map[string]string) []handover.Member {
	var out []handover.Member
	for _, p := range v.pods {
		uid, node := string(p.UID), p.Spec.NodeName
		shard := placed[uid]
		if shard == "" || node == "" || p.DeletionTimestamp != nil || !admitted(v, p) ||
			slices.ContainsFunc(v.conflicts, func(c compile.Conflict) bool { return c.Pod == p.Name }) {
			continue
		}
		if rt.refuses(v, p) && rt.Observe(node, uid).Capture != "" {
			out = append(out, handover.Member{UID: uid, Name: p.Name, Node: node, Shard: shard})
		}
	}
	return out
}
