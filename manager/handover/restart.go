package handover

import "slices"

// Restarts says which stale member may be evicted now: "" while none may, because
// another is not back yet or a shard would be left with none but members that do
// not serve. It may be one that was evicted already and is not gone yet.
//
// serving tells whether a pod is up and applies what it is told; leads whether it
// holds its shard's lock: those go last. wanted is the number of members that a
// shard is to have, as far as there are to be pods for it; it is the sum that must
// serve, for an outdated member is one too many in its shard and lacks in another.
func (s State) Restarts(wanted map[string]int, serving, leads func(uid string) bool) (uid string) {
	missing := 0
	for _, n := range wanted {
		missing += n
	}
	members, up := map[string]int{}, map[string]int{}
	var candidates, down []Member
	for _, m := range s.Members {
		members[m.Shard]++
		switch {
		case serving(m.UID):
			missing--
			up[m.Shard]++
			if m.Stale {
				candidates = append(candidates, m)
			}
		case m.Stale:
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
