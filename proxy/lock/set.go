package lock

import (
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Set has the operator's locks that a policy names.
type Set []*Lock

// NewSet returns the locks of a policy. In standby they keep their own names: the shard has
// none of its own.
func NewSet(s *meshv1.Sharding) (Set, error) {
	make := New
	if s.GetStandby() {
		make = NewUnrenamed
	}
	var out Set
	for _, l := range s.GetLocks() {
		one, err := make(l)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

// Equal reports whether both have the same locks.
func (s Set) Equal(others Set) bool { return slices.EqualFunc(s, others, (*Lock).Equal) }

// Named returns the lock of this namespace and name, nil if there is none.
func (s Set) Named(namespace, name string) *Lock {
	for _, l := range s {
		if l.Named(namespace, name) {
			return l
		}
	}
	return nil
}

// In returns the locks of a namespace.
func (s Set) In(namespace string) Set {
	return slices.DeleteFunc(slices.Clone(s), func(l *Lock) bool { return l.Namespace() != namespace })
}
