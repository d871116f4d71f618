// Package controllers is what the controllers of the manager have in common.
//
// Each controller is one function that makes the world as it should be. It runs as the
// leader, on a workqueue: when a source that it reads has changed, when it failed, and
// every so often. Controllers do not know each other. What one finds out, others read
// from State, of which each field has one writer:
//
//	policy      State.Cluster, Listed, Compiled: the policies that were pushed last
//	root        which keys each shard owns, in package roots
//	lock        who holds the operators' locks, in package locks
//	share       State.Book: the shares of rules of scope Workload
//	traffic     the statuses of CircuitBreakers and FaultInjections
//	status      the statuses of ShardingConfigs
//	certificate the CAs and the manager's own certificate, in package trust
//	bundle      State.MeshBundle, EgressBundle: the CAs that all namespaces have
//	stamp       the rules of the stamping webhook
//	failover    the locks of leaders that exited
//	node        what the nodes can do
//	endpoint    the address of the leader
//	setting     State.Settings: the administrator's
package controllers
