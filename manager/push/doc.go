// Package push tells each agent what the pods of its node are held to.
//
// The state of the world is one map from pod to policy, replaced as a whole by
// Server.Set. A stream keeps only the names of pods whose policy its agent is
// still to be told: what it sends is looked up when it is sent. So the latest
// wins, a slow agent holds back nobody, and a stream's memory is bounded by the
// number of pods of its node.
//
// What agents answer is kept in memory, beside the stream it came by, and read
// with Server.Observe.
package push
