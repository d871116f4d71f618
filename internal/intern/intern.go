// Package intern shares values that are costly to make and that many have in common.
package intern

import (
	"runtime"
	"sync"
	"weak"
)

// Map has the values that are in use, by the texts that they are made of. The zero Map is
// empty. It is safe for concurrent use.
type Map[V any] struct {
	mu sync.Mutex
	by map[string]weak.Pointer[V]
}

// Get returns the value of a text. It makes the value unless one is in use already.
func (m *Map[V]) Get(text string, create func(string) (*V, error)) (*V, error) {
	m.mu.Lock()
	v := m.by[text].Value()
	m.mu.Unlock()
	if v != nil {
		return v, nil
	}
	v, err := create(text)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if first := m.by[text].Value(); first != nil {
		return first, nil // made concurrently
	}
	if m.by == nil {
		m.by = map[string]weak.Pointer[V]{}
	}
	m.by[text] = weak.Make(v)
	runtime.AddCleanup(v, m.forget, text)
	return v, nil
}

// forget is called after a value was garbage-collected.
func (m *Map[V]) forget(text string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.by[text].Value() == nil { // else it was made again
		delete(m.by, text)
	}
}
