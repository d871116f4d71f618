// Command scale measures a manager in a large cluster: a real apiserver with thousands of nodes and
// tens of thousands of pods as objects, two replicas of the manager as processes, and an agent for
// each node, which speaks the real protocol and captures nothing.
//
//	scale -api HOST:PORT -manager PROGRAM [flags]
//
// It runs in the network namespace of the control plane, where the addresses 198.18.0.0/15 are local:
// the managers have one each, and so does each agent, because the manager's bounds are by address.
package main
