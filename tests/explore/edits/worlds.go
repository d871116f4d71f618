package edits

import "slices"

// Quick are worlds that are explored within seconds.
func Quick() []Options {
	return slices.Concat(Locks(), ResourceEdits(), DryRuns(), Targets(), Deletions(), Shared())
}

// Locks are worlds in which the user renames the operator's lock, or removes its name.
func Locks() []Options {
	return []Options{
		{Specs: []Spec{{}, {Lock: LockB}}, Edits: 1, Outside: Targeted, Restarts: 1},
		{Specs: []Spec{{}, {Lock: NoLock}}, Edits: 1, Outside: Targeted, Restarts: 1},
		{Specs: []Spec{{}, {Lock: NoLock}}, Edits: 1, Outside: Targeted, Discovers: true},
	}
}

// ResourceEdits are worlds in which the user changes what is divided, and by what.
func ResourceEdits() []Options {
	return []Options{
		{Specs: []Spec{{}, {Resources: Secrets}, {Resources: Misspelt}}, Edits: 2},
		{Specs: []Spec{{}, {Resources: Misspelt}}, Edits: 2, Restarts: 1},
		{Specs: []Spec{{}, {Resources: Later}}, Edits: 1},
		{Specs: []Spec{{}, {ByObject: true}}, Edits: 2},
	}
}

// DryRuns are worlds in which the user begins and ends a dry run.
func DryRuns() []Options {
	return []Options{{Specs: []Spec{{}, {DryRun: true}}, Edits: 2, Outside: Targeted, SlowKeeper: true}}
}

// Targets are worlds in which the user selects another workload.
func Targets() []Options {
	specs := []Spec{{Lock: NoLock}, {Lock: NoLock, Retarget: true}}
	return []Options{
		{Specs: specs, Edits: 2, Outside: Elsewhere, Most: 30_000},
		{Specs: specs, Edits: 1, Outside: Elsewhere, PodDeletions: 1, Most: 30_000},
	}
}

// Deletions are worlds in which the user deletes the root, and edits it before or after.
func Deletions() []Options {
	return []Options{
		{Specs: []Spec{{}, {ByObject: true}}, Edits: 2, Deletes: true},
		{Specs: []Spec{{}}, Edits: 1, Deletes: true, PodDeletions: 1},
		{Specs: []Spec{{}, {Lock: LockB}}, Edits: 2, Deletes: true, Outside: Targeted, Most: 20_000},
	}
}

// Shared are worlds in which another root has the same lock.
func Shared() []Options {
	return []Options{
		{Specs: []Spec{{}}, Edits: 1, Deletes: true, Outside: Targeted, Second: Beside},
		{Specs: []Spec{{}}, Edits: 1, Deletes: true, Outside: Targeted, Second: Foreign},
		{Specs: []Spec{{}}, Edits: 1, Deletes: true, Outside: Targeted, Second: Forbidden},
		{Specs: []Spec{{}}, Edits: 1, Deletes: true, Second: Beside, Uninstalls: true},
	}
}

// Long are more, and larger ones: a few million states, in some minutes.
func Long() []Options {
	return append(Quick(),
		Options{Specs: []Spec{{}, {Lock: LockB}, {Lock: NoLock}}, Edits: 2, Outside: Targeted, Restarts: 1, Most: 500_000},
		Options{Specs: []Spec{{}, {Lock: LockB}}, Edits: 2, Outside: Targeted, Discovers: true, Restarts: 1, Most: 500_000},
		Options{Specs: []Spec{{}, {DryRun: true}, {Lock: LockB}}, Edits: 2, Outside: Targeted, SlowKeeper: true, Most: 500_000},
		Options{Specs: []Spec{{}, {Resources: Secrets}, {Resources: Later}}, Edits: 2, Restarts: 1},
		Options{Specs: []Spec{{}, {Retarget: true}}, Edits: 2, Outside: Targeted, Restarts: 1, Most: 500_000},
		Options{Specs: []Spec{{}, {Lock: LockB}}, Edits: 2, Deletes: true, Outside: Targeted, PodDeletions: 1, Most: 500_000},
		Options{Specs: []Spec{{}, {Lock: LockB}}, Edits: 2, Deletes: true, Outside: Targeted, Second: Foreign, Restarts: 1, Most: 500_000},
	)
}
