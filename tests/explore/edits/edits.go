// Package edits is a model checker for edits of configurations. It visits every interleaving of
// what a user changes in a root while its shards act with what the manager, the agents, the pods
// and a pod outside the mesh do, and reports states in which two pods may act on one object, or in
// which shards have stopped for good.
//
// The manager is the real code wherever that is pure: what configurations follow from what shards
// act by (acting, roots.Enact), policies (compile), facts (roots.FactsOf), decisions (decide) and
// the demands for locks (locks.Wished). Agents, the cluster and the order in which the controllers
// run are models. The details of handovers are those of package explore: here an agent takes
// policies in order and does not crash, and leaders remember nothing between rounds. A pod that may
// not renew its lease does not take itself for a leader under its next policy.
package edits

import "github.com/ctrlmesh/ctrlmesh/tests/explore/search"

// Options bound a world. It begins with two shards of one pod each that own everything.
type Options struct {
	// Specs are those of the first root, the one at the beginning first. The user writes any of
	// them.
	Specs []Spec
	// Edits is how often the user writes another spec, or deletes the root if Deletes.
	Edits   uint8
	Deletes bool
	// PodDeletions is how many pods the user deletes, so that they are made anew; Uninstalls
	// reports whether the user deletes the workload.
	PodDeletions uint8
	Uninstalls   bool
	// Outside is the pod that runs outside the mesh from the beginning.
	Outside Outside
	// Discovers reports whether agents see pods contend for the first lock.
	Discovers bool
	// Second is the other root that names the first lock.
	Second Second
	// Restarts is how often another manager begins to lead.
	Restarts uint8
	// SlowKeeper reports whether demands for locks may change while the keeper follows them.
	SlowKeeper bool
	// Flaws are mistakes that the exploration must find.
	Flaws Flaws
	// Most is the number of states after which to give up; 0 for no limit.
	Most int
}

// Outside is where a pod runs outside the mesh.
type Outside uint8

// Pods outside the mesh.
const (
	Nowhere   Outside = iota
	Targeted          // it is of the first workload of the first root
	Elsewhere         // it is of the second one
)

// Second is what the other root is.
type Second uint8

// Other roots.
const (
	None      Second = iota
	Beside           // in the same namespace
	Foreign          // in another namespace
	Forbidden        // likewise, and none of its pods may update the lock
)

// Flaws are variants of the manager without one of its rules. It is a table of switches, one for
// each rule, so it may have more fields than other structs.
type Flaws struct {
	// The policies of shards follow at once from what the spec says of one thing.
	LockAtOnce, ResourcesAtOnce, KeyAtOnce, DryRunAtOnce, TargetAtOnce bool
	ChangeOwning                                                       bool // shards act by another spec though some own keys
	// ChangeUnquiet: shards act by another spec, and the lock is released for a dry run, though
	// agents have not confirmed standby.
	ChangeUnquiet   bool
	UnknownGranted  bool // keys are granted by a spec with resources that do not exist
	UnknownReleases bool // shards release what they own for such a spec
	LockOfSpec      bool // the locks that are demanded are those of the spec
	OrphanAtOnce    bool // a lock that no root demands is released though pods with a policy may act
	Undemanded      bool // a new leader demands no locks before its first decision
	LockUnasked     bool // keys are granted before the keeper follows the demand for the lock
	OutsideIgnored  bool // keys are granted without a lock though pods outside the mesh run
	OneDemand       bool // of two roots with one lock, only the first is heard
	ClaimIgnored    bool // a root that is deleted waits until a lock that others have is released
	RemovedIgnored  bool // a lock that no root demands is released though pods without a policy may act
	RefusedReleases bool // so is a lock that only roots without permission demand
	DeletionAtOnce  bool // shards of a root that is being deleted follow its spec
}

// Run explores worlds one after another until something goes wrong.
func Run(worlds ...Options) (search.Result, error) {
	return search.Each(worlds, func(o Options) (search.Result, error) {
		x := newExplorer(o)
		return search.Run(x, x.begin(), o.Most)
	})
}
