// Package handover moves keys from shard to shard so that no key ever has two
// owners. It is pure: no I/O, no goroutine, no clock of its own.
//
// # Invariants
//
// A State records the keys that each shard owns (Shard.Owned): no member of the shard acts
// on any other key. The keys of different shards are always disjoint. The State also
// records the keys that each shard should own (Shard.Target). Members of a shard are sent
// the keys that are in both (Shard.Sent), with a serial that grows whenever they change.
//
// There are only two transitions:
//
//   - A release reduces the keys that a shard owns to those that its members were sent
//     last. It requires that no pod that was assigned to the shard acts on an older policy:
//     each has confirmed the serial, or is proven to have exited.
//   - A grant adds keys of its target to a shard, if no shard owns them.
//
// There is no plan besides the State: after any crash, the next leader continues from it.
//
// # After a restore
//
// A State that is read may come from a backup. Then the shards own other keys than it
// records, and nothing in it shows that. So a State that was read is trusted only as far as
// agents confirm it (Evidence). They either acknowledge exactly its policies, or report
// that they were sent later ones (Ahead). In the latter case the whole State is void. All
// members are sent a policy without keys, with a serial above all that were seen. The State
// starts anew once each member has confirmed it or has exited.
//
// A pod may have joined a shard in a history that was lost. So a State that was read
// releases nothing before there was a moment at which all pods that are not members were
// idle. A member of the State may have been removed since, or may have exited and been
// restarted. So its agent must not apply a member's policy unless it has a record of the
// pod as a member.
//
// # What the caller must do
//
// Step is a function of a State and an Event. The caller must write the State that it
// returns, by compare and swap, before it carries out the effects and before it sends any
// policy that follows from the State. Events may be repeated, late, or lost, as long as the
// last one of each kind arrives eventually. What an Event says about a pod must stay true
// for ever, because a suspended leader may resume and report it much later.
//
// So agents ensure that a pod that acted on a serial never acts on a lower one. This holds
// across restarts of the agent, and whatever else the pod was sent in between. Agents
// confirm a serial once it is stored on disk and no request that it would refuse is in
// flight. A refusal may have a serial too: then the pod never again acts on that serial or
// a lower one, so the serial counts as applied. Members whose object was deleted are
// refused with the serial of their shard, until they are removed (Refused). A refusal with
// serial 0 bars nothing and lowers nothing.
package handover
