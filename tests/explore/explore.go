// Package explore walks every interleaving of a small world in which keys are
// handed over, and says where two pods of different shards may act on one key, or
// where a handover would not end.
//
// The world is three ranges and three shards, whose pods have agents that keep
// policies on disk; two managers that both take themselves for the leader, and
// store the State by compare and swap; and a network that loses, repeats, reorders
// and delays all that is said. Agents crash and come back with what they saved,
// pods vanish and run on, and are made anew.
//
// In other worlds there is one manager after another, etcd is restored from a backup, and
// pods outside the mesh contend for the operator's lock, or lead by a lock that the restored
// etcd gives to the mesh. An agent that is silent is one of which nothing is heard: that is
// part of every world.
//
// handover.Step is the real one. Agents, and the lock, are models of what package handover
// demands of them.
package explore

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// Options bound a world.
type Options struct {
	// Members are the pods of each shard at first. At most 4 in all.
	Members [shards]int
	// Wants are what shards may be wanted to hold, the first at first: for each shard
	// a set of ranges, as bits.
	Wants [][shards]uint8
	// Changes is how often what is wanted changes.
	Changes uint8
	// Failures is how often an agent crashes, a pod vanishes, or an agent takes a
	// refusal that is out of date.
	Failures uint8
	// Vanish is how often a pod vanishes in a world with Restores; else it is a failure.
	Vanish uint8
	// Restores is how often a backup of etcd is restored, which is taken at any moment.
	Restores uint8
	// Outside: pods outside the mesh contend for the operator's lock.
	Outside bool
	// Flaws are to be found out. None for the real thing.
	Flaws Flaws
	// Most is the number of states after which to give up; 0 for no limit.
	Most int
}

// Flaws are mistakes that one could make.
type Flaws struct {
	EarlyGrant   bool // one member's word is taken for that of all
	NoFloor      bool // agents accept older serials
	UnbarredGone bool // agents accept, after a refusal, the serial that it bars
	EarlyAck     bool // agents acknowledge before they have saved
	UndrainedAck bool // agents acknowledge before writes under way have ended
	SerialReset  bool // a manager that takes over counts from the start
	BlindWrite   bool // the State is written without being compared
	GoneUnproven bool // a pod whose object is gone is taken to run no more
	GoneEarly    bool // a pod is taken to be gone while what it asked for may take effect
	// ForgottenWrites: an agent does not wait for what the one before it let through.
	ForgottenWrites bool
	SerialAlone     bool // an acknowledgement counts by its serial, of whichever policy
	Trusting        bool // a State that is read is taken for true
	Undetected      bool // a serial beyond the State's is taken for the State's
	// StrangersIgnored: keys are granted whatever pods do that the State does not know.
	StrangersIgnored bool
	// NothingRequired: an agent applies the policy of a member that it knows nothing of.
	NothingRequired bool
	// RemovedIgnored: keys are granted whatever pods do whose object the restored etcd lacks.
	RemovedIgnored bool
	LockByName     bool // a lock that bears the mesh's name is taken to be acquired
	LockIgnored    bool // keys are granted though a pod outside the mesh may hold the lock
}

// Report is what was seen.
type Report struct {
	States int // explored
	// Violation says what went wrong, after which steps; empty if nothing did.
	Violation string
}

// String is for logs and for programs: `states_explored=N`.
func (r Report) String() string { return fmt.Sprintf("states_explored=%d", r.States) }

// Run explores worlds one after another, each breadth first, until something goes
// wrong. It fails where a world is larger than it can represent.
func Run(worlds ...Options) (Report, error) {
	var total Report
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

func run(o Options) (Report, error) {
	x := &explorer{Options: o, core: newCore(o), seed: maphash.MakeSeed(), seen: map[uint64]struct{}{}}
	first, err := x.begin()
	if err != nil {
		return Report{}, err
	}
	x.visit(first, -1, step{})
	for x.at = 0; x.at < len(x.nodes) && x.violation == "" && x.err == nil; x.at++ {
		if o.Most > 0 && len(x.nodes) >= o.Most {
			return Report{States: len(x.nodes)}, nil
		}
		w := x.nodes[x.at].world
		x.nodes[x.at].world = nil // only its trace is needed from now on
		x.successors(*w)
	}
	return Report{States: len(x.nodes), Violation: x.violation}, x.err
}

// alone reports whether there is one manager, which may be another after each read.
func (o Options) alone() bool { return o.Restores > 0 || o.Outside }

type explorer struct {
	Options
	core *core
	// seen are hashes of worlds: of ten million, two are alike once in 300,000 runs.
	seen      map[uint64]struct{}
	seed      maphash.Seed
	nodes     []node
	at        int // whose successors are visited
	violation string
	err       error
}

// node is a world, and how it came to be.
type node struct {
	world *world
	from  int32
	step  step
}

// step is what happened, for people.
type step struct {
	what string
	a, b int
}

// next visits what becomes of the present world by a step.
func (x *explorer) next(w world, what string, a, b int) { x.visit(w, x.at, step{what, a, b}) }

func (x *explorer) visit(w world, from int, s step) {
	if x.violation != "" || x.err != nil {
		return
	}
	x.canonical(&w)
	h := maphash.Comparable(x.seed, w)
	if _, ok := x.seen[h]; ok {
		return
	}
	x.seen[h] = struct{}{}
	x.nodes = append(x.nodes, node{&w, int32(from), s})
	wrong := x.wrong(w)
	if wrong == "" {
		wrong = x.stuck(w)
	}
	if wrong != "" {
		x.violation = wrong + " after" + x.trace(len(x.nodes)-1)
	}
}

// trace is how a world came to be.
func (x *explorer) trace(i int) string {
	var steps []string
	for ; i > 0; i = int(x.nodes[i].from) {
		s := x.nodes[i].step
		steps = append(steps, fmt.Sprintf("\n  %s %d %d", s.what, s.a, s.b))
	}
	slices.Reverse(steps)
	return strings.Join(steps, "")
}
