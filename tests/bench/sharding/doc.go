// Command sharding measures an operator in 1 to 5 shards: processor time, memory, latency and
// throughput. It measures the manager's memory with ten times the objects, and how evenly a
// root divides a thousand namespaces. It prints tables and fails if a limit is exceeded.
//
// It does not delete its many objects, so run it on a cluster of its own: see sharding.sh.
package main
