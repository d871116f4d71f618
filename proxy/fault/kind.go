package fault

import (
	"fmt"
	"hash/fnv"
	"math"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Kind is a kind of fault.
type Kind int

// Kinds of fault, in the order in which those of one rule are applied.
const (
	Delay Kind = iota
	Aborted
	Reset
	ResetAfter
	Truncate
	SlowBody
	StaleList
	WatchGone
	WatchCut
	WatchStall
	WatchDelay
	WatchDuplicate
	WatchDrop
	numKinds
)

var kindNames = [numKinds]string{
	"delay", "abort", "reset", "reset_after_answer", "truncate", "slow_body", "stale_list",
	"watch_gone", "watch_cut", "watch_stall", "watch_delay", "watch_duplicate", "watch_drop",
}

// String returns the kind's name in metrics.
func (k Kind) String() string { return kindNames[k] }

// kinds is a set of kinds.
type kinds uint16

func setOf(members ...Kind) (s kinds) {
	for _, k := range members {
		s |= 1 << k
	}
	return s
}

func (s kinds) has(k Kind) bool { return s&(1<<k) != 0 }

var (
	// unanswered are the kinds that replace the server's answer.
	unanswered = setOf(Aborted, Reset)
	ofEvents   = setOf(WatchDelay, WatchDuplicate, WatchDrop)
	ofWatches  = setOf(WatchGone, WatchCut, WatchStall) | ofEvents
	// ofRequests are the kinds that apply to one request, not to its connection.
	ofRequests = setOf(Aborted, ResetAfter, Truncate, SlowBody)
	// lost are the kinds that need more of an answer than is left after a reset.
	lost = setOf(Truncate, SlowBody) | ofWatches

	// excludes are, for each kind, the kinds that cannot be injected together with it.
	excludes = func() (out [numKinds]kinds) {
		answered := setOf(ResetAfter, StaleList) | lost
		for k := range numKinds {
			switch {
			case unanswered.has(k):
				out[k] = unanswered | answered
			case k == ResetAfter:
				out[k] = unanswered | setOf(ResetAfter) | lost
			case k != Delay:
				out[k] = unanswered
				if lost.has(k) {
					out[k] |= setOf(ResetAfter)
				}
				if k != WatchDelay { // delays add up
					out[k] |= setOf(k)
				}
			}
		}
		return out
	}()
)

// beside returns the kinds of s that can be injected together with taken and with each
// other.
func (s kinds) beside(taken kinds) (out kinds) {
	for k := range numKinds {
		if s.has(k) && (taken|out)&excludes[k] == 0 {
			out |= setOf(k)
		}
	}
	return out
}

// chance reports whether a fault is injected. It returns the same for the same
// arguments.
func chance(percent float64, seed uint64, of Kind, numbers ...uint64) bool {
	h := mix(seed + uint64(of) + 1)
	for _, n := range numbers {
		h = mix(h ^ n)
	}
	return float64(h>>11)/(1<<53)*100 < percent
}

// seedOf returns the seed of a rule's hash. It contains the rule's name, so that rules
// with the same seed decide independently. Without a seed it contains the pod's uid, so
// that pods decide independently.
func seedOf(injection string, m *meshv1.FaultRule, pod string) uint64 {
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%s/%s", injection, m.GetName())
	seed := h.Sum64()
	if m.Seed != nil {
		return mix(seed ^ uint64(m.GetSeed()))
	}
	_, _ = fmt.Fprintf(h, "/%s", pod)
	return h.Sum64()
}

// mix is the step and the finaliser of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func isPercent(p float64) bool { return !math.IsNaN(p) && p >= 0 && p <= 100 }
