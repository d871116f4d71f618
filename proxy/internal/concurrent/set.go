// Package concurrent has what goroutines share without a lock of their own.
package concurrent

import "sync"

// Set is a set that is safe for concurrent use. Its zero value is empty.
type Set[T comparable] struct{ all sync.Map }

// Add adds an element.
func (s *Set[T]) Add(one T) { s.all.Store(one, nil) }

// Remove removes an element, and reports whether it was in the set.
func (s *Set[T]) Remove(one T) bool {
	_, had := s.all.LoadAndDelete(one)
	return had
}

// List returns the elements in no order. It contains those that were added before the call
// and are not removed during it.
func (s *Set[T]) List() (all []T) {
	for one := range s.all.Range {
		all = append(all, one.(T))
	}
	return all
}
