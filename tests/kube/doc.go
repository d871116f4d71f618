// Package kube accesses the tests' cluster: it finds it, applies manifests, waits, runs
// commands in pods and on nodes, and reads logs, including those of agents and apiserver.
//
// Nothing here sleeps for a fixed time: [Until] polls until a condition is met or the context
// ends, and then returns the last error.
package kube
