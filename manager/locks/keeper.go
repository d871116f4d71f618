// Package locks holds operators' leader-election locks for the mesh.
//
// A pod outside the mesh leads under the operator's own lock, and each shard under one of
// its own. So the mesh holds the operator's lock while any shard may act: then no pod
// outside the mesh can lead beside a shard. The mesh acquires the lock by the ordinary
// protocol, which pods outside the mesh follow as well: only when the record is empty, or
// has not changed for its own lease duration, and with compare-and-swap.
//
// The record itself is the only state. Its label makes an admission policy reject writes
// by anybody but the manager, so that the lock stays held while no manager runs.
package locks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/parallel"
)

const (
	// Every is how often rounds must be: locks are renewed as often as clients do.
	Every = 2 * time.Second
	// perLock bounds what is done about one lock in a round, so that others have
	// their turn.
	perLock = 3 * time.Second
	// atOnce bounds the locks that are worked on together.
	atOnce = 16
	// searchEvery is how often the keeper looks for locks that no configuration names
	// any more, and for other objects of a lock than its Lease.
	searchEvery = 30 * time.Second
)

// Keeper acquires, renews and releases locks. Its rounds must not overlap.
type Keeper struct {
	// Client reads and writes past any cache.
	Client client.Client
	// May reports whether a ServiceAccount may update a lock's object of a resource, such as [Leases].
	May mayUpdate
	Log *slog.Logger
	// Now is the clock.
	Now func() time.Time

	locks    map[types.NamespacedName]*lock
	configs  map[types.NamespacedName][]types.NamespacedName // that demand a lock
	searched time.Time
	// marked are the locks with the mesh's label, and the configurations that they
	// were acquired for, by the last search.
	marked map[types.NamespacedName]types.NamespacedName

	mu      sync.Mutex
	states  map[types.NamespacedName]State
	refused map[claim]string // why
	asked   map[claim]uint64 // of the demands of the last round
}

// claim is the demand of a configuration for a lock.
type claim struct{ config, lock types.NamespacedName }

// States returns a function that returns what is known of a lock for a configuration; not ok
// before the first round with it. The mesh holds no lock for a configuration that may not have
// it.
func (k *Keeper) States(config types.NamespacedName) func(lock types.NamespacedName) (State, bool) {
	return func(lock types.NamespacedName) (s State, ok bool) {
		k.mu.Lock()
		defer k.mu.Unlock()
		s, ok = k.states[lock]
		s.Asked = k.asked[claim{config, lock}]
		if why, refused := k.refused[claim{config, lock}]; refused {
			s.Held, s.Acquired, s.Problem = false, false, cmp.Or(why, s.Problem)
		}
		return s, ok
	}
}

// Refuses reports whether the mesh may not have a lock for a configuration, or has not asked whether
// it may, because the configuration does not acquire it.
func (k *Keeper) Refuses(config, lock types.NamespacedName) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, refused := k.refused[claim{config, lock}]
	return refused
}

// Round does what can be done now. Demands must be those of all configurations. A lock
// that the mesh holds and that none of them names is released once orphan reports that
// no pod acts for the configuration that it was acquired for, which may not exist any
// more. Of configurations that demand one lock and overlap, one has it. changed reports whether
// State has something new to say.
func (k *Keeper) Round(ctx context.Context, demands []Demand, orphan func(config types.NamespacedName) bool, overlap Overlap) (changed bool, err error) {
	now := k.Now()
	demands, err = k.withOrphans(ctx, demands, orphan, now)
	k.follow(demands)
	resources := map[types.NamespacedName][]string{}
	type asks struct {
		Demand
		lock Lock
	}
	asking := map[types.NamespacedName][]asks{}
	for _, d := range demands {
		for _, l := range d.Locks {
			resources[l.NamespacedName] = append(resources[l.NamespacedName], l.Resources...)
			asking[l.NamespacedName] = append(asking[l.NamespacedName], asks{d, l})
		}
	}
	k.each(func(l *lock) {
		one, cancel := context.WithTimeout(ctx, perLock)
		defer cancel()
		l.look(one, k.Client, resources[l.NamespacedName], now)
		for _, a := range asking[l.NamespacedName] {
			l.authorize(one, k.May, a.Demand, a.lock, now)
		}
	})
	for name, l := range k.locks {
		// All of a demand's locks are acquired, or none.
		feasible := func(d Demand) bool {
			return d.Mode != Acquire || !slices.ContainsFunc(d.Locks, func(of Lock) bool {
				other := k.locks[of.NamespacedName]
				_, refused := other.refused(d.Config)
				return !other.state(now).free() || refused && other != l
			})
		}
		l.hold(collect.Map(asking[name], func(a asks) Demand { return a.Demand }), feasible, orphan, overlap)
	}
	refused := func(config, lock types.NamespacedName) bool {
		_, refused := k.locks[lock].refused(config)
		return refused
	}
	wanted := wishes(permitted(demands, refused), func(name types.NamespacedName) State { return k.locks[name].state(now) })
	k.watchActing(wanted, orphan)
	k.record(wanted)
	k.each(func(l *lock) {
		one, cancel := context.WithTimeout(ctx, perLock)
		defer cancel()
		for _, did := range l.do(one, k.Client, wanted[l.NamespacedName], now) {
			k.Log.Info(did, "lock", l.String(), "config", wanted[l.NamespacedName].config.String())
		}
	})
	return k.publish(demands, now), err
}

// follow makes the keeper's locks those of the demands.
func (k *Keeper) follow(demands []Demand) {
	next := map[types.NamespacedName]*lock{}
	k.configs = map[types.NamespacedName][]types.NamespacedName{}
	for _, d := range demands {
		for _, l := range d.Locks {
			if next[l.NamespacedName] = k.locks[l.NamespacedName]; next[l.NamespacedName] == nil {
				next[l.NamespacedName] = newLock(l.NamespacedName)
			}
			k.configs[l.NamespacedName] = append(k.configs[l.NamespacedName], d.Config)
		}
	}
	k.locks = next
}

// each works on all locks, a few at a time.
func (k *Keeper) each(f func(*lock)) {
	parallel.Each(slices.Collect(maps.Values(k.locks)), atOnce, func(l *lock) error {
		f(l)
		return nil
	})
}

// withOrphans adds demands for the locks that the mesh holds and no demand names.
func (k *Keeper) withOrphans(ctx context.Context, demands []Demand, orphan func(types.NamespacedName) bool, now time.Time) ([]Demand, error) {
	var failed error
	if now.Sub(k.searched) >= searchEvery {
		k.searched = now
		if marked, err := k.search(ctx); err != nil {
			failed = err
		} else {
			k.marked = marked
		}
	}
	named := map[types.NamespacedName]bool{}
	for _, d := range demands {
		for _, l := range d.Locks {
			named[l.NamespacedName] = true
		}
	}
	demands = slices.Clone(demands)
	for name, config := range k.unnamed(named) {
		mode := Watch
		if orphan(config) {
			mode = Release
		}
		demands = append(demands, Demand{Config: config, Mode: mode, Locks: []Lock{{NamespacedName: name}}})
	}
	return demands, failed
}

// watchActing leaves the locks as they are that only configurations without permission demand, or that
// are to be released, while pods may act for configurations that had them.
func (k *Keeper) watchActing(wanted map[types.NamespacedName]wish, orphan func(types.NamespacedName) bool) {
	for name, l := range k.locks {
		w, demanded := wanted[name]
		if demanded && (w.mode != Release || len(l.former) == 0) {
			continue
		}
		if config, held := l.heldFor(); held && (demanded || !orphan(config)) {
			wanted[name] = wish{mode: Watch, config: config}
		}
	}
}

// record has the first of the configurations that share a lock be the one that the mesh holds it for.
func (k *Keeper) record(wanted map[types.NamespacedName]wish) {
	for name, w := range wanted {
		if winners := k.locks[name].winners; w.mode == Keep && len(winners) > 0 {
			w.config = winners[0]
			wanted[name] = w
		}
	}
}

// unnamed are the locks that the mesh holds beside the named ones.
func (k *Keeper) unnamed(named map[types.NamespacedName]bool) map[types.NamespacedName]types.NamespacedName {
	out := map[types.NamespacedName]types.NamespacedName{}
	maps.Copy(out, k.marked)
	for name, l := range k.locks {
		if config, held := l.heldFor(); held {
			out[name] = config
		} else {
			delete(out, name)
		}
	}
	maps.DeleteFunc(out, func(name, _ types.NamespacedName) bool { return named[name] })
	return out
}

// search finds the locks with the mesh's label.
func (k *Keeper) search(ctx context.Context) (map[types.NamespacedName]types.NamespacedName, error) {
	found := map[types.NamespacedName]types.NamespacedName{}
	var errs []error
	for _, resource := range resources {
		var list metav1.PartialObjectMetadataList
		list.SetGroupVersionKind(kinds[resource])
		if err := k.Client.List(ctx, &list, client.MatchingLabels{v1alpha1.LockHeldLabel: "true"}); err != nil {
			errs = append(errs, fmt.Errorf("listing the %s that the mesh holds: %w", resource, err))
			continue
		}
		for _, o := range list.Items {
			namespace, name, _ := strings.Cut(o.Annotations[v1alpha1.LockHolderAnnotation], "/")
			found[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}] = types.NamespacedName{Namespace: namespace, Name: name}
		}
	}
	return found, errors.Join(errs...)
}

// publish lets State know of a round.
func (k *Keeper) publish(demands []Demand, now time.Time) (changed bool) {
	asked := map[claim]uint64{}
	for _, d := range demands {
		for _, l := range d.Locks {
			of := claim{d.Config, l.NamespacedName}
			asked[of] = max(asked[of], d.Asked)
		}
	}
	states := make(map[types.NamespacedName]State, len(k.locks))
	refused := map[claim]string{}
	for name, l := range k.locks {
		states[name] = l.state(now)
		for _, config := range k.configs[name] {
			if why, is := l.refused(config); is {
				refused[claim{config, name}] = why
			}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	changed = !maps.EqualFunc(k.states, states, State.equal) || !maps.Equal(k.refused, refused) || !maps.Equal(k.asked, asked)
	k.states, k.refused, k.asked = states, refused, asked
	return changed
}
