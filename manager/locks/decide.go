package locks

import (
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Mode is what a configuration demands of its locks.
type Mode int

const (
	// Release releases the locks: no pod of the configuration acts.
	Release Mode = iota
	// Watch leaves the locks as they are.
	Watch
	// Acquire acquires all of the locks once all of them are free, and none of them
	// before.
	Acquire
	// Keep keeps the locks, because shards act, and acquires each one that is free.
	Keep
)

// Demand is the demand of one configuration.
type Demand struct {
	Config types.NamespacedName
	Mode   Mode
	Locks  []Lock
	// Accounts are the ServiceAccounts of the configuration's pods. The mesh acquires a lock that
	// was discovered, or is in another namespace than the configuration, only if one of them may.
	Accounts []string
	// Asked numbers the time since which the configuration has not demanded to release its locks;
	// 0 if it does, or may next. It is greater for a later time.
	Asked uint64
}

// Lock is an operator's lock.
type Lock struct {
	types.NamespacedName
	// Resources are those that pods were seen to use, whether they exist or not.
	Resources []string
	// Held is true if the mesh held the lock for the configuration, by its status.
	Held bool
	// Discovered is true if a pod has contended for the lock, and the configuration does not name it.
	Discovered bool
}

// LockOf returns a lock as a status lists it.
func LockOf(name types.NamespacedName, known []v1alpha1.LockStatus) Lock {
	l := Lock{NamespacedName: name}
	if i := slices.IndexFunc(known, is(name)); i >= 0 {
		l.Resources, l.Discovered, l.Held = known[i].Resources, known[i].Discovered, known[i].HeldByMesh
	}
	return l
}

// State is what is known of a lock.
type State struct {
	// Held reports whether the mesh holds all objects of the lock.
	Held bool
	// Acquired reports whether Held is set and no pod can believe that it holds the lock. The
	// keeper acquired the lock itself, found it renewed by the mesh within the lease's duration,
	// or has renewed it for provenAfter since it found it in the mesh's name.
	Acquired bool
	// Renewed is when the keeper last wrote the lock; zero if it has not.
	Renewed time.Time
	// Holder is the identity that holds the lock outside the mesh; empty if it is free.
	Holder string
	// Expires is when the lease of Holder ends, if Holder has not renewed it for half of
	// the lease's duration; zero before.
	Expires time.Time
	// Resources that the lock consists of, sorted.
	Resources []string
	// Problem is why the lock could not be read or acquired; empty if it could.
	Problem string
	// Asked is that of the demand that the keeper followed last. A lock may be about to be
	// released by an earlier demand.
	Asked uint64
}

func (s State) equal(t State) bool {
	return s.Held == t.Held && s.Acquired == t.Acquired && s.Holder == t.Holder && s.Expires.Equal(t.Expires) && s.Problem == t.Problem && slices.Equal(s.Resources, t.Resources)
}

// free reports whether the mesh holds the lock or may acquire it now.
func (s State) free() bool { return s.Problem == "" && s.Holder == "" }

// wish is what all configurations together demand of one lock.
type wish struct {
	mode      Mode
	config    types.NamespacedName // the configuration that demands most
	resources []string
}

// wishes joins demands. A demand to acquire several locks counts for each of them only
// if all of them are free, by what was seen last; until then those that the mesh holds
// are released again, so that a pod outside the mesh that holds the others may have all.
func wishes(demands []Demand, seen func(types.NamespacedName) State) map[types.NamespacedName]wish {
	out := map[types.NamespacedName]wish{}
	for _, d := range slices.SortedFunc(slices.Values(demands), func(a, b Demand) int { return strings.Compare(a.Config.String(), b.Config.String()) }) {
		mode := d.Mode
		if mode == Acquire && !slices.ContainsFunc(d.Locks, func(l Lock) bool { return !seen(l.NamespacedName).free() }) {
			mode = Keep
		} else if mode == Acquire {
			mode = Release
		}
		for _, l := range d.Locks {
			w, known := out[l.NamespacedName]
			if !known || mode > w.mode {
				w.mode, w.config = mode, d.Config
			}
			for _, r := range l.Resources {
				if !slices.Contains(w.resources, r) {
					w.resources = append(w.resources, r)
				}
			}
			out[l.NamespacedName] = w
		}
	}
	return out
}

// Wished returns what a round of a Keeper demands of each lock, and for which configuration. It is
// for tests/explore.
func Wished(demands []Demand, refused func(config, lock types.NamespacedName) bool, seen func(types.NamespacedName) State) map[types.NamespacedName]Demand {
	out := map[types.NamespacedName]Demand{}
	for name, w := range wishes(permitted(demands, refused), seen) {
		out[name] = Demand{Config: w.config, Mode: w.mode}
	}
	return out
}

// sight is the observed state of one object of a lock.
type sight struct {
	exists bool
	record
	// age is for how long the record has not changed.
	age time.Duration
}

// free reports whether the ordinary protocol lets another acquire the lock.
func (s sight) free() bool {
	return !s.exists || s.holder == "" || s.identified() || s.age >= s.duration
}

// mislabelled reports whether an object has the mesh's label, but not its identity.
func (s sight) mislabelled() bool { return s.exists && s.marked && !s.identified() }

// steps says what to do about the objects of one lock: nothing, if it cannot be done to
// all of them.
func steps(mode Mode, objects map[string]sight) map[string]action {
	out := map[string]action{}
	for resource, s := range objects {
		switch {
		case s.mislabelled() && (mode != Keep || !s.free()):
			out[resource] = unmark
		case mode == Release && s.exists && s.ours():
			out[resource] = release
		case mode == Release:
		case s.exists && s.ours():
			out[resource] = renew
		case mode == Keep && s.free():
			out[resource] = acquire
		case mode == Keep:
			return onlyRenewals(objects)
		}
	}
	return out
}

// onlyRenewals are the steps for a lock of which another holds some object.
func onlyRenewals(objects map[string]sight) map[string]action {
	out := map[string]action{}
	for resource, s := range objects {
		if s.exists && s.ours() {
			out[resource] = renew
		}
	}
	return out
}
