// Package controllers is the common part of the manager's controllers.
//
// Each controller is one function that reconciles. It runs on the leader, on a workqueue: when a
// source that it reads has changed, when it has failed, and at regular intervals. Controllers do
// not call each other. They share State, of which each field has one writer:
//
//	policy      State.Cluster, Listed, Compiled: the policies that were pushed last
//	root        which keys each shard owns, in package roots
//	lock        the holders of the operators' locks, in package locks
//	share       State.Book: the shares of rules of scope Workload
//	traffic     the statuses of CircuitBreakers and FaultInjections
//	status      the statuses of ShardingConfigs
//	certificate the CAs and the manager's own certificate, in package trust
//	bundle      State.MeshBundle, EgressBundle: the CAs that all namespaces have; MissingBundles: those that refuse them
//	stamp       which objects are labelled at admission, by a policy or a webhook
//	entry       State.Entries: what puts the pods of VirtualApps on the mesh
//	webhook     how agents route the reviews of admission
//	failover    the locks of leaders that exited
//	usage       the records of what operators request while their requests pass unchanged
//	node        the abilities of the nodes
//	endpoint    the address of the leader
//	address     State.Additional: where clients reach the apiserver beside its Service
//	setting     State.Settings: the administrator's settings
package controllers
