// Package search visits all states that can be reached from a first one, breadth first, until
// one of them is wrong.
package search

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// Space is what is searched. W is a state.
type Space[W comparable] interface {
	// Successors calls next for each state that may follow. It returns what is wrong with that
	// there are no others; empty if nothing is.
	Successors(w W, next func(w W, step Step)) (wrong string)
	// Canonical returns the state that stands for all that differ from w in nothing that matters.
	Canonical(w W) W
	// Wrong returns what is wrong with a state; empty if nothing is.
	Wrong(w W) string
	// Err returns why the search cannot go on; nil if it can.
	Err() error
}

// Step is what happened between two states, for people.
type Step struct {
	What string
	A, B int
}

// Result is the result of a search.
type Result struct {
	States int
	// Violation describes the first wrong state and the steps to it; empty if there is none.
	Violation string
}

// String is for logs and for programs: `states_explored=N`.
func (r Result) String() string { return fmt.Sprintf("states_explored=%d", r.States) }

// Run searches a space. It gives up after most states; 0 for no limit.
func Run[W comparable](s Space[W], first W, most int) (Result, error) {
	r := &run[W]{space: s, seed: maphash.MakeSeed(), seen: map[uint64]struct{}{}}
	r.visit(first, -1, Step{})
	for at := 0; at < len(r.nodes) && r.violation == "" && s.Err() == nil; at++ {
		if most > 0 && len(r.nodes) >= most {
			break
		}
		w := r.nodes[at].state
		r.nodes[at].state = nil // only its trace is needed from now on
		wrong := s.Successors(*w, func(w W, step Step) { r.visit(w, at, step) })
		r.judge(at, wrong)
	}
	return Result{len(r.nodes), r.violation}, s.Err()
}

// Each searches worlds one after another until something is wrong. States counts those of all.
func Each[O any](worlds []O, run func(O) (Result, error)) (Result, error) {
	var total Result
	for _, o := range worlds {
		r, err := run(o)
		if err != nil {
			return total, err
		}
		total.States += r.States
		if r.Violation != "" {
			total.Violation = fmt.Sprintf("%s\nin %+v", r.Violation, o)
			break
		}
	}
	return total, nil
}

type run[W comparable] struct {
	space Space[W]
	// seen are hashes of states: of ten million, two are equal once in 300,000 runs.
	seen      map[uint64]struct{}
	seed      maphash.Seed
	nodes     []node[W]
	violation string
}

// node is a state, and how it came to be.
type node[W comparable] struct {
	state *W
	from  int32
	step  Step
}

func (r *run[W]) visit(w W, from int, step Step) {
	if r.violation != "" || r.space.Err() != nil {
		return
	}
	w = r.space.Canonical(w)
	h := maphash.Comparable(r.seed, w)
	if _, ok := r.seen[h]; ok {
		return
	}
	r.seen[h] = struct{}{}
	r.nodes = append(r.nodes, node[W]{&w, int32(from), step})
	r.judge(len(r.nodes)-1, r.space.Wrong(w))
}

// judge records that something is wrong with a state.
func (r *run[W]) judge(i int, wrong string) {
	if wrong != "" && r.violation == "" {
		r.violation = wrong + " after" + r.trace(i)
	}
}

// trace is how a state came to be.
func (r *run[W]) trace(i int) string {
	var steps []string
	for ; i > 0; i = int(r.nodes[i].from) {
		s := r.nodes[i].step
		steps = append(steps, fmt.Sprintf("\n  %s %d %d", s.What, s.A, s.B))
	}
	slices.Reverse(steps)
	return strings.Join(steps, "")
}
