package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// ShardingConfig assigns the selected pods to one shard. With spec.root, the manager derives
// a set of shards from it. It is translated to a ShardingConfig of ctrlmesh.kusionstack.io.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=kshard,categories=ctrlmesh
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

	// Spec is the desired state.
	Spec ShardingConfigSpec `json:"spec"`
	// Status is the observed state.
	// +optional
	Status v1alpha1.ShardingConfigStatus `json:"status,omitempty"`
}

// ShardingConfigSpec is the desired state of a shard, or of the shards of a root.
//
// +kubebuilder:validation:XValidation:rule="has(self.root) || has(self.selector)",message="spec.selector is required: name the pods of this shard, or set spec.root"
// +kubebuilder:validation:XValidation:rule="has(self.root) || (has(self.limits) && size(self.limits) > 0)",message="spec.limits is required: list at least one limit, the resources this shard divides and the selector of its part"
// +kubebuilder:validation:XValidation:rule="has(self.root) == has(oldSelf.root)",message="whether spec.root is set is immutable: delete this ShardingConfig and create another"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.selector) || (has(self.selector) && self.selector == oldSelf.selector)",message="spec.selector is immutable: delete this ShardingConfig and create another"
type ShardingConfigSpec struct {
	// Selector selects the pods of this shard in this object's namespace. Immutable.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(has(self.matchLabels) && size(self.matchLabels) > 0) || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",message="must not be empty: an empty selector would take every pod of the namespace"
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
	// Controller configures the leader election of the operator. Without it, the mesh
	// discovers the locks that members try to acquire.
	// +optional
	Controller *ControllerConfiguration `json:"controller,omitempty"`
	// Webhook is where the operator serves its own webhooks.
	// +optional
	Webhook *WebhookConfiguration `json:"webhook,omitempty"`
	// Limits divide resources: lists and watches of a listed resource contain only the
	// objects that the selector matches.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Limits []ObjectLimiter `json:"limits,omitempty"`
	// Root makes this object a sharding root, from which the manager derives shards.
	// +optional
	Root *RootConfig `json:"root,omitempty"`
}

// ControllerConfiguration names the operator's lock in one of two spellings.
//
// +kubebuilder:validation:XValidation:rule="!(has(self.leaderElectionName) && has(self.leaderElection))",message="leaderElectionName and leaderElection.lockName both name the lock: set one of them"
type ControllerConfiguration struct {
	// LeaderElectionName is the name of the operator's lock (Lease, ConfigMap or Endpoints)
	// in this object's namespace.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=189
	LeaderElectionName string `json:"leaderElectionName,omitempty"`
	// LeaderElection is another spelling of leaderElectionName.
	// +optional
	LeaderElection *LeaderElection `json:"leaderElection,omitempty"`
}

// LeaderElection names the operator's lock.
type LeaderElection struct {
	// LockName is the name of the operator's lock (Lease, ConfigMap or Endpoints) in this
	// object's namespace.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=189
	LockName string `json:"lockName"`
}

// WebhookConfiguration is where the operator serves its own webhooks.
type WebhookConfiguration struct {
	// CertDir is the directory of the webhook server's certificate.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	CertDir string `json:"certDir"`
	// Port is the webhook server's port.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
}

// ObjectLimiter lists resources and selects the objects of them that a shard owns, directly
// or within objectSelector.
//
// +kubebuilder:validation:XValidation:rule="!has(self.objectSelector) || !(has(self.relateResources) || has(self.selector))",message="write relateResources and selector both within objectSelector, or both outside it"
type ObjectLimiter struct {
	// ObjectSelector contains relateResources and selector, as in early versions of Kridge.
	// +optional
	ObjectSelector *ObjectSelector `json:"objectSelector,omitempty"`

	// RelateResources are the resources to divide, at least one.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	RelateResources []ResourceGroup `json:"relateResources,omitempty"`
	// Selector selects the objects of those resources by their labels.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// ObjectSelector lists resources and selects objects of them.
type ObjectSelector struct {
	// RelateResources are the resources to divide, at least one.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	RelateResources []ResourceGroup `json:"relateResources,omitempty"`
	// Selector selects the objects of those resources by their labels.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// ResourceGroup lists resources of API groups.
type ResourceGroup struct {
	// APIGroups are the names of API groups. "" is the core group, "*" alone is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups"`
	// Resources are plural resource names.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources"`
}

// RootConfig describes the shards that are derived from a root.
//
// +kubebuilder:validation:XValidation:rule="has(self.canary) || has(self.auto)",message="set spec.root.auto, spec.root.canary, or both"
type RootConfig struct {
	// Disable withdraws the shards: all members run unsharded.
	// +optional
	Disable *bool `json:"disable,omitempty"`
	// Prefix of the names of the shards.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: delete this ShardingConfig and create another"
	Prefix string `json:"prefix"`
	// TargetStatefulSet is the StatefulSet in this namespace whose pods are assigned to the
	// shards by ordinal.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: delete this ShardingConfig and create another"
	TargetStatefulSet string `json:"targetStatefulSet"`
	// Canary is a shard of the first pods that owns some namespaces or buckets.
	// +optional
	Canary *CanaryConfig `json:"canary,omitempty"`
	// Auto divides all other namespaces evenly.
	// +optional
	Auto *AutoConfig `json:"auto,omitempty"`
	// ResourceSelector lists the resources that the shards divide.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ResourceSelector []ObjectLimiter `json:"resourceSelector,omitempty"`
}

// CanaryConfig is a shard on which a new version is tested.
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
	// InShardHash are the buckets, 0 to 31, that the canary owns besides inNamespaces.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Pattern=`^([0-9]|[12][0-9]|3[01])$`
	InShardHash []string `json:"inShardHash,omitempty"`
}

// AutoConfig divides all namespaces that the canary does not own.
type AutoConfig struct {
	// ShardingSize is the number of shards.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	ShardingSize int32 `json:"shardingSize"`
	// EveryShardReplicas is the number of pods of each shard.
	// +kubebuilder:validation:Minimum=1
	EveryShardReplicas int32 `json:"everyShardReplicas"`
}

// ShardingConfigList is a list of ShardingConfigs.
//
// +kubebuilder:object:root=true
type ShardingConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []ShardingConfig `json:"items"`
}
