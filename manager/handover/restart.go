package handover

import "slices"

// Health is the health of a member, as far as restarts depend on it.
type Health int

const (
	// Unknown means that nothing is known of the member, that it has not confirmed its
	// policy yet, or that it is terminating.
	Unknown Health = iota
	// Down means that the member reports that it does not serve.
	Down
	// Up means that the member is ready and applies its policy.
	Up
)

// Restarts returns the uid of the member to replace that may be evicted now. It returns "" while
// none may: another member is not back yet, or a shard would be left with only members
// that do not serve. A member of Unknown health is not evicted, and delays the eviction of
// others.
//
// replace reports whether a member must be replaced. leads reports whether it holds its shard's
// lock; such members are evicted last.
// wanted is the number of members that must be Up. It counts all shards together, because
// an outdated member is surplus in its shard and missing in another.
func (s State) Restarts(wanted int, replace func(Member) bool, health func(uid string) Health, leads func(uid string) bool) (uid string) {
	missing := wanted
	members, up := map[string]int{}, map[string]int{}
	var candidates, down []Member
	for _, m := range s.Members {
		members[m.Shard]++
		switch h := health(m.UID); {
		case h == Up:
			missing--
			up[m.Shard]++
			if replace(m) {
				candidates = append(candidates, m)
			}
		case h == Down && replace(m):
			down = append(down, m)
		}
	}

	// Prefer members of shards in which another member serves, then those that do not lead.
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
	// Evicting a member that does not serve costs nothing.
	if len(down) > 0 {
		return slices.MinFunc(down, byName).UID
	}
	return ""
}
