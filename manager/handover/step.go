package handover

import (
	"maps"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Step returns the State after an Event at the given time, and the effects to carry out once that State is
// written.
func Step(s State, e Event, now time.Time) (State, []Effect) {
	n := newNext(s, now)
	if !n.apply(e) {
		return s, nil
	}
	n.verify()
	n.release()
	n.grant()
	n.track()
	n.restart()
	n.Evidence.Acting = n.Evidence.Acting && n.Holds() // else the mesh may release the locks
	if e, ok := e.(Want); ok {
		n.forget(e.Scopes)
	}
	for _, name := range slices.Sorted(maps.Keys(n.resend)) {
		n.effects = append(n.effects, Resend{name})
	}
	return n.State, n.effects
}

// apply applies an Event. It reports false for an Event that must have no effect.
func (n *next) apply(e Event) bool {
	switch e := e.(type) {
	case Want:
		if !disjoint(e.Scopes) || !n.accepts(e) {
			return false
		}
		n.want(e)
	case Join:
		n.join(e.Members)
	case Applied:
		if n.confirmed(e.UID, e.Serial) && !e.Refused {
			n.acted(n.Members[e.UID].Shard)
		}
	case Gone:
		n.remove(e.UID)
	case Refused:
		n.confirmed(e.UID, e.Serial)
		if m, ok := n.Members[e.UID]; ok && e.Serial == n.Shards[m.Shard].Serial {
			n.remove(e.UID)
		}
	case Ahead:
		n.ahead(e.UID, e.Serial)
	case Barred:
		n.barred(e.UID, e.Serial)
	case Outdated:
		n.outdated(e.UID)
	}
	return true
}

// next is the State that a Step builds.
type next struct {
	State
	before  State
	now     time.Time
	resend  map[string]bool // shards
	effects []Effect
}

func newNext(s State, now time.Time) next {
	n := next{before: s, State: s, now: now, resend: map[string]bool{}}
	n.Shards, n.Members = copied(s.Shards), copied(s.Members)
	n.Evidence.Confirmed, n.Evidence.Verified = copied(s.Evidence.Confirmed), copied(s.Evidence.Verified)
	n.verify()
	return n
}

func copied[V any](m map[string]V) map[string]V {
	if m == nil {
		return map[string]V{}
	}
	return maps.Clone(m)
}

func disjoint(scopes map[string]sharding.Scope) bool {
	var all sharding.Scope
	for _, s := range scopes {
		if all.Overlaps(s) {
			return false
		}
		all = sharding.Union(all, s)
	}
	return true
}

// want sets targets.
func (n *next) want(e Want) {
	for name := range e.Scopes {
		if _, ok := n.Shards[name]; !ok {
			n.Shards[name] = Shard{Serial: max(n.now.UnixMilli(), n.MinSerial+1)}
			n.Evidence.Verified[name] = true
			n.resend[name] = true
		}
	}
	targets := n.targets(e)
	for name, shard := range n.Shards {
		sent := shard.Sent()
		shard.Target, shard.Wanted = targets[name], e.Scopes[name]
		n.put(name, shard)
		if e.Restart && !sent.Minus(shard.Sent()).Empty() {
			n.stale(name)
		}
	}
}

// targets returns the wanted scopes, without the keys that wait until their new shard is
// ready.
func (n *next) targets(e Want) map[string]sharding.Scope {
	targets, populated := copied(e.Scopes), n.populated()
	for taker, wanted := range e.Scopes {
		pinned := n.Pinned(taker)
		if e.Ready[taker] && !pinned {
			continue
		}
		for giver, shard := range n.Shards {
			if giver == taker || n.Pinned(giver) || !populated[giver] && !pinned {
				continue
			}
			kept := shard.Owned.Intersect(wanted)
			targets[giver] = sharding.Union(targets[giver], kept)
			targets[taker] = targets[taker].Minus(kept)
		}
	}
	if len(e.Scopes) > 0 {
		n.pin(targets)
	}
	return targets
}

// stale marks the current members of a shard as stale.
func (n *next) stale(shard string) {
	for uid, m := range n.Members {
		if m.Shard == shard {
			m.Stale = true
			n.Members[uid] = m
		}
	}
}

func (n *next) outdated(uid string) {
	if m, ok := n.Members[uid]; ok && !m.Stale {
		m.Stale = true
		n.Members[uid] = m
		n.resend[m.Shard] = true
	}
}

func (n *next) join(members []Member) {
	for _, m := range members {
		shard, known := n.Shards[m.Shard]
		if _, assigned := n.Members[m.UID]; assigned || !known || !n.mayJoin(m.Shard) {
			continue
		}
		if shard.Serial <= n.MinSerial {
			shard.Serial = n.MinSerial + 1
			n.Shards[m.Shard] = shard
			n.changed(m.Shard)
		}
		m.Serial, m.Stale = shard.Serial, false
		n.Members[m.UID] = m
		n.Evidence.Confirmed[m.UID] = true
		n.resend[m.Shard] = true
	}
}

// confirmed records an acknowledgement. It ignores a serial above the shard's, which does
// not belong to a policy of this State.
func (n *next) confirmed(uid string, serial int64) bool {
	m, ok := n.Members[uid]
	if !ok || serial > n.Shards[m.Shard].Serial {
		return false
	}
	m.Serial = max(m.Serial, serial)
	n.Members[uid] = m
	n.Evidence.Confirmed[uid] = true
	return true
}

// acted records that a member of a shard has confirmed which keys it acts on. A refusal
// does not prove that, because agents apply it whichever serial the pod has had.
func (n *next) acted(name string) {
	if _, decided := n.Evidence.Verified[name]; !decided {
		n.Evidence.Verified[name] = true
		shard := n.Shards[name]
		n.Evidence.Acting = n.Evidence.Acting || !shard.Sent().Empty()
		n.Evidence.Doubtful = sharding.Union(n.Evidence.Doubtful, shard.Owned.Minus(shard.Sent()))
	}
}

// remove removes a member that no longer acts on anything.
func (n *next) remove(uid string) {
	delete(n.Members, uid)
	delete(n.Evidence.Confirmed, uid)
}

// release takes from each shard the keys that none of its members acts on any more.
func (n *next) release() {
	if !n.Evidence.OthersConfirmed && !n.RolledBack {
		return
	}
	for name, shard := range n.Shards {
		if len(n.lagging(name)) == 0 {
			shard.Owned = shard.Sent()
			n.put(name, shard)
		}
	}
}

// grant gives shards the keys of their targets that no shard owns.
func (n *next) grant() {
	grantable := sharding.All()
	if !n.conclusive() {
		grantable = n.releasedByVerified()
	}
	grantable = grantable.Minus(n.owned())
	for name, shard := range n.Shards {
		if free := shard.Target.Intersect(grantable); !free.Empty() {
			shard.Owned = sharding.Union(shard.Owned, free)
			n.put(name, shard)
		}
	}
}

// put stores a shard, with a new serial if its members must be sent a new scope. One new
// serial per Step is enough, because intermediate states are never sent.
func (n *next) put(name string, shard Shard) {
	before := n.before.Shards[name]
	if shard.Serial == before.Serial && !shard.Sent().Equal(before.Sent()) {
		shard.Serial++
		n.changed(name)
	}
	n.Shards[name] = shard
}

// forget removes shards that are not wanted, have no members and own nothing.
func (n *next) forget(wanted map[string]sharding.Scope) {
	populated := n.populated()
	for name, shard := range n.Shards {
		if _, ok := wanted[name]; !ok && !populated[name] && shard.Owned.Empty() {
			delete(n.Shards, name)
			delete(n.resend, name)
			delete(n.Evidence.Verified, name)
		}
	}
}

// populated returns the shards that have members.
func (s State) populated() map[string]bool {
	out := map[string]bool{}
	for _, m := range s.Members {
		out[m.Shard] = true
	}
	return out
}

// owned returns the keys that any shard owns.
func (s State) owned() sharding.Scope {
	var all sharding.Scope
	for _, shard := range s.Shards {
		all = sharding.Union(all, shard.Owned)
	}
	return all
}
