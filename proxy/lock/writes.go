package lock

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Holder is what a pod wrote into one of its locks.
type Holder struct {
	// Namespace and Name of the lock, by the operator's own name.
	Namespace, Name string
	// Identity of the holder; empty: nobody.
	Identity string
	// Version is the object's resourceVersion, as written.
	Version string
	// Resource of the object: leases, configmaps or endpoints. A lock may consist of two.
	Resource string
}

// Writes has what a pod wrote last into each of its locks. It is safe for concurrent use.
type Writes struct {
	mu      sync.Mutex
	known   map[types.NamespacedName]*written
	changed chan struct{}
}

// NewWrites returns empty Writes.
func NewWrites() *Writes {
	return &Writes{known: map[types.NamespacedName]*written{}, changed: make(chan struct{}, 1)}
}

// Changed gets a token when a lock was written.
func (w *Writes) Changed() <-chan struct{} { return w.changed }

type written struct {
	until   time.Time         // when the lease ends
	holders map[string]Holder // by resource
}

// Note records a successful write of a lock; h is what the lock was then. holder is who holds it
// by the request itself. A request that names nobody, as one for other content of a ConfigMap,
// does not make the pod the holder of what another wrote. Locks that the policy does not name any
// more are forgotten.
func (w *Writes) Note(l *Lock, named Set, resource, holder string, h Held) {
	holder, h.Holder = bounded(holder), bounded(h.Holder)
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.known, func(name types.NamespacedName, _ *written) bool { return named.Named(name.Namespace, name.Name) == nil })
	record := w.known[l.key()]
	if record == nil {
		record = &written{holders: map[string]Holder{}}
		w.known[l.key()] = record
	}
	if h.Holder != "" && h.Holder != holder && h.Holder != record.holders[resource].Identity {
		return
	}
	record.until = time.Time{}
	if h.Holder != "" {
		record.until = time.Now().Add(h.For)
	}
	record.holders[resource] = Holder{l.Namespace(), l.Name(), h.Holder, h.Version, resource}
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// bounded truncates an identity: the apiserver does not bound identities, and agents report them. The mesh does not
// free a lock whose holder is truncated, but waits until the lease ends.
func bounded(identity string) string {
	if len(identity) <= meshv1.MaxIdentity {
		return identity
	}
	return strings.Clone(identity[:meshv1.MaxIdentity])
}

func (l *Lock) key() types.NamespacedName {
	return types.NamespacedName{Namespace: l.namespace, Name: l.name}
}

// Holds reports whether the pod holds a lock: its last write named a holder, no longer ago
// than the lease lasts.
func (w *Writes) Holds(l *Lock) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	record := w.known[l.key()]
	return record != nil && time.Now().Before(record.until)
}

// Holders returns what was written into the objects of the locks, sorted.
func (w *Writes) Holders() (out []Holder) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, record := range w.known {
		out = slices.AppendSeq(out, maps.Values(record.holders))
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Resource, b.Resource))
	})
	return out
}
