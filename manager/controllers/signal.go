package controllers

import (
	"sync"
	"sync/atomic"
)

// Source is state that others are notified of when it changes.
type Source interface {
	// Subscribe makes f be called at each change, from any goroutine. f must not block.
	Subscribe(f func())
}

// Signal is the Source of state that is kept elsewhere. Its zero value is ready to use.
type Signal struct{ changes Value[struct{}] }

// Subscribe implements Source.
func (s *Signal) Subscribe(f func()) { s.changes.Subscribe(f) }

// Notify calls all subscribers.
func (s *Signal) Notify() { s.changes.Store(nil) }

// Value is state that one controller writes and others read. Its zero value is ready to
// use, and has no value yet.
type Value[T any] struct {
	current   atomic.Pointer[T]
	mu        sync.Mutex
	observers []func(before, after *T)
}

// Load returns the value, nil if there is none yet. It must not be changed.
func (v *Value[T]) Load() *T { return v.current.Load() }

// Store replaces the value and notifies the subscribers.
func (v *Value[T]) Store(next *T) {
	before := v.current.Swap(next)
	v.mu.Lock()
	observers := v.observers
	v.mu.Unlock()
	for _, f := range observers {
		f(before, next)
	}
}

// Subscribe implements Source: every Store is a change.
func (v *Value[T]) Subscribe(f func()) { v.observe(func(_, _ *T) { f() }) }

func (v *Value[T]) observe(f func(before, after *T)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.observers = append(v.observers, f)
}

// When is the Source of the changes that matter to a reader. before is nil at the first.
func (v *Value[T]) When(matters func(before, after *T) bool) Source {
	return source(func(f func()) {
		v.observe(func(before, after *T) {
			if matters(before, after) {
				f()
			}
		})
	})
}

type source func(f func())

func (s source) Subscribe(f func()) { s(f) }
