package proxy

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// Holder is what a pod wrote into one of its locks.
type Holder struct {
	// Namespace and Name of the lock, by the operator's own name.
	Namespace, Name string
	// Identity of the holder; empty: nobody.
	Identity string
	// Version is the Lease's resourceVersion, as written.
	Version string
}

type lockName struct{ namespace, name string }

func nameOf(l *lock.Lock) lockName { return lockName{l.Namespace(), l.Name()} }

// lockRecords keeps what a pod wrote last into each of its locks. It is safe for
// concurrent use.
type lockRecords struct {
	mu    sync.Mutex
	known map[lockName]*lockRecord
	// written gets a token when a Lease was written.
	written chan struct{}
}

type lockRecord struct {
	until time.Time // when the lease ends
	lease Holder    // zero if the lock is no Lease
}

// write notes a successful write of a lock. Records of locks that the policy does not
// name any more are dropped.
func (r *lockRecords) write(l *lock.Lock, named locks, resource string, h lock.Held) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name := range r.known {
		if named.named(name.namespace, name.name) == nil {
			delete(r.known, name)
		}
	}
	if r.known == nil {
		r.known = map[lockName]*lockRecord{}
	}
	record := r.known[nameOf(l)]
	if record == nil {
		record = &lockRecord{}
		r.known[nameOf(l)] = record
	}
	record.until = time.Time{}
	if h.Holder != "" {
		record.until = time.Now().Add(h.For)
	}
	if resource != "leases" {
		return
	}
	record.lease = Holder{l.Namespace(), l.Name(), h.Holder, h.Version}
	select {
	case r.written <- struct{}{}:
	default:
	}
}

// held reports whether a lock is held.
func (r *lockRecords) held(l *lock.Lock) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	record := r.known[nameOf(l)]
	return record != nil && time.Now().Before(record.until)
}

// leases returns what was written into Leases, sorted.
func (r *lockRecords) leases() (out []Holder) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, record := range r.known {
		if record.lease != (Holder{}) {
			out = append(out, record.lease)
		}
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return out
}

// HeldLocks returns the locks of the policy in force that the pod holds, sorted, as
// namespace/name: its last successful write of each named a holder, no longer ago than
// the lease lasts.
func (p *Pod) HeldLocks() (out []string) {
	pol := p.policy.Load()
	if pol == nil {
		return nil
	}
	for _, l := range pol.locks {
		if p.records.held(l) {
			out = append(out, l.Namespace()+"/"+l.Name())
		}
	}
	slices.Sort(out)
	return out
}

// LockHolder reports whether the pod holds all of its shard's locks.
func (p *Pod) LockHolder() bool {
	pol := p.policy.Load()
	return pol != nil && len(pol.locks) > 0 && len(p.HeldLocks()) == len(pol.locks)
}

// Holders returns what the pod wrote last into those of its locks that are Leases,
// sorted by lock.
func (p *Pod) Holders() []Holder { return p.records.leases() }

// HolderWritten gets a token when Holders may have changed. The writer then waits
// for its answer.
func (p *Pod) HolderWritten() <-chan struct{} { return p.records.written }
