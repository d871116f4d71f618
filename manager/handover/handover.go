package handover

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// State is the durable state of one configuration. It is a value: Step does not modify its
// argument.
type State struct {
	Shards  map[string]Shard  // by name
	Members map[string]Member // by pod uid: all that may still run
	Moves   []Move            // not settled yet, oldest first
	// MinSerial is the lowest serial of any policy, including those of pods without a
	// shard. It is above all serials that were seen and that the State does not account
	// for.
	MinSerial int64
	// RolledBack reports whether a pod was sent a serial that the State does not account
	// for. Then a history was lost, and other pods may act on any key. Members act on
	// nothing from MinSerial on. Once all have confirmed that, the State starts anew.
	RolledBack bool
	// Evidence is not written: it is lost with the process that collected it.
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
	// OthersConfirmed: OthersIdle was true at some moment since the State was read, and no other
	// pod was heard of since that has had a serial which the State does not account for.
	// Before, a pod may act that joined a shard in a history that was lost.
	OthersConfirmed bool
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

// Holds reports whether any shard owns keys.
func (s State) Holds() bool {
	return collect.Any(s.Shards, func(_ string, shard Shard) bool { return !shard.Owned.Empty() })
}

// Shard is the state of one shard.
type Shard struct {
	// Serial grows whenever Sent changes. It begins with the milliseconds of the
	// Unix time, so that it grows even if the configuration is made anew.
	Serial int64
	// Owned is the scope that the shard owns: members may be acting on its keys. It is
	// disjoint from the scopes of other shards.
	Owned sharding.Scope
	// Target is the scope that the shard should own.
	Target sharding.Scope
	// Wanted is the scope in the last Want. It differs from Target by the keys that wait
	// until their new shard is Ready. Only the next plan uses it.
	Wanted sharding.Scope
}

// Sent returns the scope that members are sent as theirs.
func (s Shard) Sent() sharding.Scope { return s.Owned.Intersect(s.Target) }

// Member is a pod that was assigned to a shard. It never changes its shard.
type Member struct {
	UID, Name, Node, Shard string
	// Serial is the highest serial of the shard for which it is known that the pod acts on
	// no older one. Initially it is the shard's serial when the pod was assigned.
	Serial int64
	// Stale reports whether the pod must be restarted.
	Stale bool
}

// Move is a set of keys that moves from one shard to another.
type Move struct {
	From, To string // either may be empty
	Keys     sharding.Scope
	Phase    Phase
	Since    time.Time // start of the phase
	Began    time.Time // start of the move
}

// Phase is the phase of a Move.
type Phase string

// Phases of a Move. A completed move is not kept.
const (
	// Releasing means that a member of From may still act on the keys.
	Releasing Phase = "Releasing"
	// Granting means that To owns the keys, and a member of To has not confirmed that yet.
	Granting Phase = "Granting"
)

// Event is something that happened.
type Event interface{ event() }

type (
	// Want says which keys each shard should own. Shards that it does not name should own
	// nothing. The first Want after they own nothing and have no members removes them. A
	// Want whose scopes are not disjoint changes nothing. The caller must repeat it when
	// the set of Ready shards or the set of members has changed.
	Want struct {
		Scopes map[string]sharding.Scope
		// Ready are the shards that can take keys, because at least one member serves. A
		// shard with members gives no keys to a shard that is not Ready, and takes back
		// keys that it has not released yet. Keys of Pinned shards do not move.
		Ready map[string]bool
		// Restart makes members that lose keys Stale.
		Restart bool
	}
	// Join assigns pods to shards. The pods must be known to act on nothing. Pods that are
	// assigned already stay in their shard; pods of an unknown shard are ignored. Serial
	// and Stale are ignored.
	Join struct{ Members []Member }
	// Applied says that a pod acts on no serial of its shard older than Serial: it has
	// acknowledged exactly the policy, serial and hash, that follows from this State.
	// Refused is set if the policy refuses the pod. Then it proves nothing about the
	// policies that the pod has acted on.
	Applied struct {
		UID     string
		Serial  int64
		Refused bool
	}
	// Gone says that a pod is proven to have exited.
	Gone struct{ UID string }
	// Refused says that all requests of a pod are refused until it is sent a higher serial.
	// The object of the pod was deleted, but the pod may still run. If Serial is the serial
	// of its shard, the pod is removed from the members and is never sent a higher one.
	Refused struct {
		UID    string
		Serial int64
	}
	// Ahead says that a pod, member or not, was sent a serial. If the serial of a member is
	// above its shard's, the State was rolled back. The serial of another pod proves
	// nothing, because the pod may have been a member of this or another root before.
	// MinSerial rises above it.
	Ahead struct {
		UID    string
		Serial int64
	}
	// Barred says that a pod was refused for another reason after it was sent a serial, and
	// that its agent applies no policy with that serial any more. If it is the current
	// serial of the State, that serial grows.
	Barred struct {
		UID    string
		Serial int64
	}
	// Outdated says that a pod must be restarted for another reason: it now belongs to
	// another shard.
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

// Effect is what a Step did, for metrics, Events and tests. Policies follow from the State once
// it is written.
type Effect interface{ effect() }

type (
	// Resend says that the members of a shard must be sent a new policy.
	Resend struct{ Shard string }
	// Released reports that From no longer owns the keys of a move. Keys whose move is
	// cancelled have no further effect.
	Released struct{ Move Move }
	// Granted reports that To owns the keys.
	Granted struct{ Move Move }
	// Settled reports that all members of To have confirmed that it owns the keys.
	Settled struct{ Move Move }
)

func (Resend) effect()   {}
func (Released) effect() {}
func (Granted) effect()  {}
func (Settled) effect()  {}
