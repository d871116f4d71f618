package handover

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// State is all that must not be forgotten, of one configuration. It is a value:
// Step does not change the one it is given.
type State struct {
	Shards  map[string]Shard  // by name
	Members map[string]Member // by pod uid: all that may still run
	Moves   []Move            // that are not settled, oldest first
	// MinSerial is the least serial of any policy, of pods without a shard too. It is
	// above all serials that were seen and that the State does not account for.
	MinSerial int64
	// RolledBack: a pod was sent a serial that the State does not account for, so a
	// history was lost, and other pods may act on any key. Members act on nothing
	// from MinSerial on; once all have confirmed that, the State starts anew.
	RolledBack bool
	// Evidence is not written: it is lost with the process that gathered it.
	Evidence Evidence
}

// Evidence is what has been confirmed since the State was read. A State that was read
// may have been restored from a backup: what it says of the shards is true only as far
// as there is evidence.
type Evidence struct {
	// LocksHeld: no pod outside the mesh can act. OthersIdle: no pod on the mesh can act
	// that is not a member. The caller sets both.
	LocksHeld, OthersIdle bool
	// Acting: a member confirmed that it owns keys by a policy from before the State was
	// read. So it has owned them all along, and the mesh has held the operator's locks.
	Acting bool
	// OthersHeard: OthersIdle was true at some moment since the State was read, and no other
	// pod was heard of since that has had a serial which the State does not account for.
	// Before, a pod may act that joined a shard in a history that was lost.
	OthersHeard bool
	// Confirmed are the members, by uid, that have acknowledged a policy of this State.
	Confirmed map[string]bool
	// Verified are the shards, by name, that own what the State says: a member confirmed
	// the policy that the State was read with. No key can have left such a shard by a
	// lost history, because that needs a later serial from all of its members. False: the
	// policy changed before any member confirmed it, so that it proves nothing any more.
	Verified map[string]bool
	// Doubtful are keys that verified shards were giving up when the State was read. A
	// confirmation does not show whether a lost history gave them to another shard.
	Doubtful sharding.Scope
}

// Holds reports whether any shard holds anything.
func (s State) Holds() bool {
	for _, shard := range s.Shards {
		if !shard.Held.Empty() {
			return true
		}
	}
	return false
}

// Shard is what one shard holds.
type Shard struct {
	// Serial grows whenever Told changes. It begins with the milliseconds of the
	// Unix time, so that it grows even if the configuration is made anew.
	Serial int64
	// Held is what members may be acting on. Disjoint from that of other shards.
	Held sharding.Scope
	// Target is what the shard is to hold.
	Target sharding.Scope
	// Wanted is what the last Want said: Target, but for what waits for a taker to be
	// Ready. Nothing follows from it but the next plan.
	Wanted sharding.Scope
}

// Told is what members are told that is theirs.
func (s Shard) Told() sharding.Scope { return s.Held.Intersect(s.Target) }

// Member is a pod that was assigned to a shard. It stays in it.
type Member struct {
	UID, Name, Node, Shard string
	// Serial of the shard that the pod acts on nothing older than, as far as is
	// known: that at its assignment, at first.
	Serial int64
	// Stale: it is to be restarted.
	Stale bool
}

// Move is keys on their way.
type Move struct {
	From, To string // either may be empty
	Keys     sharding.Scope
	Phase    Phase
	Since    time.Time // of the phase
	Began    time.Time
}

// Phase of a Move.
type Phase string

// Phases of a Move. A move that is over is not kept.
const (
	// Releasing: some member of From may act on the keys.
	Releasing Phase = "Releasing"
	// Granting: the keys are To's, and some member of it does not know yet.
	Granting Phase = "Granting"
)

// Event is something that happened.
type Event interface{ event() }

type (
	// Want says what shards are to hold. Shards that are not named are to hold
	// nothing, and are forgotten by the first Want that finds them holding nothing
	// and without members. A Want whose scopes are not disjoint changes nothing. It
	// is to be repeated when who is Ready or who is a member has changed.
	Want struct {
		Scopes map[string]sharding.Scope
		// Ready are the shards that could take keys: some member of theirs serves.
		// A shard with members gives nothing to a shard that is not Ready, and takes
		// back what it has not given yet. What is Pinned does not change.
		Ready map[string]bool
		// Restart: members that lose keys become Stale.
		Restart bool
		Now     time.Time
	}
	// Join assigns pods, that are known to act on nothing, to shards. Pods that are
	// assigned already stay where they are; those of a shard that is not known are
	// left out. Serial and Stale are not read.
	Join struct{ Members []Member }
	// Applied says that a pod acts on nothing older than a serial of its shard: it has
	// acknowledged exactly the policy, serial and hash, that follows from this State.
	// Refused: the policy refuses the pod, so that it shows nothing of what the pod has
	// acted on.
	Applied struct {
		UID     string
		Serial  int64
		Refused bool
		Now     time.Time
	}
	// Gone says that a pod is proven to run no more.
	Gone struct {
		UID string
		Now time.Time
	}
	// Refused says of a pod whose object is gone, and which may run nonetheless,
	// that it is refused everything until it is told of a serial beyond this one.
	// If that is its shard's then it is a member no more, and never hears of one.
	Refused struct {
		UID    string
		Serial int64
		Now    time.Time
	}
	// Ahead says that a pod, member or not, was sent a serial. If that of a member is beyond
	// its shard's, then the State was rolled back. That of another pod proves nothing: it may
	// have been a member before, of this root or of another. MinSerial rises above it.
	Ahead struct {
		UID    string
		Serial int64
		Now    time.Time
	}
	// Barred says that a pod was refused, for another reason, since it had a serial, and
	// that its agent applies no policy with that serial any more. If it is the State's
	// then that grows.
	Barred struct {
		UID    string
		Serial int64
		Now    time.Time
	}
	// Outdated says that a pod is to be restarted for another reason: it belongs
	// to another shard by now.
	Outdated struct{ UID string }
)

func (Want) event()     {}
func (Join) event()     {}
func (Applied) event()  {}
func (Gone) event()     {}
func (Refused) event()  {}
func (Ahead) event()    {}
func (Barred) event()   {}
func (Outdated) event() {}

// Effect is something to be done once the State is written.
type Effect interface{ effect() }

type (
	// Tell says that members of a shard have something new to hear.
	Tell struct{ Shard string }
	// Released, Granted and Settled tell of a move's progress: From holds the keys
	// no more, To holds them, all that are To's members act on that. A move that is
	// called off, wholly or in part, tells of nothing for what it is called off.
	Released struct{ Move Move }
	Granted  struct{ Move Move }
	Settled  struct{ Move Move }
)

func (Tell) effect()     {}
func (Released) effect() {}
func (Granted) effect()  {}
func (Settled) effect()  {}
