// Package decide decides what becomes of a root: who may act on what, and what the status
// says. It is pure: no I/O, no client, no clock of its own. Package roots gathers the Facts,
// writes the new state by compare and swap, and only then carries out the Decision.
package decide

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/idle"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
	"github.com/ctrlmesh/ctrlmesh/manager/undivided"
)

// Memory is what a leader remembers of a root between rounds. It may be lost at any time: that
// costs time, and never safety. Its zero value is that of a new leader.
type Memory struct {
	plan plan
	// divided are the scopes before a change of what shards act by. The next division
	// begins with them.
	divided map[string]sharding.Scope
	exited  exited
	lost    lost
	// forgotten are the members, by uid, of which their agents have no record.
	forgotten map[string]bool
	leading   leading
	evictions evictions
	reported  reported
	beyond    undivided.Tracker // what members do beyond what their shards own
	quiet     idle.Tracker      // shards that never write
	// releasedAt is since when shards that will act by another spec own nothing, and no member
	// leads; zero if they do.
	releasedAt time.Time
	trial      trial
	crashes    crashes
	refusal    refusal
}

// Reread returns what a leader remembers of a root whose state it reads again: the plan
// follows from that state.
func (m Memory) Reread() Memory {
	m.plan = plan{}
	return m
}

// Correcting reports whether the shards are being balanced, so that the next round should
// follow after CorrectEvery.
func (m Memory) Correcting() bool { return m.plan.correcting }

// Published returns what policies follow from once the state of s is read or written.
func (m Memory) Published(s Stored, firstOrdinal int) compile.Root {
	return compile.Root{State: s.State, Locks: s.Status.Locks, Acting: s.Acting, FirstOrdinal: firstOrdinal, Lost: m.lost.members(), Forgotten: m.forgotten}
}

// Decision is what a round decides. Status must be written before anything else is done.
type Decision struct {
	Status v1alpha1.ShardingConfigStatus
	// State is that of Status, with the evidence.
	State   handover.State
	Effects []handover.Effect
	// Demand is what the root demands of the operator's locks.
	Demand locks.Demand
	// Leaders are those of the shards that should act.
	Leaders map[string]status.Leader
	// Children are the objects of the shards.
	Children []*v1alpha1.ShardingConfig
	// Evict is the pod to evict now; nil if there is none.
	Evict *Eviction
	// Rollback is the rollback of a StatefulSet's template; nil if there is none.
	Rollback *Rollback
	// Queries are those to evaluate from now on.
	Queries []query.Query
	// Release reports whether the finalizer must be removed.
	Release bool
	Events  []Event
	// Balanced describes the keys that move for balance; empty if none do.
	Balanced string
}

// Decide returns what becomes of a root, and what the leader remembers once that is written. It
// changes nothing in its arguments.
func Decide(m Memory, f Facts, now time.Time) (Memory, Decision) {
	d := &deciding{v: newView(f, now), memory: m, next: f.Stored.State}
	d.learn()
	if d.assignKeys() {
		d.assignPods()
	}
	d.outlast()
	d.lead()
	d.compare()
	d.rollOut()
	out := Decision{
		Status: d.status(), State: d.next, Effects: d.effects, Demand: d.demand(), Leaders: d.memory.leading.leaders,
		Children: children(d.v.Spec.Config, d.next), Release: d.releases(), Balanced: d.balanced,
	}
	out.Events = d.events(out.Status.Root)
	out.Evict, out.Rollback, out.Queries = d.restart(), d.rollout.back, d.rollout.queries
	return d.memory, out
}

// deciding is one call of Decide. Its stages run in the order in which they are written.
type deciding struct {
	v       *view
	memory  Memory         // in the making
	next    handover.State // in the making
	effects []handover.Effect
	// removed are pods without a policy that may act under the root.
	removed []push.Removed
	// unconfirmed describes the pods that the first grant waits for.
	unconfirmed []string
	gate        gate
	unplanned   bool // the state does not follow the configuration yet
	balanced    string
	rollout     rollout
}

func (d *deciding) do(e handover.Event) {
	next, effects := handover.Step(d.next, e, d.v.now)
	d.next, d.effects = next, append(d.effects, effects...)
}
