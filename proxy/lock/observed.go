package lock

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

const (
	// maxObserved is how many locks that no policy names are remembered of one pod.
	maxObserved = meshv1.MaxLocks
	// observedFor is how long after its last request such a lock is remembered.
	observedFor = 10 * time.Minute
)

// Observed is a leader-election lock, other than those of the policy, that a pod writes or
// polls.
type Observed struct {
	// Namespace and Name of the lock; Resource is leases, configmaps or endpoints.
	Namespace, Name, Resource string
	// Holder by the last answer seen; empty if it is not known.
	Holder string
	// Written: the pod tried to write a leader-election record. False: it only reads.
	Written bool
}

// Observations are the locks that a pod wrote or polled lately. They are bounded, and safe
// for concurrent use.
type Observations struct {
	mu    sync.Mutex
	known []observation
}

type observation struct {
	Observed
	seen time.Time
}

// Note remembers a lock. If there is no room, it replaces one that is only read by one that
// is written.
func (o *Observations) Note(l Observed, now time.Time) {
	l.Holder = bounded(l.Holder)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.known = slices.DeleteFunc(o.known, func(k observation) bool { return now.Sub(k.seen) > observedFor })
	same := func(k observation) bool {
		return k.Namespace == l.Namespace && k.Name == l.Name && k.Resource == l.Resource
	}
	i := slices.IndexFunc(o.known, same)
	if i < 0 && len(o.known) == maxObserved && l.Written {
		i = slices.IndexFunc(o.known, func(k observation) bool { return !k.Written })
	} else if i >= 0 {
		l.Holder = cmp.Or(l.Holder, o.known[i].Holder)
		l.Written = l.Written || o.known[i].Written
	}
	switch {
	case i >= 0:
		o.known[i] = observation{l, now}
	case len(o.known) < maxObserved:
		l.Namespace, l.Name = strings.Clone(l.Namespace), strings.Clone(l.Name)
		o.known = append(o.known, observation{l, now})
	}
}

// Except returns the locks that the policy does not name, sorted.
func (o *Observations) Except(named Set) (out []Observed) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, l := range o.known {
		if named.Named(l.Namespace, l.Name) == nil && time.Since(l.seen) <= observedFor {
			out = append(out, l.Observed)
		}
	}
	slices.SortFunc(out, func(a, b Observed) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Resource, b.Resource))
	})
	return out
}
