// Package compile renders the objects that users wrote into the policies that
// agents apply: one PodPolicy per labelled pod.
//
// It is pure: no I/O, no goroutine, no clock. The same configurations and pods
// give the same policies, independent of their order.
package compile
