package roots

import (
	"maps"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// plan is the scopes that shards should own. The next leader continues from the scopes that
// the state says were wanted last.
type plan struct {
	generation int64 // of the spec that it follows from
	scopes     map[string]sharding.Scope
	balancing
	// outdated are the pods that could be restarted so that others take their place, and
	// since when.
	outdated map[string]time.Time
}

// outdatedFor is how long a pod must be out of place before it is restarted: during a
// rollout shards lack pods for a moment.
const outdatedFor = 30 * time.Second

// lasting returns the pods that have been out of place for outdatedFor.
func (p *plan) lasting(outdated []string, now time.Time) (out []string) {
	since := map[string]time.Time{}
	for _, uid := range outdated {
		since[uid] = collect.Since(p.outdated, uid, now)
		if now.Sub(since[uid]) >= outdatedFor {
			out = append(out, uid)
		}
	}
	p.outdated = since
	return out
}

// step returns the next state, and what changed.
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
	next, effects := handover.Step(s.next, e, s.now)
	s.next, s.effects = next, append(s.effects, effects...)
}

// learn applies the reports of agents since the last step.
func (s *stepping) learn() {
	s.exited.observe(s.next.Members, s.v, s.now)
	s.forget(s.next.Members, s.v)
	s.lost.observe(s.v, s.next, s.now)
	s.v.removed = s.v.removedPods(s.state.Members, s.now)
	s.next.Evidence.LocksHeld, s.next.Evidence.OthersIdle = s.locksHeld(s.v), len(s.v.strangers(s.next.Members)) == 0
	for _, e := range s.v.serials(s.state.Members) {
		s.do(e)
	}
	for _, uid := range slices.Sorted(maps.Keys(s.next.Members)) {
		if e := s.evidence(s.next, s.next.Members[uid], s.v, s.now); e != nil {
			s.do(e)
		}
	}
	s.dropped = nil
	for uid := range s.forgotten {
		if _, member := s.next.Members[uid]; !member { // it may join again once the state is written
			s.dropped = append(s.dropped, uid)
		}
	}
}

// assignKeys updates the plan and follows it. It reports whether pods may be assigned: they
// may not while a pod outside the mesh may act, or the configuration is invalid.
func (s *stepping) assignKeys() bool {
	s.unconfirmed, s.closed, s.acquirable, s.unplanned = nil, nil, false, false
	first := !s.next.Holds() && !s.v.grantsNothing()
	if first {
		if s.unconfirmed = append(s.lost.names(), s.v.unrefused()...); len(s.unconfirmed) > 0 {
			return false
		}
	}
	if !s.v.reported(s.next.Members, s.now) || !s.replan(s.v, s.next, s.now) {
		s.unplanned = true
	} else {
		if first && s.v.problem == nil && !s.mayGrant(s.v) {
			return false
		}
		s.do(handover.Want{
			Scopes:  s.scopes,
			Ready:   s.v.ready(s.next.Members, s.now),
			Restart: s.v.config.Spec.Root.OnChange != v1alpha1.OnChangeRelist && !s.v.config.Spec.DryRun,
		})
		s.unplanned = !follows(s.next, s.scopes)
	}
	return s.v.problem == nil || compile.Withdrawn(s.v.config)
}

// assignPods adds pods to shards, and marks those that must be replaced.
func (s *stepping) assignPods() {
	spec := s.v.config.Spec.Root
	if compile.Withdrawn(s.v.config) { // deleted or disabled: all members must be replaced
		spec = spec.DeepCopy()
		spec.Disable = new(true)
	}
	placed, outdated := layout.Place(spec, s.v.first, s.v.pods, s.next.Members)
	if join := s.v.joining(placed); len(join) > 0 {
		s.do(handover.Join{Members: join})
	}
	for _, uid := range s.lasting(outdated, s.now) {
		s.do(handover.Outdated{UID: uid})
	}
	for uid := range s.next.Members {
		if p := s.v.all[uid]; p != nil && (!layout.Selects(s.v.config.Spec.Root, p) || !s.v.admitted(p)) {
			s.do(handover.Outdated{UID: uid})
		}
	}
}

// forget records the members whose agents reject the policy of a member, because they have
// no record of the pod as one. A pod that was deleted after a backup exists again once the
// backup is restored: its agent has refused it since, or removed it when it exited.
func (rt *root) forget(members map[string]handover.Member, v view) {
	forgotten := map[string]bool{}
	for uid, m := range members {
		o, policy := v.observe(m.Node, uid), v.policy(uid)
		required := policy.GetRequiredSerial()
		if rt.forgotten[uid] || required > 0 && o.Nacked == policy.Version && !o.Withheld && (o.Barred || uint64(o.Serial) < required) {
			forgotten[uid] = true
		}
	}
	rt.forgotten = forgotten
}

// evidence returns what is new about a member; nil if nothing is.
func (rt *root) evidence(state handover.State, m handover.Member, v view, now time.Time) handover.Event {
	pod := v.all[m.UID]
	o, policy := v.observe(m.Node, m.UID), v.policy(m.UID)
	absent := pod == nil || compile.Ended(pod) || rt.forgotten[m.UID]
	switch {
	case rt.exited.over(m.UID, v.silentSince(o), v.world.RequestTimeout, now) && !o.Connected:
		// A pod may be marked as failed before its containers exit. So while its agent is
		// connected, only the agent's report counts.
		return handover.Gone{UID: m.UID}
	case absent && policy.GetRefuse() != "" && policy.GetSerial() > 0 && o.Version == policy.Version:
		return handover.Refused{UID: m.UID, Serial: int64(policy.Serial)}
	}
	// An ack of the same serial with another hash may be of a policy that followed from
	// another history of the state.
	serial := int64(policy.GetSerial())
	if serial == 0 || o.Version != policy.Version {
		return nil
	}
	refused := policy.Refuse != ""
	if _, verified := state.Evidence.Verified[m.Shard]; serial > m.Serial || !state.Evidence.Confirmed[m.UID] || !verified && !refused {
		return handover.Applied{UID: m.UID, Serial: serial, Refused: refused}
	}
	return nil
}

// grantsNothing reports whether the shards of a root must own nothing. Under a dry run each
// pod acts on everything, so that a first grant follows it. A change of what shards act by
// waits until none owns anything.
func (v view) grantsNothing() bool {
	return compile.Withdrawn(v.config) || v.config.Spec.DryRun || v.changes()
}

// replan updates the plan to the configuration. It is not ok if weights are not known yet.
func (rt *root) replan(v view, state handover.State, now time.Time) (ok bool) {
	config, last := v.config, decide.Wanted(state)
	switch {
	case v.grantsNothing():
		if v.changes() && len(last) > 0 {
			rt.divided = last
			if slices.Contains(v.change.Fields, acting.KeyField) {
				rt.divided = nil // of another key space
			}
		}
		rt.plan = plan{outdated: rt.outdated}
	case v.problem != nil:
		rt.plan = plan{scopes: last}
	case len(last) == 0 || rt.generation != config.Generation:
		weights, ok := rt.Weigher.First(rt.uid)
		if !ok {
			return false
		}
		if len(last) == 0 {
			last, rt.divided = rt.divided, nil
		}
		// Without last scopes, Next returns the first ones.
		rt.plan = plan{generation: config.Generation, balancing: balancing{looked: now}, scopes: layout.Next(config.Spec.Root, last, weights)}
	case layout.Repinned(config.Spec.Root, rt.scopes):
		rt.scopes = layout.Next(config.Spec.Root, last, rt.Weigher.Weights(rt.uid))
	case layout.Rebalance(config.Spec.Root) == v1alpha1.RebalanceOff:
		rt.suggestion = ""
	default:
		rt.balance(config, state, now)
	}
	return true
}

// follows reports whether a state wants the scopes of a plan.
func follows(state handover.State, scopes map[string]sharding.Scope) bool {
	return !collect.Any(scopes, func(name string, s sharding.Scope) bool { return !state.Shards[name].Wanted.Equal(s) })
}
