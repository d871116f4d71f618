// Package takeover replaces one agent of a node by another while both run, so that
// an upgrade refuses no connection.
//
// The agent that serves listens on a unix socket in the node's run directory. Its
// successor connects, receives the listeners of each pod as file descriptors, serves
// them, and notifies the first agent, which closes its listeners only then. It keeps the
// connection open until it has drained, so that the successor knows what may be in flight.
// A cleanup asks the agent to stop for good, then takes its place, so that no agent
// returns meanwhile. Of two agents, the one of the later pod stays and the other is
// refused. The agent whose socket is at the path is the one that serves. An agent that
// finds another socket there, or none, has been replaced, and yields.
//
// Messages are JSON, one per packet. A reader ignores fields that it does not know, so
// agents of different versions understand each other.
package takeover
