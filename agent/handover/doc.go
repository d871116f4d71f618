// Package handover is how one agent of a node takes over from another while both
// run, so that an upgrade refuses no connection.
//
// The agent that serves listens on a unix socket in the node's run directory.
// Its successor asks there, gets each pod's listeners as file descriptors, serves
// them, and says so: only then does the first let go. It keeps the connection until
// it has drained, so that the other knows what may still be under way. A cleaner asks it to stop
// for good, and then holds its place, so that no agent comes back meanwhile. Of two
// agents the one of the later pod stays: the other is refused. Whoever's socket is
// at the path is the one that serves: an agent that finds another's there, or none,
// has been given up for dead, and yields.
//
// Messages are JSON, one to a packet. What a reader does not know it ignores, so
// that agents of different versions understand each other.
package handover
