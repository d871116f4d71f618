package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ShardingConfig assigns the pods it selects to one shard, or, with spec.root,
// describes a set of shards that the manager derives from it.
//
// A member of a shard sees, on the resources listed in spec.limits, only the
// objects that the limit's selector matches. Its leader-election lock is held
// under the name `<leaderElectionName>---<name of this object>`.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=shard,categories=ctrlmesh
// +kubebuilder:printcolumn:name="Shards",type=integer,JSONPath=`.status.shards`
// +kubebuilder:printcolumn:name="Members",type=integer,JSONPath=`.status.members`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyMembers`
// +kubebuilder:printcolumn:name="Method",type=string,JSONPath=`.status.method`
// +kubebuilder:printcolumn:name="Handover",type=string,JSONPath=`.status.root.handover`
// +kubebuilder:printcolumn:name="Lock",type=string,JSONPath=`.status.lock`,priority=1
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ShardingConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ShardingConfigSpec `json:"spec"`
	// +optional
	Status ShardingConfigStatus `json:"status,omitempty"`
}

// ShardingConfigSpec is what a user asks of a shard.
//
// +kubebuilder:validation:XValidation:rule="has(self.root) || has(self.selector)",message="spec.selector is required: name the pods of this shard, or set spec.root"
// +kubebuilder:validation:XValidation:rule="has(self.root) || (has(self.limits) && size(self.limits) > 0) || (has(self.clientCertificates) && self.clientCertificates == 'Passthrough')",message="spec.limits is required: list at least one limit, the resources this shard divides and the selector of its part"
// +kubebuilder:validation:XValidation:rule="!has(self.root) || (has(self.root.resourceSelector) && size(self.root.resourceSelector) > 0) || (has(self.limits) && size(self.limits) > 0)",message="spec.root.resourceSelector is required: list the resources that the shards divide"
// +kubebuilder:validation:XValidation:rule="!has(self.clientCertificates) || self.clientCertificates != 'Passthrough' || !(has(self.root) || has(self.controller) || (has(self.limits) && size(self.limits) > 0))",message="spec.clientCertificates: Passthrough leaves requests unread, so nothing can be divided: remove spec.limits, spec.controller and spec.root, or choose Refuse"
// +kubebuilder:validation:XValidation:rule="has(self.root) == has(oldSelf.root)",message="whether spec.root is set is immutable: delete this ShardingConfig and create another"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.selector) || (has(self.selector) && self.selector == oldSelf.selector)",message="spec.selector is immutable: delete this ShardingConfig and create another"
type ShardingConfigSpec struct {
	// Selector names the pods of this shard, in this object's namespace. Immutable.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(has(self.matchLabels) && size(self.matchLabels) > 0) || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",message="must not be empty: an empty selector would take every pod of the namespace"
	Selector *metav1.LabelSelector `json:"selector,omitempty"`

	// Controller says how the operator elects its leader.
	// +optional
	Controller *ControllerConfig `json:"controller,omitempty"`

	// Webhook says where the operator serves its own webhooks. Accepted for
	// compatibility; webhook traffic is not routed by shard.
	// +optional
	Webhook *WebhookConfig `json:"webhook,omitempty"`

	// Limits divide resources: on each listed resource a member sees only what
	// the selector matches. All limits that name a resource apply together.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Limits []ObjectLimiter `json:"limits,omitempty"`

	// FailurePolicy says what becomes of the members' requests while no agent
	// serves on their node. Closed: they are refused, so that no member ever runs
	// unsharded. Open: they go to the apiserver direct and unsharded. A pod keeps
	// to Closed until it is created anew if it was created under Closed, because
	// it trusts the mesh alone.
	// +optional
	// +kubebuilder:default=Closed
	FailurePolicy FailurePolicy `json:"failurePolicy,omitempty"`

	// TokenBinding says whether a member may use service-account tokens that are
	// bound to other pods. Enforce: such requests are refused. Off: they pass.
	// Tokens that are bound to no pod pass either way.
	// +optional
	// +kubebuilder:default=Enforce
	TokenBinding TokenBinding `json:"tokenBinding,omitempty"`

	// ClientCertificates says what becomes of clients that authenticate with a
	// certificate, which cannot pass the proxy. Refuse: they are answered 401.
	// Passthrough: all connections of the selected pods to the apiserver are
	// tunnelled unread; only for a configuration that divides nothing.
	// +optional
	// +kubebuilder:default=Refuse
	ClientCertificates ClientCertificates `json:"clientCertificates,omitempty"`

	// Isolation says what becomes of a member's writes of single objects of the
	// divided resources that another shard owns: create, update, patch, delete and
	// subresources that write. Enforce: they are refused with 403. Observe: they pass
	// and are counted. Off: they pass. It also applies to the reads that reads: Own
	// refuses. Lists, watches and deletecollections are narrowed in any case.
	// +optional
	// +kubebuilder:default=Enforce
	Isolation Isolation `json:"isolation,omitempty"`

	// Reads says which single objects of the divided resources a member may read. All:
	// those of every shard. Own: its shard's, and others are refused with 403. Lists
	// and watches are narrowed in both cases, except those of one object by
	// metadata.name under All.
	// +optional
	// +kubebuilder:default=All
	Reads Reads `json:"reads,omitempty"`

	// DryRun evaluates every decision without enforcing it: nothing is narrowed or
	// refused, locks keep their names, and the members' requests are counted by what
	// would have been done (metric ctrlmesh_dry_run_requests_total).
	// +optional
	DryRun bool `json:"dryRun,omitempty"`

	// Fence says which writes count as foreign. Resources: those to the divided
	// resources. Namespace: those to any resource in a namespace that is not the
	// shard's, but for the operator's own namespace.
	// +optional
	// +kubebuilder:default=Resources
	Fence Fence `json:"fence,omitempty"`

	// Root makes this object a template from which shards are derived. A root
	// selects no pods itself.
	// +optional
	Root *RootConfig `json:"root,omitempty"`
}

// FailurePolicy says whether pods go to the apiserver direct while there is no agent.
//
// +kubebuilder:validation:Enum=Closed;Open
type FailurePolicy string

// Values of FailurePolicy.
const (
	FailClosed FailurePolicy = "Closed"
	FailOpen   FailurePolicy = "Open"
)

// TokenBinding says whether a token must be bound to the pod that uses it, if to any.
//
// +kubebuilder:validation:Enum=Enforce;Off
type TokenBinding string

// Values of TokenBinding.
const (
	TokenBindingEnforce TokenBinding = "Enforce"
	TokenBindingOff     TokenBinding = "Off"
)

// ClientCertificates says what becomes of clients that authenticate with a certificate.
//
// +kubebuilder:validation:Enum=Refuse;Passthrough
type ClientCertificates string

// Values of ClientCertificates.
const (
	ClientCertificatesRefuse      ClientCertificates = "Refuse"
	ClientCertificatesPassthrough ClientCertificates = "Passthrough"
)

// Reads says which single objects of the divided resources a member may read.
//
// +kubebuilder:validation:Enum=All;Own
type Reads string

// Values of Reads.
const (
	ReadsAll Reads = "All"
	ReadsOwn Reads = "Own"
)

// Isolation says what becomes of requests for objects of other shards.
//
// +kubebuilder:validation:Enum=Enforce;Observe;Off
type Isolation string

// Values of Isolation.
const (
	IsolationEnforce Isolation = "Enforce"
	IsolationObserve Isolation = "Observe"
	IsolationOff     Isolation = "Off"
)

// Fence says which writes can be foreign.
//
// +kubebuilder:validation:Enum=Resources;Namespace
type Fence string

// Values of Fence.
const (
	FenceResources Fence = "Resources"
	FenceNamespace Fence = "Namespace"
)

// ControllerConfig says how the operator elects its leader. If it names no lock, the
// mesh discovers the locks that members try to write.
type ControllerConfig struct {
	// LeaderElectionName is the name of the operator's lock (Lease, ConfigMap or
	// Endpoints) in this object's namespace. It is short for an entry of locks.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=189
	LeaderElectionName string `json:"leaderElectionName,omitempty"`
	// Locks are the operator's locks, in any namespace: many operators keep theirs
	// in kube-system, and some have several.
	// +optional
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=namespace
	// +listMapKey=name
	Locks []LockReference `json:"locks,omitempty"`
}

// LockReference names a leader-election lock: a Lease, ConfigMap or Endpoints.
type LockReference struct {
	// Namespace of the lock.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// Name of the lock.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=189
	Name string `json:"name"`
}

// WebhookConfig says where the operator serves its own webhooks.
type WebhookConfig struct {
	// CertDir is the directory of the webhook server's certificate.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	CertDir string `json:"certDir"`
	// Port is the webhook server's port.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
}

// ObjectLimiter names resources and the part of their objects that a shard owns.
type ObjectLimiter struct {
	// RelateResources are the resources to divide. At least one.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	RelateResources []ResourceGroup `json:"relateResources,omitempty"`

	// Selector is merged into the label selector of every list, watch and
	// deletecollection of those resources.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// ResourceGroup names resources of API groups.
type ResourceGroup struct {
	// APIGroups are group names, "" for the core group, or "*" alone for all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups"`
	// Resources are plural resource names, or "*" alone for all of groups that are
	// named, in a root whose method is not Labels and without a selector.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources"`
}

// RootConfig describes a set of shards to derive.
//
// +kubebuilder:validation:XValidation:rule="has(self.canary) || has(self.auto)",message="set spec.root.auto, spec.root.canary, or both"
// +kubebuilder:validation:XValidation:rule="has(self.targetStatefulSet) != has(self.targetRef)",message="name the operator's pods by one of spec.root.targetRef and spec.root.targetStatefulSet"
// +kubebuilder:validation:XValidation:rule="!has(self.key) || self.key != 'Object' || !has(self.canary)",message="spec.root.key: Object leaves no namespaces to give to a canary: remove spec.root.canary"
// +kubebuilder:validation:XValidation:rule="!has(self.key) || self.key != 'Object' || !has(self.method) || self.method != 'Labels'",message="spec.root.key: Object cannot be imposed by labels: choose another spec.root.method"
type RootConfig struct {
	// Disable withdraws the derived shards. Once none holds anything, members are
	// restarted one by one, and run unsharded then.
	// +optional
	Disable *bool `json:"disable,omitempty"`
	// Prefix of the derived objects' names.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	Prefix string `json:"prefix"`
	// TargetStatefulSet is the StatefulSet, in this namespace, whose pods are
	// assigned to the shards by ordinal. The same as targetRef with kind StatefulSet.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	TargetStatefulSet string `json:"targetStatefulSet,omitempty"`
	// TargetRef is the workload, in this namespace, whose pods are assigned to the
	// shards: those of a StatefulSet by ordinal, those of a Deployment each to the
	// shard that lacks most.
	// +optional
	TargetRef *TargetRef `json:"targetRef,omitempty"`
	// Canary takes the first pods for some namespaces or buckets.
	// +optional
	Canary *CanaryConfig `json:"canary,omitempty"`
	// Auto divides the rest evenly. Without it the rest is one shard, of all
	// other pods.
	// +optional
	Auto *AutoConfig `json:"auto,omitempty"`
	// ResourceSelector lists the resources that the shards divide. A selector there
	// holds for all shards.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ResourceSelector []ObjectLimiter `json:"resourceSelector,omitempty"`

	// Shared names objects of the divided resources that every shard reads, such as
	// configuration that all members need. Objects in the operator's own namespace
	// are shared for reading without being listed.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Shared []SharedObjects `json:"shared,omitempty"`

	// Key is what objects are assigned by. Namespace: all objects of a namespace
	// are one shard's, and cluster-scoped ones everybody's. Object: each object by
	// its uid.
	// +optional
	// +kubebuilder:default=Namespace
	Key Key `json:"key,omitempty"`
	// Method is how lists and watches are narrowed. ServerSide: by the apiserver's
	// shardSelector. Filter: by the proxy. Labels: by labels that are stamped on
	// all objects. Auto: ServerSide where the apiserver does it, else Filter.
	// +optional
	// +kubebuilder:default=Auto
	Method Method `json:"method,omitempty"`
	// OnChange says what becomes of members that still hold objects in their caches
	// which are another shard's now. Restart: they are evicted, one at a time.
	// Relist: their watches are answered 410, and they see such objects deleted.
	// +optional
	// +kubebuilder:default=Restart
	OnChange OnChange `json:"onChange,omitempty"`
}

// SharedObjects names objects of divided resources that every shard reads.
type SharedObjects struct {
	// APIGroups are group names, "" for the core group, or "*" alone for all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups"`
	// Resources are plural resource names, or "*" alone for all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources"`
	// Namespaces of the objects. Empty: all.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Namespaces []string `json:"namespaces,omitempty"`
	// Names of the objects. Empty: all.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`
	// Writes says who may write them. Owner: the shard that owns the key. Everyone:
	// every shard, so that the operator itself must avoid conflicts.
	// +optional
	// +kubebuilder:default=Owner
	Writes SharedWrites `json:"writes,omitempty"`
}

// SharedWrites says who may write shared objects.
//
// +kubebuilder:validation:Enum=Owner;Everyone
type SharedWrites string

// Values of SharedWrites.
const (
	SharedWritesOwner    SharedWrites = "Owner"
	SharedWritesEveryone SharedWrites = "Everyone"
)

// TargetRef names a workload.
type TargetRef struct {
	// APIVersion of the workload.
	// +optional
	// +kubebuilder:validation:Enum=apps/v1
	// +kubebuilder:default=apps/v1
	APIVersion string `json:"apiVersion,omitempty"`
	// Kind of the workload.
	// +kubebuilder:validation:Enum=StatefulSet;Deployment
	Kind string `json:"kind"`
	// Name of the workload.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}

// Key is what objects are assigned by.
//
// +kubebuilder:validation:Enum=Namespace;Object
type Key string

// Values of Key.
const (
	KeyNamespace Key = "Namespace"
	KeyObject    Key = "Object"
)

// Method is how lists and watches are narrowed.
//
// +kubebuilder:validation:Enum=Auto;ServerSide;Labels;Filter
type Method string

// Values of Method.
const (
	MethodAuto       Method = "Auto"
	MethodServerSide Method = "ServerSide"
	MethodLabels     Method = "Labels"
	MethodFilter     Method = "Filter"
)

// OnChange says what becomes of members that hold objects of others in their caches.
//
// +kubebuilder:validation:Enum=Restart;Relist
type OnChange string

// Values of OnChange.
const (
	OnChangeRestart OnChange = "Restart"
	OnChangeRelist  OnChange = "Relist"
)

// Rebalance says what becomes of shards whose weights have grown apart.
//
// +kubebuilder:validation:Enum=Off;Suggest;Automatic
type Rebalance string

// Values of Rebalance.
const (
	RebalanceOff       Rebalance = "Off"
	RebalanceSuggest   Rebalance = "Suggest"
	RebalanceAutomatic Rebalance = "Automatic"
)

// CanaryConfig is the shard that a new version is tried on.
//
// +kubebuilder:validation:XValidation:rule="(has(self.inNamespaces) && size(self.inNamespaces) > 0) || (has(self.inShardHash) && size(self.inShardHash) > 0)",message="list inNamespaces, inShardHash, or both"
type CanaryConfig struct {
	// Replicas is the number of pods, from ordinal 0, of the canary shard.
	// +kubebuilder:validation:Minimum=1
	Replicas *int32 `json:"replicas"`
	// InNamespaces are the namespaces that the canary owns.
	// +optional
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=63
	InNamespaces []string `json:"inNamespaces,omitempty"`
	// InShardHash are the buckets, 0 to 31, that the canary owns.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Pattern=`^([0-9]|[12][0-9]|3[01])$`
	InShardHash []string `json:"inShardHash,omitempty"`
}

// AutoConfig divides what the canary leaves into equal shards.
type AutoConfig struct {
	// ShardingSize is the number of shards.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	ShardingSize int32 `json:"shardingSize"`
	// EveryShardReplicas is the number of pods of each shard.
	// +kubebuilder:validation:Minimum=1
	EveryShardReplicas int32 `json:"everyShardReplicas"`
	// Rebalance says what happens when the weights of shards, the objects of the
	// divided resources in their namespaces, have grown apart: when the heaviest
	// shard has more than 1.25 times the mean. Automatic: namespaces are handed
	// over within a minute, one batch at a time. Under onChange Restart each
	// correction is one batch, evicts the pods of the shards that give, and the next
	// correction waits a minute, then two, up to an hour. Suggest: the status says
	// what Automatic would do. Off: nothing is weighed after the shards were created.
	// +optional
	// +kubebuilder:default=Automatic
	Rebalance Rebalance `json:"rebalance,omitempty"`
}

// Condition types of a ShardingConfig.
const (
	// ConditionReady: every member holds the current policy and is captured.
	ConditionReady = "Ready"
	// ConditionProgressing: members are still to receive a policy, or existing
	// objects are still being stamped.
	ConditionProgressing = "Progressing"
	// ConditionDegraded: something needs a user's hand; the message says what.
	ConditionDegraded = "Degraded"
	// ConditionLeaderMissing: a shard with ready members has had no leader for a
	// while; the message names the shard and what its pods wait for.
	ConditionLeaderMissing = "LeaderMissing"
)

// ShardingConfigStatus is what the mesh sees of a shard.
type ShardingConfigStatus struct {
	// ObservedGeneration is the generation of the spec this status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Conditions are Ready, Progressing, Degraded and LeaderMissing.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Shards is the number of shards of this object.
	// +optional
	Shards int32 `json:"shards,omitempty"`
	// Members is the number of pods selected.
	// +optional
	Members int32 `json:"members"`
	// ReadyMembers is the number of those captured and holding the current policy.
	// +optional
	ReadyMembers int32 `json:"readyMembers"`
	// Method is how lists and watches are narrowed: ServerSide, Labels or Filter, or
	// several where resources or nodes differ.
	// +optional
	Method string `json:"method,omitempty"`
	// Lock is the name under which this shard's lock is held.
	// +optional
	Lock string `json:"lock,omitempty"`
	// Held is what a derived shard holds, as in ShardStatus.
	// +optional
	// +listType=atomic
	Held []string `json:"held,omitempty"`
	// Pods tells of each member.
	// +optional
	// +listType=map
	// +listMapKey=name
	Pods []MemberStatus `json:"pods,omitempty"`
	// Stamping tells how far the labels of existing objects have come.
	// +optional
	Stamping *StampingStatus `json:"stamping,omitempty"`
	// Locks are the operator's locks, named and discovered.
	// +optional
	// +listType=map
	// +listMapKey=namespace
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	Locks []LockStatus `json:"locks,omitempty"`
	// Root tells of the derived shards.
	// +optional
	Root *RootStatus `json:"root,omitempty"`
}

// LockStatus describes one lock of the operator.
type LockStatus struct {
	// Namespace of the lock.
	Namespace string `json:"namespace"`
	// Name of the lock.
	Name string `json:"name"`
	// Resources that the lock is known to consist of: leases, configmaps or endpoints.
	// +optional
	// +listType=set
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources,omitempty"`
	// Discovered is true if the lock was seen in a member's requests and is not named
	// in spec.controller.
	// +optional
	Discovered bool `json:"discovered,omitempty"`
	// Holder is the identity that holds the lock outside the mesh; empty if none does.
	// +optional
	Holder string `json:"holder,omitempty"`
	// HeldByMesh is true while the manager holds the lock, so that no pod outside the
	// mesh can lead.
	// +optional
	HeldByMesh bool `json:"heldByMesh,omitempty"`
}

// MemberStatus tells of one member.
type MemberStatus struct {
	// Name of the pod.
	Name string `json:"name"`
	// Node the pod runs on.
	// +optional
	Node string `json:"node,omitempty"`
	// Capture is how the pod's traffic reaches the proxy: ebpf, iptables
	// or address; empty while it is not captured.
	// +optional
	Capture string `json:"capture,omitempty"`
	// PolicyVersion is the version of the policy that the pod's agent applies.
	// +optional
	PolicyVersion string `json:"policyVersion,omitempty"`
	// LockHolder is true while this pod holds the shard's lock.
	// +optional
	LockHolder bool `json:"lockHolder,omitempty"`
	// Message says what keeps the member from being ready.
	// +optional
	Message string `json:"message,omitempty"`
}

// StampingStatus tells how far the labels of existing objects have come.
type StampingStatus struct {
	// Done is true when every object that existed has been stamped.
	Done bool `json:"done"`
	// Resource being walked, as plural.group.
	// +optional
	Resource string `json:"resource,omitempty"`
	// Continue is where the walk of Resource resumes.
	// +optional
	Continue string `json:"continue,omitempty"`
	// Completed are the resources already walked.
	// +optional
	// +listType=set
	Completed []string `json:"completed,omitempty"`
	// Seen is the number of objects looked at.
	// +optional
	Seen int64 `json:"seen,omitempty"`
	// Stamped is the number of objects that needed the labels.
	// +optional
	Stamped int64 `json:"stamped,omitempty"`
	// Message tells of the last error.
	// +optional
	Message string `json:"message,omitempty"`
}

// RootStatus tells of the shards derived from a root. It is also where the
// manager keeps what it must not forget: who may own what, and who might still
// act on it. Written by anybody else, it may let two shards own one key.
type RootStatus struct {
	// ChildShardingConfigs are the names of the derived objects.
	// +optional
	ChildShardingConfigs []string `json:"childShardingConfigs,omitempty"`
	// Shards are the derived shards, by name.
	// +optional
	// +listType=map
	// +listMapKey=name
	Shards []ShardStatus `json:"shards,omitempty"`
	// MinSerial is the least serial of any policy of the root: agents were seen that
	// have had higher ones than the status accounted for.
	// +optional
	MinSerial int64 `json:"minSerial,omitempty"`
	// RolledBack: an agent has had a later serial than this status accounts for, as after
	// etcd was restored from a backup, so pods may own other keys than it says. All
	// members are in standby. The root starts anew once all of them have confirmed that.
	// +optional
	RolledBack bool `json:"rolledBack,omitempty"`
	// Assignments are the pods that were assigned to shards and may still run.
	// +optional
	// +listType=map
	// +listMapKey=uid
	Assignments []Assignment `json:"assignments,omitempty"`
	// Handovers are the moves of keys under way.
	// +optional
	Handovers []HandoverStatus `json:"handovers,omitempty"`
	// Handover says it all in one word: Settled, Releasing, Granting, Restarting,
	// Waiting or Blocked.
	// +optional
	Handover string `json:"handover,omitempty"`
	// Skew is the weight of the heaviest automatic shard over the mean, as "1.04".
	// +optional
	Skew string `json:"skew,omitempty"`
	// Suggestion says what rebalancing would do.
	// +optional
	Suggestion string `json:"suggestion,omitempty"`
	// Weighing says what keeps the manager from counting objects, and how to permit
	// it. Shards work without: namespaces weigh equally then.
	// +optional
	Weighing string `json:"weighing,omitempty"`
}

// ShardStatus tells of one derived shard.
type ShardStatus struct {
	// Name of the shard and of its ShardingConfig.
	Name string `json:"name"`
	// Serial grows whenever what the shard's members are told changes.
	Serial int64 `json:"serial"`
	// Held is what a member of the shard may be acting on: no two shards of a root
	// hold a key. Each entry is ranges of the key space (FNV-1a 64 of the
	// namespace's name) in hexadecimal, of all buckets or of some.
	// +optional
	// +listType=atomic
	Held []string `json:"held,omitempty"`
	// Target is what the shard is to hold. What it holds beyond is being released.
	// +optional
	// +listType=atomic
	Target []string `json:"target,omitempty"`
	// Wanted is the plan: what the shard is to hold once each shard that takes has a
	// ready pod.
	// +optional
	// +listType=atomic
	Wanted []string `json:"wanted,omitempty"`
	// Namespaces is the number of existing namespaces that the shard holds.
	// +optional
	Namespaces int32 `json:"namespaces"`
	// Weight is the number of objects in those, as last counted.
	// +optional
	Weight int64 `json:"weight,omitempty"`
	// Members is the number of the shard's pods.
	// +optional
	Members int32 `json:"members"`
	// ReadyMembers is the number of the shard's pods that are ready, captured and hold the
	// current policy.
	// +optional
	ReadyMembers int32 `json:"readyMembers"`
	// Leader is the pod that holds the shard's locks; empty if none does or the
	// operator has no lock.
	// +optional
	Leader string `json:"leader,omitempty"`
}

// Assignment is a pod's place in a shard, for its life.
type Assignment struct {
	// UID of the pod.
	UID string `json:"uid"`
	// Name of the pod.
	Name string `json:"name"`
	// Node the pod runs on.
	// +optional
	Node string `json:"node,omitempty"`
	// Shard the pod belongs to.
	Shard string `json:"shard"`
	// Serial of the shard since which the pod acts on nothing older.
	Serial int64 `json:"serial"`
	// Stale: the pod is to be restarted, for it holds objects of other shards in
	// its caches or belongs to another shard now.
	// +optional
	Stale bool `json:"stale,omitempty"`
}

// HandoverStatus tells of one move of keys.
type HandoverStatus struct {
	// From is the shard that gives; empty for keys that nobody held.
	// +optional
	From string `json:"from,omitempty"`
	// To is the shard that takes; empty for keys that nobody will hold.
	// +optional
	To string `json:"to,omitempty"`
	// Keys are what is moved, as in ShardStatus.
	// +optional
	// +listType=atomic
	Keys []string `json:"keys,omitempty"`
	// Phase is Releasing, until the giver's members act on it no more, or Granting,
	// until the taker's do.
	Phase string `json:"phase"`
	// Since is when the phase began.
	Since metav1.Time `json:"since"`
	// Began is when the move began.
	// +optional
	Began metav1.Time `json:"began,omitempty"`
	// WaitsFor names whom the phase waits for, and why.
	// +optional
	// +listType=atomic
	WaitsFor []string `json:"waitsFor,omitempty"`
}

// ShardingConfigList is a list of ShardingConfig.
//
// +kubebuilder:object:root=true
type ShardingConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []ShardingConfig `json:"items"`
}
