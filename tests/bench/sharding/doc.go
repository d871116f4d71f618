// Command sharding measures what an operator costs in 1 to 5 shards, in processor
// time, memory and latency, and how much more it gets done; what the manager's
// memory does when there are ten times the objects; and how evenly a root divides
// a thousand namespaces. It prints tables and fails if a limit does not hold.
//
// It makes more than it would like to clear away, so it wants a cluster of its own:
// see sharding.sh.
package main
