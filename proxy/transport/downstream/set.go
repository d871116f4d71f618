package downstream

import (
	"maps"
	"slices"
	"sync"
)

// Set is a set that is safe for concurrent use. Its zero value is empty.
type Set[T comparable] struct {
	mu  sync.Mutex
	all map[T]struct{}
}

// Add adds an element.
func (s *Set[T]) Add(one T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all = map[T]struct{}{}
	}
	s.all[one] = struct{}{}
}

// Remove removes an element, and reports whether it was in the set.
func (s *Set[T]) Remove(one T) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, had := s.all[one]
	delete(s.all, one)
	return had
}

// List returns the elements in no order.
func (s *Set[T]) List() []T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.all))
}
