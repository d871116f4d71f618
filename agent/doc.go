// Package agent is the mesh on one node: it finds the labelled pods, captures
// their apiserver traffic, holds the policy of each, and serves the proxy.
//
// All state belongs to one goroutine (mesh.run). The pod watch, the manager's
// stream and the ticker only hand it work, so nothing here needs a lock, and
// what happens to a pod happens in one order.
package agent
