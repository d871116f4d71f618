// Package handover moves keys from shard to shard so that no key ever has two
// owners. It is pure: no I/O, no goroutine, no clock of its own.
//
// # What is known for certain
//
// A State says, for each shard, what it holds: no member of it acts on any other
// key. What shards hold is disjoint, always. It also says what each shard is to
// hold (its target). What members of a shard are told is what it holds and is to
// hold (State.Told), with a serial that grows whenever that changes.
//
// Two things may happen, and only these:
//
//   - A shard is taken to hold no more than it was told once every pod that was
//     assigned to it is known to act on nothing older than that, or to be gone.
//   - A shard is given what it is to hold and nobody else holds.
//
// The first is a release, the second a grant. There is no plan beside the state:
// whatever crashes, whoever leads next goes on from it.
//
// # After a restore
//
// A State that is read may be that of a backup. Then shards own other keys than it says,
// and nothing in it shows that. So a State that was read is trusted as far as agents
// confirm it (Evidence): they acknowledge exactly its policies, or say that they were sent
// later ones (Ahead). In the latter case nothing that the State says counts any more:
// all members are sent a policy without keys, with a serial above all that were seen, and
// the State starts anew once each of them has confirmed it or is gone.
//
// A pod may have joined a shard in a history that was lost. So a State that was read releases
// nothing before all pods that are no members were idle at one moment. A member of the State
// may have been dropped since, or have ended and been started again: its agent must not act on
// a policy of a member unless it knows the pod as one.
//
// # What the caller must do
//
// Step is a function of a State and an Event. The State that it returns must be
// written, compared and swapped, before its effects are carried out and before
// anyone is told of it. Events may be repeated, late, or lost as long as the last
// one of a kind comes at last. What an Event says of a pod must stay true for ever,
// for a leader may wake up and tell of it much later.
//
// So agents see to it that a pod that acted on a serial never acts on a lesser one,
// across their own restarts and whatever else the pod was told meanwhile. They say
// that a serial is applied when it is kept on disk and nothing that it would refuse
// is under way any more. A refusal may have a serial as well: then the pod is never
// again to act on that one or a lesser, which makes it as good as applied. Members
// whose object is gone are refused with the serial of their shard, until they are
// gone (Refused). A refusal without one, serial 0, bars nothing and lowers nothing.
package handover
