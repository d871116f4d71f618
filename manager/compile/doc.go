// Package compile turns what users wrote into what agents are told: one
// PodPolicy per labelled pod.
//
// It is pure: no I/O, no goroutine, no clock. The same configurations and pods
// give the same policies, in whatever order they come.
package compile
