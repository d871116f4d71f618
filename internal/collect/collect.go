// Package collect has the loops over slices and maps that the standard library lacks.
package collect

import (
	"slices"
	"time"
)

// Map returns the results of f, in order; nil if there are none.
func Map[T, U any](in []T, f func(T) U) (out []U) {
	for _, one := range in {
		out = append(out, f(one))
	}
	return out
}

// Filter returns the elements to keep, in order; nil if there are none.
func Filter[T any](in []T, keep func(T) bool) (out []T) {
	for _, one := range in {
		if keep(one) {
			out = append(out, one)
		}
	}
	return out
}

// Find returns a pointer to the first element for which is returns true; nil if there is none.
func Find[T any](in []T, is func(T) bool) *T {
	if i := slices.IndexFunc(in, is); i >= 0 {
		return &in[i]
	}
	return nil
}

// Count returns the number of elements for which is returns true.
func Count[T any](in []T, is func(T) bool) (n int) {
	for _, one := range in {
		if is(one) {
			n++
		}
	}
	return n
}

// Any reports whether is returns true for an entry of a map.
func Any[K comparable, V any](in map[K]V, is func(K, V) bool) bool {
	for k, v := range in {
		if is(k, v) {
			return true
		}
	}
	return false
}

// Since returns the time that before has for a key, now if it has none.
func Since[K comparable](before map[K]time.Time, key K, now time.Time) time.Time {
	if at, known := before[key]; known {
		return at
	}
	return now
}

// Pointers returns pointers to the elements, in order; nil if there are none.
func Pointers[T any](in []T) (out []*T) {
	for i := range in {
		out = append(out, &in[i])
	}
	return out
}
