// Package explore is a model checker for handovers. It visits every interleaving of a small
// world, and reports states in which two pods of different shards may act on one key, or in
// which a handover would not end.
//
// A world has three ranges of keys and three shards. The agents of their pods keep policies on
// disk. Two managers both believe that they lead, and store the State by compare and swap. The
// network loses, repeats, reorders and delays messages. Agents crash and restart with what they
// saved. Pods are deleted and run on, and are created again.
//
// In other worlds managers follow each other, etcd is restored from a backup, and pods outside
// the mesh contend for the operator's lock, or lead by a lock that the restored etcd assigns to
// the mesh. In every world an agent may be silent, because messages may never arrive.
//
// handover.Step is the real one, and so are the rules of package decide about pods that are no
// members, about shards that can take keys, and about the operator's lock. Agents and the lock are
// models of what package handover requires of them.
package explore

import (
	"github.com/ctrlmesh/ctrlmesh/tests/explore/search"
)

// Options bound a world.
type Options struct {
	// Members are the numbers of pods of each shard at first, at most 4 in total.
	Members [shards]int
	// Wants are the scopes that shards may be wanted to own, beginning with the first: for each
	// shard a set of ranges, as bits.
	Wants [][shards]uint8
	// Changes is how often the wanted scopes change.
	Changes uint8
	// Failures is how often an agent crashes, a pod is deleted by force, or an agent applies an
	// outdated refusal.
	Failures uint8
	// Vanish is how often a pod is deleted by force in a world with Restores. In other worlds that
	// counts as a failure.
	Vanish uint8
	// Restores is how often a backup of etcd is restored. It may be taken at any moment.
	Restores uint8
	// Outside reports whether pods outside the mesh contend for the operator's lock.
	Outside bool
	// Flaws are mistakes that the exploration must find. The real protocol has none.
	Flaws Flaws
	// Most is the number of states after which to give up; 0 for no limit.
	Most int
}

// Flaws are variants of the protocol without one of its rules. It is a table of switches, one for
// each rule, so it may have more fields than other structs.
type Flaws struct {
	EarlyGrant   bool // the confirmation of one member counts for all
	NoFloor      bool // agents accept older serials
	UnbarredGone bool // agents accept, after a refusal, the serial that it bars
	EarlyAck     bool // agents acknowledge before they have saved the policy
	UndrainedAck bool // agents acknowledge before writes in flight have ended
	SerialReset  bool // a new leader starts serials anew
	BlindWrite   bool // the State is written without a comparison
	GoneUnproven bool // a pod whose object was deleted counts as exited
	GoneEarly    bool // a pod counts as exited while its writes may take effect
	// ForgottenWrites: an agent does not wait for the writes that its predecessor forwarded.
	ForgottenWrites bool
	SerialAlone     bool // an ack counts by its serial alone, for any policy
	Trusting        bool // a State that was read counts as confirmed
	Undetected      bool // a serial above the State's reveals no restored etcd
	// StrangersIgnored: keys are granted although pods that the State does not know may act.
	StrangersIgnored bool
	// NothingRequired: an agent applies the policy of a member of which it has no record.
	NothingRequired bool
	// RemovedIgnored: keys are granted although pods without an object in the restored etcd may
	// act.
	RemovedIgnored bool
	LockByName     bool // a lock in the mesh's name counts as acquired
	LockIgnored    bool // keys are granted though a pod outside the mesh may hold the lock
}

// Run explores worlds one after another, each breadth first, until something goes
// wrong. It fails where a world is larger than it can represent.
func Run(worlds ...Options) (search.Result, error) { return search.Each(worlds, run) }

func run(o Options) (search.Result, error) {
	x := &explorer{Options: o, core: newCore(o)}
	first, err := x.begin()
	if err != nil {
		return search.Result{}, err
	}
	return search.Run(x, first, o.Most)
}

// alone reports whether there is one manager, which may be another after each read.
func (o Options) alone() bool { return o.Restores > 0 || o.Outside }

type explorer struct {
	Options
	core *core
	next visit
	err  error
}

// visit visits what becomes of the present world by a step.
type visit func(w world, what string, a, b int)

// Successors implements search.Space.
func (x *explorer) Successors(w world, next func(world, search.Step)) (wrong string) {
	x.next = func(w world, what string, a, b int) { next(w, search.Step{What: what, A: a, B: b}) }
	x.successors(w)
	return ""
}

// Wrong implements search.Space.
func (x *explorer) Wrong(w world) string {
	if wrong := x.wrong(w); wrong != "" {
		return wrong
	}
	return x.stuck(w)
}

// Canonical implements search.Space.
func (x *explorer) Canonical(w world) world {
	x.canonical(&w)
	return w
}

// Err implements search.Space.
func (x *explorer) Err() error { return x.err }
