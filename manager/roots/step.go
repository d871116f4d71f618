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
	state := rt.state
	var effects []handover.Effect
	do := func(e handover.Event) {
		var more []handover.Effect
		state, more = handover.Step(state, e)
		effects = append(effects, more...)
	}

	rt.ended.observe(state.Members, v, now)
	rt.forget(state.Members, v)
	rt.leftovers.observe(rt, v, state, now)
	v.removed = rt.removed(v, now)
	state.Evidence.LocksHeld, state.Evidence.OthersIdle = rt.locksHeld(v), len(rt.others(v, state)) == 0
	for _, e := range rt.ahead(v, now) {
		do(e)
	}
	for _, uid := range slices.Sorted(maps.Keys(state.Members)) {
		if e := rt.heard(state, state.Members[uid], v, now); e != nil {
			do(e)
		}
	}
	rt.dropped = nil
	for uid := range rt.forgotten {
		if _, member := state.Members[uid]; !member { // it may join again, once that is written
			rt.dropped = append(rt.dropped, uid)
		}
	}
	rt.unsure, rt.closed, rt.ripe, rt.unplanned = nil, nil, false, false
	first := !state.Holds() && !grantsNothing(v.config)
	if first {
		if rt.unsure = rt.unrefused(v); len(rt.unsure) > 0 {
			return state, effects
		}
	}
	if !rt.heardAll(v, state, now) || !rt.replan(v, state, now) {
		rt.unplanned = true
	} else {
		if first && v.problem == nil && !rt.mayGrant(v) {
			return state, effects
		}
		do(handover.Want{
			Scopes:  rt.scopes,
			Ready:   rt.ready(v, state, now),
			Restart: v.config.Spec.Root.OnChange != v1alpha1.OnChangeRelist && !v.config.Spec.DryRun,
			Now:     now,
		})
		rt.unplanned = !follows(state, rt.scopes)
	}
	if v.problem != nil && !compile.Withdrawn(v.config) {
		return state, effects
	}
	spec := v.config.Spec.Root
	if compile.Withdrawn(v.config) { // deleted or disabled: all members are to be replaced
		spec = spec.DeepCopy()
		spec.Disable = new(true)
	}
	placed, outdated := layout.Place(spec, v.pods, state.Members)
	if join := rt.joining(v, placed); len(join) > 0 {
		do(handover.Join{Members: join})
	}
	for _, uid := range rt.lasting(outdated, now) {
		do(handover.Outdated{UID: uid})
	}
	for uid := range state.Members {
		if p := v.all[uid]; p != nil && (!layout.Selects(v.config.Spec.Root, p) || !admitted(v, p)) {
			do(handover.Outdated{UID: uid})
		}
	}
	return state, effects
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
	case rebalance(config) == v1alpha1.RebalanceOff:
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

// heardAll tells whether it is known who is ready: a new leader must not take back
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

// serves tells whether a member is up and, when it was heard of last, acted on what
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
