package handover

import (
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// accepts reports whether a Want may change serials. A withdrawal always may, unless the
// State was rolled back, because it gives keys to no shard.
func (n *next) accepts(w Want) bool {
	return !n.RolledBack && (len(w.Scopes) == 0 || n.Evidence.OthersConfirmed)
}

// Pinned reports whether a shard keeps the keys that it was last sent, because it is not
// verified. A history that was lost may have used its next serial, so an agent that is
// ahead could not be recognised.
func (s State) Pinned(shard string) bool {
	return !s.Shards[shard].Owned.Empty() && !s.Evidence.Verified[shard]
}

// pin removes from targets what must not change. Pinned shards keep the keys that they were
// sent, and no shard takes back keys that may have left it.
func (n *next) pin(targets map[string]sharding.Scope) {
	var pinned sharding.Scope
	for name, shard := range n.Shards {
		if n.Pinned(name) {
			pinned = sharding.Union(pinned, shard.Sent())
		}
	}
	for name, shard := range n.Shards {
		targets[name] = targets[name].Minus(pinned).Minus(shard.Owned.Intersect(n.Evidence.Doubtful))
		if n.Pinned(name) {
			targets[name] = shard.Sent()
		}
	}
}

// Verified reports whether all shards are known to own the keys that the State records.
func (s State) Verified() bool {
	return s.Evidence.Doubtful.Empty() && !collect.Any(s.Shards, func(name string, _ Shard) bool { return s.Pinned(name) })
}

// verify marks all shards as verified once the confirmations of all members prove it.
func (n *next) verify() {
	n.Evidence.OthersConfirmed = n.Evidence.OthersConfirmed || n.Evidence.OthersIdle
	if !n.conclusive() {
		return
	}
	n.Evidence.Doubtful = sharding.Scope{}
	for name := range n.Shards {
		n.Evidence.Verified[name] = true
	}
}

// conclusive reports whether keys that the State gives to no shard are free in fact: all
// members act by this State, and no other pod acts.
func (s State) conclusive() bool {
	return s.Evidence.alone() && len(s.Unconfirmed()) == 0
}

// alone reports whether only members can act.
func (e Evidence) alone() bool { return e.OthersIdle && (e.LocksHeld || e.Acting) }

// Unconfirmed returns the members that have not acknowledged a policy of this State since
// it was read, sorted by name.
func (s State) Unconfirmed() []Member { return s.unconfirmedBeside("") }

func (s State) unconfirmedBeside(shard string) []Member {
	return s.members(func(m Member) bool { return m.Shard != shard && !s.Evidence.Confirmed[m.UID] })
}

// mayJoin reports whether a new member may act on the keys of a shard.
func (n *next) mayJoin(shard string) bool {
	switch {
	case n.RolledBack:
		return false
	case n.Evidence.Verified[shard] || n.Shards[shard].Sent().Empty():
		return true
	}
	return n.Evidence.alone() && len(n.unconfirmedBeside(shard)) == 0
}

// releasedByVerified returns the keys that verified shards owned before this Step, without
// doubtful ones. The keys among them that no shard owns now were released in this Step.
func (n *next) releasedByVerified() sharding.Scope {
	var out sharding.Scope
	for name, shard := range n.before.Shards {
		if n.Evidence.Verified[name] {
			out = sharding.Union(out, shard.Owned)
		}
	}
	return out.Minus(n.Evidence.Doubtful)
}

// barred raises a serial that an agent no longer applies.
func (n *next) barred(uid string, serial int64) {
	m, member := n.Members[uid]
	shard := n.Shards[m.Shard]
	switch {
	case n.RolledBack && member && serial == shard.Serial:
		n.ahead(uid, serial+1)
	case n.RolledBack || member && serial != shard.Serial || !member && serial != n.MinSerial:
		n.ahead(uid, serial)
	case member:
		shard.Serial++
		n.Shards[m.Shard] = shard
		n.changed(m.Shard)
	default:
		n.MinSerial++
	}
}

// changed records a new serial of a shard. From then on, one member's confirmation does not
// verify the shard, because it may confirm the new policy.
func (n *next) changed(shard string) {
	if _, decided := n.Evidence.Verified[shard]; !decided {
		n.Evidence.Verified[shard] = n.before.Shards[shard].Owned.Empty()
	}
	n.resend[shard] = true
}

// ahead marks the State as rolled back, and withdraws all keys, if a member was sent a
// serial that the State does not account for. The serial of another pod raises MinSerial.
func (n *next) ahead(uid string, serial int64) {
	m, member := n.Members[uid]
	if !member {
		// The pod may have been a member until it was refused, or a member of another root.
		// It may also have joined in a history that was lost. Until it is idle, nothing is
		// released.
		if serial > n.MinSerial {
			n.MinSerial = serial + 1
			n.Evidence.OthersConfirmed = false
		}
		return
	}
	if serial <= n.Shards[m.Shard].Serial {
		return
	}
	n.MinSerial = max(n.MinSerial, serial)
	for _, shard := range n.Shards {
		n.MinSerial = max(n.MinSerial, shard.Serial)
	}
	n.MinSerial++
	n.RolledBack = len(n.Shards) > 0
	for name := range n.Shards {
		n.Shards[name] = Shard{Serial: n.MinSerial, Owned: n.Shards[name].Owned}
		n.resend[name] = true
	}
	n.Evidence = Evidence{LocksHeld: n.Evidence.LocksHeld, OthersIdle: n.Evidence.OthersIdle, Confirmed: map[string]bool{}, Verified: map[string]bool{}}
}

// restart empties a State that was rolled back, once no member can act.
func (n *next) restart() {
	if !n.RolledBack {
		return
	}
	if collect.Any(n.Shards, func(name string, _ Shard) bool { return len(n.lagging(name)) > 0 }) {
		return
	}
	clear(n.Shards)
	clear(n.Members)
	clear(n.Evidence.Confirmed)
	clear(n.Evidence.Verified)
	clear(n.resend)
	n.Moves, n.RolledBack = nil, false
}
