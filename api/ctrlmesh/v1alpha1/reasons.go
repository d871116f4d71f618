package v1alpha1

// Reason is the reason of a condition. docs/operations.md documents each.
type Reason string

// Reasons of the conditions of all kinds.
const (
	// ReasonInvalid: the spec contradicts itself; the message says how.
	ReasonInvalid Reason = "Invalid"
	// ReasonDisabled: the object says so, or is being deleted.
	ReasonDisabled Reason = "Disabled"
	// ReasonNotAdmitted: a pod was created while the mesh did not admit pods.
	ReasonNotAdmitted Reason = "NotAdmitted"
	// ReasonNotCaptured: the agent cannot capture a pod.
	ReasonNotCaptured Reason = "NotCaptured"
	// ReasonAgentAway: no agent of a pod's node is connected to the manager.
	ReasonAgentAway Reason = "AgentAway"
)

// Reasons of the conditions of ShardingConfigs.
const (
	// ReasonAllReady: all members are captured and hold the current policy.
	ReasonAllReady Reason = "AllMembersReady"
	// ReasonSettled: nothing is under way, and each shard of a root owns what it is to own.
	ReasonSettled Reason = "Settled"
	// ReasonHealthy: nothing is degraded.
	ReasonHealthy Reason = "Healthy"
	// ReasonNoMembers: no pod has the label and matches the selector.
	ReasonNoMembers Reason = "NoMembers"
	// ReasonStarting: members start, or their agents have not confirmed the policy yet.
	ReasonStarting Reason = "MembersStarting"
	// ReasonStamping: existing objects are being labelled.
	ReasonStamping Reason = "Stamping"
	// ReasonStampingProblems: the manager may not label the objects of a kind.
	ReasonStampingProblems Reason = "StampingProblems"
	// ReasonWebhookNotRouted: the agent of a pod cannot route the reviews that arrive there.
	ReasonWebhookNotRouted Reason = "WebhookNotRouted"
	// ReasonConflict: two configurations select one pod.
	ReasonConflict Reason = "Conflict"
	// ReasonPolicyRejected: an agent could not apply a policy.
	ReasonPolicyRejected Reason = "PolicyRejected"
	// ReasonPolicyTooLarge: a pod's policy exceeds what an agent receives.
	ReasonPolicyTooLarge Reason = "PolicyTooLarge"
	// ReasonOlderThanConfig: a pod trusts the cluster's CA and was created before
	// failurePolicy Closed.
	ReasonOlderThanConfig Reason = "OlderThanConfig"
	// ReasonTrustsMeshAlone: a pod trusts the mesh's CA alone, so it can neither fail open
	// nor be passed through.
	ReasonTrustsMeshAlone Reason = "TrustsMeshAlone"
	// ReasonCannotFailOpen: a pod under failurePolicy Open is captured in a mode that cannot
	// fail open.
	ReasonCannotFailOpen Reason = "CannotFailOpen"
	// ReasonCannotPass: a pod that is to be passed through is captured by address.
	ReasonCannotPass Reason = "CannotPassThrough"
	// ReasonNoLeader: the pods of a shard are ready, and none leads.
	ReasonNoLeader Reason = "NoLeader"
	// ReasonNoReadyMember: a shard owns keys and has no ready pod.
	ReasonNoReadyMember Reason = "NoReadyMember"
	// ReasonLed: each shard has a leader, or needs none.
	ReasonLed Reason = "Led"
	// ReasonHeldOutside: a pod outside the mesh holds the operator's lock, and the
	// members are in standby.
	ReasonHeldOutside Reason = "HeldOutside"
	// ReasonUnknownLock: members contend for a lock that the mesh does not manage.
	ReasonUnknownLock Reason = "UnknownLock"
	// ReasonLockForbidden: the operator may not update the locks of its shards.
	ReasonLockForbidden Reason = "LockForbidden"
	// ReasonOutsidePods: the operator has no lock, and pods of its workload outside
	// the mesh may act.
	ReasonOutsidePods Reason = "OutsidePods"
)

// Reasons of the conditions of ShardingConfigs with spec.root.
const (
	// ReasonHandingOver: keys go from one shard to another.
	ReasonHandingOver Reason = "HandingOver"
	// ReasonBlocked: a handover has waited for long.
	ReasonBlocked Reason = "Blocked"
	// ReasonRestarting: members with foreign objects in their caches are evicted.
	ReasonRestarting Reason = "Restarting"
	// ReasonWaiting: no shard owns anything yet.
	ReasonWaiting Reason = "Waiting"
	// ReasonSpecChanged: the spec changes what decides who may act. The shards release
	// everything first.
	ReasonSpecChanged Reason = "SpecChanged"
	// ReasonUnknownResource: the apiserver serves no resource of a name in the spec.
	ReasonUnknownResource Reason = "UnknownResource"
	// ReasonUnknownShard: no root has the shard that a shadow names.
	ReasonUnknownShard Reason = "UnknownShard"
	// ReasonRolledBack: the status is older than what agents were sent, as after a restore
	// of etcd, and the root starts over.
	ReasonRolledBack Reason = "RolledBack"
	// ReasonNotEnoughPods: the workload has fewer pods than the shards need.
	ReasonNotEnoughPods Reason = "NotEnoughPods"
	// ReasonReplicasSurplus: the workload has more pods than the shards need.
	ReasonReplicasSurplus Reason = "ReplicasSurplus"
	// ReasonTargetNotFound: no pod of the workload has the label.
	ReasonTargetNotFound Reason = "TargetNotFound"
	// ReasonWithdrawing: the root is disabled or being deleted, and pods still act on shards.
	ReasonWithdrawing Reason = "Withdrawing"
	// ReasonDivided: no two shards are known to write the same objects.
	ReasonDivided Reason = "Divided"
	// ReasonUndividedWrites: several shards write a resource in the same namespaces, and the
	// root does not divide it.
	ReasonUndividedWrites Reason = "UndividedWrites"
	// ReasonUndividedWatches: several shards write a resource that they watch in all
	// namespaces, and the root does not divide it.
	ReasonUndividedWatches Reason = "UndividedWatches"
	// ReasonMeshCANotTrusted: a client in a member does not trust the mesh's CA.
	ReasonMeshCANotTrusted Reason = "MeshCANotTrusted"
	// ReasonBundleRefused: the mesh's CAs cannot be written into the namespace.
	ReasonBundleRefused Reason = "BundleRefused"
	// ReasonReplacingPods: pods are replaced by those of a new revision, shard by shard.
	ReasonReplacingPods Reason = "ReplacingPods"
	// ReasonRolloutHalted: pods of a shard do not serve under a new revision.
	ReasonRolloutHalted Reason = "RolloutHalted"
	// ReasonRolloutBlocked: a StatefulSet does not let the mesh replace its pods in order.
	ReasonRolloutBlocked Reason = "RolloutBlocked"
	// ReasonNoWrites: a shard never writes, while others do.
	ReasonNoWrites Reason = "NoWrites"
)

// Reasons of the conditions of CircuitBreakers and FaultInjections.
const (
	// ReasonInForce: the rules apply to all selected pods.
	ReasonInForce Reason = "InForce"
	// ReasonNoPods: no pod has the label and matches the selector.
	ReasonNoPods Reason = "NoPods"
	// ReasonRollingOut: the rules, or the pods, are starting.
	ReasonRollingOut Reason = "Starting"
	// ReasonPending: the end of a FaultInjection is still to be written to its status.
	ReasonPending Reason = "Pending"
	// ReasonExpired: the duration of a FaultInjection has passed.
	ReasonExpired Reason = "Expired"
	// ReasonForbidden: the namespace forbids faults.
	ReasonForbidden Reason = "Forbidden"
	// ReasonNoEffect: no part of the object applies to some pods.
	ReasonNoEffect Reason = "NoEffect"
	// ReasonNotRedirected: connections to other hosts are not redirected.
	ReasonNotRedirected Reason = "NotRedirected"
	// ReasonAgentTooOld: an agent does not support such rules.
	ReasonAgentTooOld Reason = "AgentTooOld"
	// ReasonRulesRejected: an agent could not apply the rules.
	ReasonRulesRejected Reason = "RulesRejected"
	// ReasonTooManyShares: a rule of scope Workload has more pods than the status records.
	ReasonTooManyShares Reason = "TooManyShares"
)

// EarlierInForce is in the message of Ready while an agent has not confirmed that no rule of a
// CircuitBreaker or FaultInjection applies any more.
const EarlierInForce = "earlier rules may still be in force"

// Permanent reports whether a configuration that is not ready for this reason does not become ready by itself.
func (r Reason) Permanent() bool {
	switch r {
	case ReasonUnknownResource, ReasonUnknownShard, ReasonUnknownLock, ReasonLockForbidden:
		return true
	}
	return false
}
