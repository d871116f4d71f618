// Package node is the state of one node: its labelled pods, what is captured of them, and
// the policy of each.
//
// All state belongs to one goroutine (Node.Run). The pod watch, the manager's stream, the
// container runtime and the ticker only hand it work, so nothing here needs a lock, and
// the events of a pod are handled in one order.
package node
