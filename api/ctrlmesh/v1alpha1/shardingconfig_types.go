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
	// Passthrough: all connections of the selected pods are tunnelled to the
	// apiserver unread; only for a configuration that divides nothing.
	// +optional
	// +kubebuilder:default=Refuse
	ClientCertificates ClientCertificates `json:"clientCertificates,omitempty"`

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

// ControllerConfig says how the operator elects its leader.
type ControllerConfig struct {
	// LeaderElectionName is the name of the operator's lock (Lease, ConfigMap or
	// Endpoints) in this object's namespace.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=189
	LeaderElectionName string `json:"leaderElectionName"`
}

// WebhookConfig says where the operator serves its own webhooks.
type WebhookConfig struct {
	// CertDir is the directory of the webhook server's certificate.
	// +kubebuilder:validation:MinLength=1
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
	APIGroups []string `json:"apiGroups"`
	// Resources are plural resource names.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Resources []string `json:"resources"`
}

// RootConfig describes a set of shards to derive.
//
// +kubebuilder:validation:XValidation:rule="has(self.canary) || has(self.auto)",message="set spec.root.auto, spec.root.canary, or both"
type RootConfig struct {
	// Disable withdraws the derived shards.
	// +optional
	Disable *bool `json:"disable,omitempty"`
	// Prefix of the derived objects' names.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	Prefix string `json:"prefix"`
	// TargetStatefulSet is the StatefulSet, in this namespace, whose pods are
	// assigned to the shards by ordinal.
	// +kubebuilder:validation:MinLength=1
	TargetStatefulSet string `json:"targetStatefulSet"`
	// Canary takes the first pods for some namespaces or buckets.
	// +optional
	Canary *CanaryConfig `json:"canary,omitempty"`
	// Auto divides the rest evenly.
	// +optional
	Auto *AutoConfig `json:"auto,omitempty"`
	// ResourceSelector lists the resources that the shards divide.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ResourceSelector []ObjectLimiter `json:"resourceSelector,omitempty"`
}

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
)

// ShardingConfigStatus is what the mesh sees of a shard.
type ShardingConfigStatus struct {
	// ObservedGeneration is the generation of the spec this status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Conditions are Ready, Progressing and Degraded.
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
	// Method is how the scope is imposed: Labels.
	// +optional
	Method string `json:"method,omitempty"`
	// Lock is the name under which this shard's lock is held.
	// +optional
	Lock string `json:"lock,omitempty"`
	// Pods tells of each member.
	// +optional
	// +listType=map
	// +listMapKey=name
	Pods []MemberStatus `json:"pods,omitempty"`
	// Stamping tells how far the labels of existing objects have come.
	// +optional
	Stamping *StampingStatus `json:"stamping,omitempty"`
	// Root tells of the derived shards.
	// +optional
	Root *RootStatus `json:"root,omitempty"`
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

// RootStatus tells of the shards derived from a root.
type RootStatus struct {
	// ChildShardingConfigs are the names of the derived objects.
	// +optional
	ChildShardingConfigs []string `json:"childShardingConfigs,omitempty"`
}

// ShardingConfigList is a list of ShardingConfig.
//
// +kubebuilder:object:root=true
type ShardingConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []ShardingConfig `json:"items"`
}
