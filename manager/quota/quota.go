// Package quota splits rules of scope Workload among the members of a workload. Together
// the members never have more than the rule allows, even while earlier shares may still be
// in force. [Split] is pure; an [Allocator] keeps its state.
//
// A rule with burst b gives a member with share {i, n} those of the tokens 0..b-1 whose
// remainder modulo n is i. For any b, that is no more than what a share {j, m} with
// j <= i and m <= n gives. So members have no more than b tokens together if their shares
// have distinct indexes, all below the least Of. Split maintains this invariant.
package quota

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Share is the part of a rule that one member has: number Index, counted from 0, of Of
// equal parts. The zero Share is none.
type Share struct {
	Index, Of uint32
}

// None reports whether a share is empty.
func (s Share) None() bool { return s.Of == 0 }

// bound returns a share that gives at least as much as each of a and b.
func bound(a, b Share) Share {
	switch {
	case a.None():
		return b
	case b.None():
		return a
	}
	return Share{min(a.Index, b.Index), min(a.Of, b.Of)}
}

// covers reports whether s gives at least as much as t.
func (s Share) covers(t Share) bool { return bound(s, t) == s }

// String returns a share as it is written in statuses: "2/5" is the second of five parts,
// "-" is none.
func (s Share) String() string {
	if s.None() {
		return "-"
	}
	return fmt.Sprintf("%d/%d", s.Index+1, s.Of)
}

// ParseShare parses the result of String; any other text is none.
func ParseShare(text string) Share {
	before, after, _ := strings.Cut(text, "/")
	nth, err1 := strconv.ParseUint(before, 10, 31)
	of, err2 := strconv.ParseUint(after, 10, 31)
	if err1 != nil || err2 != nil || nth == 0 || nth > of {
		return Share{}
	}
	return Share{uint32(nth - 1), uint32(of)}
}

// Member is a pod that has a share of a rule, or waits for one.
type Member struct {
	// Sent is the share that was sent last. It is None if the pod was sent none, or is no
	// longer a member.
	Sent Share
	// May gives at least as much as any share that may be in force in the pod.
	May Share
	// Recorded is the recorded bound, from which the next leader continues. A share is sent
	// only if Recorded covers it.
	Recorded Share
	// Leaving reports whether the member must lose its share, and may still have one.
	Leaving bool
	// Like is the member's share of another rule, while it has none of this one. It gets
	// the same index if that is free, so that both rules are recorded together.
	Like Share
}

// Confirm returns the member once the share that was sent last is in force, and no other.
func (m Member) Confirm() Member {
	m.May = m.Sent
	return m
}

// Split decides which share each member gets, and sets Sent as soon as Recorded covers it.
// The returned members differ from the given ones only in Sent, May and Like. A member
// whose Recorded does not cover its May waits until the caller has recorded May.
//
// No member gets more before all members that must have less have confirmed it. Once all n
// members confirm, each has one n-th.
func Split(members []Member) []Member {
	of := uint32(0)
	for _, m := range members {
		of++
		if m.Leaving && !m.May.None() {
			of = max(of, m.May.Index+1) // its index is taken until it confirms
		}
	}
	wanted := wants(members, of)

	// Try to change all members at once. If that is unsafe, change only those that have a
	// share already. If that is unsafe too, give no member more than it has.
	next := send(members, wanted, func(int) bool { return true })
	if !sound(next) {
		next = send(members, wanted, func(i int) bool { return !members[i].May.None() })
	}
	if !sound(next) {
		next = send(members, less(members, wanted), func(i int) bool { return !members[i].May.None() })
	}
	// Then add members without a share one by one, where there is room.
	if left, ok := roomLeft(next); ok {
		for i, m := range next {
			if m.May.None() && !m.Leaving && left.take(wanted[i]) {
				next[i].Sent, next[i].May = wanted[i], wanted[i]
			}
		}
	}
	for i, m := range next {
		if m.Sent != members[i].Sent && !m.Recorded.covers(m.May) {
			next[i].Sent = members[i].Sent // not before May is recorded
		}
		if !m.May.None() {
			next[i].Like = Share{}
		}
	}
	return next
}

// wants returns the share that each member should end up with. Members keep their index
// where possible.
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

// fill gives the free indexes to the members without one, and no share to leaving members.
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

// less returns the wanted shares, reduced so that no member gets more than it may have now.
func less(members []Member, wanted []Share) []Share {
	out := make([]Share, len(members))
	for i, w := range wanted {
		out[i] = Share{max(w.Index, members[i].May.Index), max(w.Of, members[i].May.Of)}
	}
	return out
}

// send returns the members after the wanted shares are sent to those for which who returns
// true, and none to leaving members.
func send(members []Member, wanted []Share, who func(i int) bool) []Member {
	out := make([]Member, len(members))
	for i, m := range members {
		if m.Leaving {
			m.Sent = Share{}
		} else if who(i) {
			m.Sent, m.May = wanted[i], bound(m.May, wanted[i])
		}
		out[i] = m
	}
	return out
}

// sound reports whether the shares that may be in force together give no more than the
// rule allows.
func sound(members []Member) bool {
	_, ok := roomLeft(members)
	return ok
}

// room tracks which shares can be added to those that are taken.
type room struct {
	taken          map[uint32]bool
	least, highest uint32 // Of, and Index
}

// roomLeft returns the room beside the shares that members may have. ok is false if they
// may already have more than the rule allows.
func roomLeft(members []Member) (r *room, ok bool) {
	r = &room{taken: make(map[uint32]bool, len(members)), least: math.MaxUint32}
	for _, m := range members {
		if !m.May.None() && !r.take(m.May) {
			return nil, false
		}
	}
	return r, true
}

// take takes a share and reports true, unless the shares would then give more than the rule
// allows.
func (r *room) take(s Share) bool {
	least, highest := min(r.least, s.Of), max(r.highest, s.Index)
	if r.taken[s.Index] || highest >= least {
		return false
	}
	r.taken[s.Index], r.least, r.highest = true, least, highest
	return true
}
