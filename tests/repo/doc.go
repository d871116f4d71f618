// Package repo tests the repository itself: what may import what, and what every
// package must have.
package repo
