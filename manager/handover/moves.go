package handover

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// track records which keys are moving, and adds effects that report the progress. It
// decides nothing.
func (n *next) track() {
	var moves []Move
	for _, m := range n.before.Moves {
		if m.Phase == Granting {
			m.Keys = m.Keys.Intersect(n.Shards[m.To].Sent())
			moves = add(moves, m)
		}
	}
	names := slices.Sorted(maps.Keys(n.Shards))
	before, now := n.before.owned(), n.owned()
	for _, to := range names {
		gained := n.Shards[to].Owned.Minus(n.before.Shards[to].Owned)
		if gained.Empty() {
			continue
		}
		for _, from := range names {
			moves = n.granted(moves, from, to, gained.Intersect(n.before.Shards[from].Owned))
		}
		moves = n.granted(moves, "", to, gained.Minus(before))
	}
	for _, from := range names {
		left := n.before.Shards[from].Owned.Minus(now)
		if !left.Empty() {
			m := n.move(from, "", left)
			n.effects = append(n.effects, Released{m}, Settled{m})
		}
		leaving := n.Shards[from].Owned.Minus(n.Shards[from].Target)
		if leaving.Empty() {
			continue
		}
		for _, to := range names {
			keys := leaving.Intersect(n.Shards[to].Target)
			moves = add(moves, n.move(from, to, keys))
			leaving = leaving.Minus(keys)
		}
		moves = add(moves, n.move(from, "", leaving))
	}

	n.Moves = nil
	slices.SortFunc(moves, func(a, b Move) int {
		return cmp.Or(a.Began.Compare(b.Began), strings.Compare(a.From, b.From), strings.Compare(a.To, b.To), strings.Compare(string(a.Phase), string(b.Phase)))
	})
	for _, m := range moves {
		if m.Phase == Granting && len(n.Laggards(m)) == 0 {
			n.effects = append(n.effects, Settled{m})
		} else {
			n.Moves = append(n.Moves, m)
		}
	}
}

// granted returns moves with the keys added that this Step moved between two shards.
func (n *next) granted(moves []Move, from, to string, keys sharding.Scope) []Move {
	if keys.Empty() {
		return moves
	}
	m := n.move(from, to, keys)
	if from != "" {
		n.effects = append(n.effects, Released{m})
	}
	m.Phase, m.Since = Granting, n.now
	n.effects = append(n.effects, Granted{m})
	return add(moves, m)
}

// move returns a move that is Releasing. If it was in progress before, it keeps its times.
func (n *next) move(from, to string, keys sharding.Scope) Move {
	for _, m := range n.before.Moves {
		if m.Phase == Releasing && m.From == from && m.To == to && m.Keys.Overlaps(keys) {
			m.Keys = keys
			return m
		}
	}
	return Move{From: from, To: to, Keys: keys, Phase: Releasing, Since: n.now, Began: n.now}
}

// add returns moves with m added. It merges m with a move of the same phase between the
// same shards, so that there is at most one.
func add(moves []Move, m Move) []Move {
	if m.Keys.Empty() {
		return moves
	}
	for i := range moves {
		if old := &moves[i]; old.From == m.From && old.To == m.To && old.Phase == m.Phase {
			old.Keys = sharding.Union(old.Keys, m.Keys)
			return moves
		}
	}
	return append(moves, m)
}

// Laggards returns the members that a move waits for, sorted by name: members of From while
// it is Releasing, members of To while it is Granting.
func (s State) Laggards(m Move) []Member {
	if m.Phase == Releasing {
		return s.lagging(m.From)
	}
	return s.lagging(m.To)
}

// lagging returns the members of a shard that may act on an earlier policy, sorted by name.
func (s State) lagging(shard string) []Member {
	return s.members(func(m Member) bool { return m.Shard == shard && m.Serial < s.Shards[shard].Serial })
}

// members returns the members for which is returns true, sorted by name.
func (s State) members(is func(Member) bool) []Member {
	out := collect.Filter(slices.Collect(maps.Values(s.Members)), is)
	slices.SortFunc(out, byName)
	return out
}

func byName(a, b Member) int {
	return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.UID, b.UID))
}
