// Package quota splits rules of scope Workload among the members of a workload, so that
// together they never have more than the rule gives, whatever they were told before
// and have not confirmed. [Split] is pure; a [Book] remembers for it.
//
// A rule of burst b gives its member of share {i, n} as many of the tokens 0..b-1
// as leave i when divided by n. It is no more, for any b, than what {j, m} gives with
// j <= i and m <= n. So n members whose shares are at least those of different
// indexes below n, of n, have no more than b together: that is what Split keeps.
package quota

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Share is the part of one member: the Index-th, from 0, of Of equal ones. The
// zero Share is none.
type Share struct {
	Index, Of uint32
}

// None reports whether a share is none.
func (s Share) None() bool { return s.Of == 0 }

// bound is a share that gives no less than either.
func bound(a, b Share) Share {
	switch {
	case a.None():
		return b
	case b.None():
		return a
	}
	return Share{min(a.Index, b.Index), min(a.Of, b.Of)}
}

// covers reports whether s gives no less than t.
func (s Share) covers(t Share) bool { return bound(s, t) == s }

// String is as statuses have it: "2/5" is the second of five, "-" none.
func (s Share) String() string {
	if s.None() {
		return "-"
	}
	return fmt.Sprintf("%d/%d", s.Index+1, s.Of)
}

// ParseShare reads what String wrote; anything else is none.
func ParseShare(text string) Share {
	before, after, _ := strings.Cut(text, "/")
	nth, err1 := strconv.ParseUint(before, 10, 31)
	of, err2 := strconv.ParseUint(after, 10, 31)
	if err1 != nil || err2 != nil || nth == 0 || nth > of {
		return Share{}
	}
	return Share{uint32(nth - 1), uint32(of)}
}

// Member is what is known of a pod that has a share of a rule, or waits for one.
type Member struct {
	// Told is the share that it was told last. It is None when it was told that
	// there is none, or that it is no member any more.
	Told Share
	// May gives no less than any share that may be in force in it.
	May Share
	// Recorded is what May is known to be by whoever takes our place. No share is told
	// that is not within it.
	Recorded Share
	// Leaving: it is to have none, and may have one still.
	Leaving bool
	// Like is what it has of another rule, as long as it has none of this one: it is given
	// the same index, if that is free, so that both rules are recorded together.
	Like Share
}

// Confirm notes that what the member was told last is in force, and nothing else is.
func (m Member) Confirm() Member {
	m.May = m.Told
	return m
}

// Split decides what each member is to have, and tells it as soon as it is recorded. In
// the members that it returns only Told, May and Like differ; where Recorded does not cover
// May, it must come to before Split is called again, or the member waits.
//
// Nobody is to have more before everybody who must have less has confirmed it. When all
// confirm, all have one n-th.
func Split(members []Member) []Member {
	of := uint32(0)
	for _, m := range members {
		of++
		if m.Leaving && !m.May.None() {
			of = max(of, m.May.Index+1) // nobody can take it from there
		}
	}
	wanted := wants(members, of)

	// All at once, if that is safe; else who has a share already; else nobody has more.
	next := tell(members, wanted, func(int) bool { return true })
	if !sound(next) {
		next = tell(members, wanted, func(i int) bool { return !members[i].May.None() })
	}
	if !sound(next) {
		next = tell(members, less(members, wanted), func(i int) bool { return !members[i].May.None() })
	}
	// Then one by one, where others have left room.
	if left, ok := roomLeft(next); ok {
		for i, m := range next {
			if m.May.None() && !m.Leaving && left.take(wanted[i]) {
				next[i].Told, next[i].May = wanted[i], wanted[i]
			}
		}
	}
	for i, m := range next {
		if m.Told != members[i].Told && !m.Recorded.covers(m.May) {
			next[i].Told = members[i].Told // later
		}
		if !m.May.None() {
			next[i].Like = Share{}
		}
	}
	return next
}

// wants is what each member is to have. Those that have an index keep it.
func wants(members []Member, of uint32) []Share {
	out := make([]Share, len(members))
	taken := make(map[uint32]bool, len(members))
	for _, leaving := range []bool{true, false} {
		for i, m := range members {
			if m.Leaving == leaving && !m.May.None() && m.May.Index < of && !taken[m.May.Index] {
				taken[m.May.Index] = true
				out[i] = Share{m.May.Index, of}
			}
		}
	}
	for i, m := range members {
		if !m.Leaving && out[i].None() && m.Like.Index < min(of, m.Like.Of) && !taken[m.Like.Index] {
			taken[m.Like.Index] = true
			out[i] = Share{m.Like.Index, of}
		}
	}
	fill(members, of, out, taken)
	return out
}

// fill gives the free indexes to those that have none, and nothing to those that leave.
func fill(members []Member, of uint32, out []Share, taken map[uint32]bool) {
	free := uint32(0)
	for i, m := range members {
		if m.Leaving {
			out[i] = Share{}
			continue
		}
		if !out[i].None() {
			continue
		}
		for taken[free] {
			free++
		}
		taken[free] = true
		out[i] = Share{free, of}
	}
}

// less is as much of what is wanted as is no more than what there is.
func less(members []Member, wanted []Share) []Share {
	out := make([]Share, len(members))
	for i, w := range wanted {
		out[i] = Share{max(w.Index, members[i].May.Index), max(w.Of, members[i].May.Of)}
	}
	return out
}

// tell tells those who.
func tell(members []Member, wanted []Share, who func(i int) bool) []Member {
	out := make([]Member, len(members))
	for i, m := range members {
		if m.Leaving {
			m.Told = Share{}
		} else if who(i) {
			m.Told, m.May = wanted[i], bound(m.May, wanted[i])
		}
		out[i] = m
	}
	return out
}

// sound reports whether all that may be in force is no more than one.
func sound(members []Member) bool {
	_, ok := roomLeft(members)
	return ok
}

// room is where there can be shares beside those that are taken.
type room struct {
	taken          map[uint32]bool
	least, highest uint32 // Of, and Index
}

// roomLeft is what members leave of one; it is not ok if they may have more.
func roomLeft(members []Member) (r *room, ok bool) {
	r = &room{taken: make(map[uint32]bool, len(members)), least: math.MaxUint32}
	for _, m := range members {
		if !m.May.None() && !r.take(m.May) {
			return nil, false
		}
	}
	return r, true
}

// take takes a share, if all are no more than one then.
func (r *room) take(s Share) bool {
	least, highest := min(r.least, s.Of), max(r.highest, s.Index)
	if r.taken[s.Index] || highest >= least {
		return false
	}
	r.taken[s.Index], r.least, r.highest = true, least, highest
	return true
}
