package handover

import "slices"

// Health of a member, as far as restarts go.
type Health int

const (
	// Unknown: it was not heard of, or has not answered yet, or is going already.
	Unknown Health = iota
	// Down: it serves nobody, by its own word.
	Down
	// Up: it is ready, and applies what it is told.
	Up
)

// Restarts says which stale member may be evicted now: "" while none may, because
// another is not back yet or a shard would be left with none but members that do
// not serve. Silence is no reason: a member of Unknown health is not evicted, and
// no other for its sake.
//
// leads reports whether a member holds its shard's lock: those go last. wanted is the
// number of members that must be Up, over all shards, for an outdated member is one
// too many in its shard and lacks in another.
func (s State) Restarts(wanted int, health func(uid string) Health, leads func(uid string) bool) (uid string) {
	missing := wanted
	members, up := map[string]int{}, map[string]int{}
	var candidates, down []Member
	for _, m := range s.Members {
		members[m.Shard]++
		switch h := health(m.UID); {
		case h == Up:
			missing--
			up[m.Shard]++
			if m.Stale {
				candidates = append(candidates, m)
			}
		case h == Down && m.Stale:
			down = append(down, m)
		}
	}

	// Best those that leave others to serve, then those that do not lead.
	rank := func(m Member) (r int) {
		if up[m.Shard] == 1 {
			r += 2
		}
		if leads(m.UID) {
			r++
		}
		return r
	}
	slices.SortFunc(candidates, func(a, b Member) int {
		if d := rank(a) - rank(b); d != 0 {
			return d
		}
		return byName(a, b)
	})
	for _, m := range candidates {
		if missing <= 0 && (up[m.Shard] > 1 || members[m.Shard] == 1) {
			return m.UID
		}
	}
	// That costs nothing.
	if len(down) > 0 {
		return slices.MinFunc(down, byName).UID
	}
	return ""
}
