// Package push sends the policies of pods to the agents of their nodes.
//
// The desired state is one map from pod to policy, which Server.Set replaces as a whole. A
// stream keeps only the uids of pods whose policy must still be sent, and looks up the
// policy when it sends it. So the latest policy wins, a slow agent delays no other, and a
// stream's memory is bounded by the number of pods of its node.
//
// The answers of agents are kept in memory with their stream, and read with Server.Observe.
package push
