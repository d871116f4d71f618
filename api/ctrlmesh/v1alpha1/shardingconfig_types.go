package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ShardingConfig assigns the selected pods to one shard. With spec.root, the manager derives
// a set of shards from it.
//
// Lists and watches of a member contain only those objects of the divided resources that
// its shard owns. The members lead under a lock of their shard, with the name
// `<leaderElectionName>---<name of the shard>`.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.root.auto.shardingSize,statuspath=.status.shards,selectorpath=.status.selector
// +kubebuilder:resource:scope=Namespaced,shortName=shard,categories=ctrlmesh
// +kubebuilder:printcolumn:name="Shards",type=integer,JSONPath=`.status.shards`
// +kubebuilder:printcolumn:name="Members",type=integer,JSONPath=`.status.members`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyMembers`
// +kubebuilder:printcolumn:name="Method",type=string,JSONPath=`.status.method`
// +kubebuilder:printcolumn:name="Handover",type=string,JSONPath=`.status.root.handover`
// +kubebuilder:printcolumn:name="Rollout",type=string,JSONPath=`.status.root.rollout.phase`,priority=1
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
	Status ShardingConfigStatus `json:"status,omitempty"`
}

// ShardingConfigSpec is the desired state of a shard, or of the shards of a root.
//
// +kubebuilder:validation:XValidation:rule="has(self.root) || has(self.selector)",message="spec.selector is required: name the pods of this shard, or set spec.root"
// +kubebuilder:validation:XValidation:rule="has(self.root) || has(self.shadow) || (has(self.limits) && size(self.limits) > 0) || (has(self.clientCertificates) && self.clientCertificates == 'Passthrough')",message="spec.limits is required: list at least one limit, the resources this shard divides and the selector of its part"
// +kubebuilder:validation:XValidation:rule="!has(self.root) || (has(self.root.resourceSelector) && size(self.root.resourceSelector) > 0) || (has(self.limits) && size(self.limits) > 0)",message="spec.root.resourceSelector is required: list the resources that the shards divide"
// +kubebuilder:validation:XValidation:rule="!has(self.clientCertificates) || self.clientCertificates != 'Passthrough' || !(has(self.root) || has(self.controller) || has(self.userAgent) || (has(self.limits) && size(self.limits) > 0))",message="spec.clientCertificates: Passthrough leaves requests unread, so that they can be neither divided nor changed: remove spec.limits, spec.controller, spec.root and spec.userAgent, or choose Refuse"
// +kubebuilder:validation:XValidation:rule="!has(self.root) || !has(self.root.key) || self.root.key != 'Cluster' || (has(self.clusters) && size(self.clusters) > 0)",message="spec.root.key: Cluster requires spec.clusters: list the paths at which the apiserver passes requests on to member clusters"
// +kubebuilder:validation:XValidation:rule="!has(self.clusters) || size(self.clusters) == 0 || (has(self.root) && (!has(self.root.key) || self.root.key != 'Object'))",message="spec.clusters requires spec.root.key: Namespace or Cluster: otherwise every shard would act in every member cluster"
// +kubebuilder:validation:XValidation:rule="!has(self.clusters) || size(self.clusters) == 0 || !has(self.root) || !has(self.root.method) || self.root.method != 'Labels'",message="spec.clusters: nothing labels the objects of member clusters: choose spec.root.method Auto, ServerSide or Filter"
// +kubebuilder:validation:XValidation:rule="!has(self.root) || !has(self.root.key) || self.root.key != 'Cluster' || !has(self.webhook)",message="spec.webhook routes reviews by namespace or uid: remove it, or choose another spec.root.key"
// +kubebuilder:validation:XValidation:rule="!has(self.root) || !has(self.root.key) || self.root.key != 'Cluster' || !has(self.fence) || self.fence != 'Namespace'",message="spec.root.key: Cluster leaves no namespaces to fence: choose spec.fence Resources"
// +kubebuilder:validation:XValidation:rule="!has(self.shadow) || !(has(self.root) || has(self.webhook) || (has(self.dryRun) && self.dryRun))",message="spec.shadow excludes spec.root, spec.webhook and spec.dryRun: remove them"
// +kubebuilder:validation:XValidation:rule="!has(self.shadow) || ((!has(self.failurePolicy) || self.failurePolicy == 'Closed') && (!has(self.clientCertificates) || self.clientCertificates == 'Refuse'))",message="spec.shadow requires that all requests are seen: set failurePolicy to Closed and clientCertificates to Refuse"
// +kubebuilder:validation:XValidation:rule="!has(self.shadow) || !has(self.shadow.of) || !(has(self.controller) || (has(self.limits) && size(self.limits) > 0))",message="spec.shadow.of takes limits and locks from the shard: remove spec.limits and spec.controller"
// +kubebuilder:validation:XValidation:rule="has(self.shadow) == has(oldSelf.shadow)",message="whether spec.shadow is set is immutable: delete this ShardingConfig and create another"
// +kubebuilder:validation:XValidation:rule="has(self.root) == has(oldSelf.root)",message="whether spec.root is set is immutable: delete this ShardingConfig and create another"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.selector) || (has(self.selector) && self.selector == oldSelf.selector)",message="spec.selector is immutable: delete this ShardingConfig and create another"
type ShardingConfigSpec struct {
	// Selector selects the pods of this shard in this object's namespace. Immutable.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(has(self.matchLabels) && size(self.matchLabels) > 0) || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",message="must not be empty: an empty selector would take every pod of the namespace"
	Selector *metav1.LabelSelector `json:"selector,omitempty"`

	// Controller configures the leader election of the operator.
	// +optional
	Controller *ControllerConfig `json:"controller,omitempty"`

	// Webhook is where the operator serves its own webhooks. With it, an admission review
	// about a namespace reaches the shard that owns the namespace.
	// +optional
	Webhook *WebhookConfig `json:"webhook,omitempty"`

	// Limits divide resources: lists and watches of a listed resource contain only the
	// objects that the selector matches. All limits that list a resource apply together.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Limits []ObjectLimiter `json:"limits,omitempty"`

	// Clusters are the paths at which the apiserver passes requests on to other clusters, such
	// as those of Karmada. Requests there are understood as requests in that cluster, by rules of
	// CircuitBreakers and FaultInjections, too. It requires spec.root.key: Namespace or Cluster.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=pathPrefix
	Clusters []ClusterPath `json:"clusters,omitempty"`

	// FailurePolicy is what happens to the members' requests while no agent serves their
	// node. Closed: they fail, so that no member ever runs unsharded. Open: they go directly
	// to the apiserver, unsharded. A pod that was created under Closed trusts the mesh's CA
	// alone, so it cannot fail open before it is replaced.
	// +optional
	// +kubebuilder:default=Closed
	FailurePolicy FailurePolicy `json:"failurePolicy,omitempty"`

	// TokenBinding is whether a member may use service-account tokens that are bound to
	// other pods. Enforce: such requests are refused. Off: they pass. Tokens that are bound
	// to no pod always pass.
	// +optional
	// +kubebuilder:default=Enforce
	TokenBinding TokenBinding `json:"tokenBinding,omitempty"`

	// ClientCertificates is what happens to clients that authenticate with a certificate,
	// which the proxy cannot forward. Refuse: they get 401. Passthrough: all connections of
	// the selected pods to the apiserver are forwarded without decryption. Passthrough
	// requires a configuration that divides nothing.
	// +optional
	// +kubebuilder:default=Refuse
	ClientCertificates ClientCertificates `json:"clientCertificates,omitempty"`

	// Isolation is what happens to a member's writes to objects of the divided resources
	// that another shard owns: create, update, patch, delete and subresources that write.
	// Enforce: they are refused with 403. Observe: they pass and are counted. Off: they
	// pass. It also applies to the reads that reads: Own refuses. Lists, watches and
	// deletecollections are always narrowed.
	// +optional
	// +kubebuilder:default=Enforce
	Isolation Isolation `json:"isolation,omitempty"`

	// Reads is which single objects of the divided resources a member may get. All: those of
	// every shard. Own: those of its own shard; others are refused with 403. Lists and
	// watches are narrowed in both cases. Under All, lists and watches of one object by
	// metadata.name are not.
	// +optional
	// +kubebuilder:default=All
	Reads Reads `json:"reads,omitempty"`

	// DryRun evaluates every decision without enforcing it: nothing is narrowed or refused,
	// and locks keep their names. The metric ctrlmesh_dry_run_requests_total counts the
	// requests that would have been narrowed, refused or renamed.
	// +optional
	DryRun bool `json:"dryRun,omitempty"`

	// Shadow makes the selected pods a shadow: a new version of the operator that reads like any
	// shard and leads under a lock of its own, but whose writes are dry runs, of which the
	// apiserver stores nothing. The status says which of them others have made, too. Whether
	// it is set is immutable.
	// +optional
	Shadow *Shadow `json:"shadow,omitempty"`

	// Fence is which writes isolation applies to. Resources: writes to the divided resources.
	// Namespace: writes to any resource in namespaces of other shards, except the operator's
	// own namespace.
	// +optional
	// +kubebuilder:default=Resources
	Fence Fence `json:"fence,omitempty"`

	// UserAgent changes the User-Agent of the members' requests to the apiserver. Rules of
	// CircuitBreakers and FaultInjections match that of the client.
	// +optional
	UserAgent *UserAgent `json:"userAgent,omitempty"`

	// Root makes this object a sharding root, from which the manager derives shards. A root
	// selects no pods itself.
	// +optional
	Root *RootConfig `json:"root,omitempty"`
}

// Shadow is how the writes of a shadow are compared with what others write.
type Shadow struct {
	// Of is the name of a shard of a root in the namespace: the shadow sees the objects of that
	// shard, and its writes of other objects are refused as those of the shard are. All that says
	// how requests are divided is then that of the root, the locks included, and spec.limits and
	// spec.controller must be empty.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Of string `json:"of,omitempty"`
	// Window is how long others have for the same change, before the write of the shadow counts
	// as a difference: from 1s to 5m.
	// +optional
	// +kubebuilder:default="30s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('5m')",message="must be from 1s to 5m, such as 30s"
	Window Duration `json:"window,omitempty"`
	// IgnoredFields are the paths of fields that are not compared, with all fields below them.
	// "[]" stands for each item of a list: "status.conditions[].message".
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	IgnoredFields []string `json:"ignoredFields,omitempty"`
}

// ClusterPath is a path at which the apiserver passes requests on to other clusters.
type ClusterPath struct {
	// PathPrefix is the path before that of the request in the other cluster. One of its
	// segments is "*", which stands for the name of the cluster:
	// "/apis/cluster.karmada.io/v1alpha1/clusters/*/proxy".
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:Pattern=`^(/[A-Za-z0-9._~-]+)+/\*(/[A-Za-z0-9._~-]+)*$`
	PathPrefix string `json:"pathPrefix"`
}

// UserAgent is a change of the User-Agent of requests.
//
// +kubebuilder:validation:XValidation:rule="has(self.value) != has(self.prefix)",message="set one of value and prefix"
type UserAgent struct {
	// Value replaces the User-Agent.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[!-~]([ -~]*[!-~])?$`
	Value string `json:"value,omitempty"`
	// Prefix is put before the User-Agent.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[!-~][ -~]*$`
	Prefix string `json:"prefix,omitempty"`
}

// FailurePolicy is what happens to requests of members while no agent serves their node.
//
// +kubebuilder:validation:Enum=Closed;Open
type FailurePolicy string

// Values of FailurePolicy.
const (
	FailClosed FailurePolicy = "Closed"
	FailOpen   FailurePolicy = "Open"
)

// TokenBinding is whether a token that is bound to a pod must be bound to its user.
//
// +kubebuilder:validation:Enum=Enforce;Off
type TokenBinding string

// Values of TokenBinding.
const (
	TokenBindingEnforce TokenBinding = "Enforce"
	TokenBindingOff     TokenBinding = "Off"
)

// ClientCertificates is what happens to clients that authenticate with a certificate.
//
// +kubebuilder:validation:Enum=Refuse;Passthrough
type ClientCertificates string

// Values of ClientCertificates.
const (
	ClientCertificatesRefuse      ClientCertificates = "Refuse"
	ClientCertificatesPassthrough ClientCertificates = "Passthrough"
)

// Reads is which single objects of the divided resources a member may get.
//
// +kubebuilder:validation:Enum=All;Own
type Reads string

// Values of Reads.
const (
	ReadsAll Reads = "All"
	ReadsOwn Reads = "Own"
)

// Isolation is what happens to writes to objects of other shards.
//
// +kubebuilder:validation:Enum=Enforce;Observe;Off
type Isolation string

// Values of Isolation.
const (
	IsolationEnforce Isolation = "Enforce"
	IsolationObserve Isolation = "Observe"
	IsolationOff     Isolation = "Off"
)

// Fence is which writes isolation applies to.
//
// +kubebuilder:validation:Enum=Resources;Namespace
type Fence string

// Values of Fence.
const (
	FenceResources Fence = "Resources"
	FenceNamespace Fence = "Namespace"
)

// ControllerConfig configures the leader election of the operator. If it names no lock, the
// mesh discovers the locks that members try to acquire.
type ControllerConfig struct {
	// LeaderElectionName is the name of the operator's lock (Lease, ConfigMap or Endpoints)
	// in this object's namespace. It is a short form of an entry in locks.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=189
	LeaderElectionName string `json:"leaderElectionName,omitempty"`
	// Locks are the operator's locks in any namespace. Many operators have theirs in
	// kube-system, and some have several.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=namespace
	// +listMapKey=name
	Locks []LockReference `json:"locks,omitempty"`
	// ExcludedLocks are objects with leader-election records that do not elect the operator's
	// leader, such as a mutex that several operators share. The mesh neither discovers nor
	// renames them.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=namespace
	// +listMapKey=name
	ExcludedLocks []ExcludedLock `json:"excludedLocks,omitempty"`
}

// ExcludedLock names Leases, ConfigMaps and Endpoints that are not locks of the operator.
type ExcludedLock struct {
	// Namespace of the objects.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// Name of the objects, or a prefix of their names that ends with "*".
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
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

// WebhookConfig is where the operator serves its own webhooks.
type WebhookConfig struct {
	// CertDir is the directory of the webhook server's certificate in the pods: tls.crt and
	// tls.key.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	CertDir string `json:"certDir"`
	// Port is the webhook server's port.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
}

// ObjectLimiter lists resources and selects the objects of them that a shard owns.
type ObjectLimiter struct {
	// RelateResources are the resources to divide, at least one.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	RelateResources []ResourceGroup `json:"relateResources,omitempty"`

	// Selector is added to the label selector of every list, watch and deletecollection of
	// those resources.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`

	// Namespaces limit those resources to the objects in namespaces that any entry matches.
	// No shard reads or writes the others, whatever isolation and reads say: lists and watches
	// leave them out, deletecollections skip them, and requests for single objects are refused
	// with 403. Objects in no namespace, shared objects and locks are not limited. The limit
	// follows the labels of namespaces without a handover. It requires spec.root.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	Namespaces []NamespaceMatch `json:"namespaces,omitempty"`
}

// ResourceGroup lists resources of API groups.
type ResourceGroup struct {
	// APIGroups are the names of API groups. "" is the core group, "*" alone is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups"`
	// Resources are plural resource names. "*" alone is all resources of the listed groups;
	// it requires a root whose method is not Labels, and no selector.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources"`
}

// RootConfig describes the shards that are derived from a root.
//
// +kubebuilder:validation:XValidation:rule="has(self.canary) || has(self.auto) || has(self.subsets) || has(self.targetSelector)",message="set spec.root.auto, spec.root.canary, both, or spec.root.subsets"
// +kubebuilder:validation:XValidation:rule="!has(self.subsets) || !(has(self.canary) || has(self.auto))",message="spec.root.subsets divide the namespaces by themselves: remove spec.root.auto and spec.root.canary"
// +kubebuilder:validation:XValidation:rule="[has(self.targetStatefulSet), has(self.targetRef), has(self.targetSelector)].filter(x, x).size() == 1",message="name the operator's pods by one of spec.root.targetRef, spec.root.targetSelector and spec.root.targetStatefulSet"
// +kubebuilder:validation:XValidation:rule="!has(self.targetSelector) || !(has(self.canary) || has(self.auto))",message="spec.root.auto and spec.root.canary assign the pods of one workload: name it by spec.root.targetRef, or set spec.root.subsets"
// +kubebuilder:validation:XValidation:rule="!has(self.key) || self.key != 'Object' || !has(self.subsets)",message="spec.root.key: Object leaves no namespaces to give to subsets: remove spec.root.subsets"
// +kubebuilder:validation:XValidation:rule="!has(self.key) || self.key != 'Object' || !has(self.canary)",message="spec.root.key: Object leaves no namespaces to give to a canary: remove spec.root.canary"
// +kubebuilder:validation:XValidation:rule="!has(self.key) || self.key != 'Object' || !has(self.method) || self.method != 'Labels'",message="spec.root.key: Object cannot be imposed by labels: choose another spec.root.method"
// +kubebuilder:validation:XValidation:rule="!has(self.key) || self.key != 'Cluster' || !(has(self.subsets) || has(self.targetSelector))",message="spec.root.key: Cluster leaves no namespaces to give to subsets: remove spec.root.subsets and targetSelector"
// +kubebuilder:validation:XValidation:rule="!has(self.key) || self.key != 'Cluster' || !has(self.canary) || !(has(self.canary.inNamespaces) || has(self.canary.inNamespaceSelector))",message="spec.root.key: Cluster leaves no namespaces to give to a canary: name clusters in spec.root.canary.inClusters"
// +kubebuilder:validation:XValidation:rule="!has(self.canary) || !has(self.canary.inClusters) || (has(self.key) && self.key == 'Cluster')",message="spec.root.canary.inClusters requires spec.root.key: Cluster"
// +kubebuilder:validation:XValidation:rule="!has(self.key) || self.key != 'Cluster' || !has(self.method) || self.method in ['Auto', 'Filter']",message="spec.root.key: Cluster is imposed by the proxy: choose spec.root.method Auto or Filter"
// +kubebuilder:validation:XValidation:rule="!has(self.defaultOnlyUserAgents) || size(self.defaultOnlyUserAgents) == 0 || has(self.subsets) || has(self.targetSelector)",message="spec.root.defaultOnlyUserAgents requires spec.root.subsets or spec.root.targetSelector"
// +kubebuilder:validation:XValidation:rule="!has(self.clusterScoped) || self.clusterScoped != 'DefaultOnly' || has(self.subsets) || has(self.targetSelector)",message="spec.root.clusterScoped: DefaultOnly requires spec.root.subsets or spec.root.targetSelector"
// +kubebuilder:validation:XValidation:rule="!has(self.rollout) || has(self.targetStatefulSet) || (has(self.targetRef) && self.targetRef.kind == 'StatefulSet')",message="spec.root.rollout replaces the pods of a StatefulSet: name one by spec.root.targetRef"
// +kubebuilder:validation:XValidation:rule="!has(self.clusterScoped) || self.clusterScoped != 'DefaultOnly' || !has(self.key) || self.key != 'Object'",message="spec.root.key: Object assigns objects in no namespace by uid: choose spec.root.clusterScoped Everyone"
// +kubebuilder:validation:XValidation:rule="!has(self.subsets) || self.subsets.all(s, size(self.prefix) + size(s.name) < 63)",message="the shards of spec.root.subsets, which are named <prefix>-<name>, would have names of more than 63 characters: shorten spec.root.prefix or the names of the subsets"
// +kubebuilder:validation:XValidation:rule="(has(self.key) ? self.key : 'Namespace') == (has(oldSelf.key) ? oldSelf.key : 'Namespace')",message="spec.root.key is immutable: delete this ShardingConfig and create another"
// +kubebuilder:validation:XValidation:rule="(has(self.targetRef) ? self.targetRef.kind + '/' + self.targetRef.name : has(self.targetStatefulSet) ? 'StatefulSet/' + self.targetStatefulSet : '-') == (has(oldSelf.targetRef) ? oldSelf.targetRef.kind + '/' + oldSelf.targetRef.name : has(oldSelf.targetStatefulSet) ? 'StatefulSet/' + oldSelf.targetStatefulSet : '-')",message="the workload in spec.root.targetRef or spec.root.targetStatefulSet is immutable: delete this ShardingConfig and create another"
// +kubebuilder:validation:XValidation:rule="has(self.targetSelector) == has(oldSelf.targetSelector) && (!has(self.targetSelector) || self.targetSelector == oldSelf.targetSelector)",message="spec.root.targetSelector is immutable: delete this ShardingConfig and create another"
type RootConfig struct {
	// Disable withdraws the derived shards. Once none owns any keys, the members are replaced
	// one by one, and their successors run unsharded.
	// +optional
	Disable *bool `json:"disable,omitempty"`
	// Prefix of the names of the derived objects.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: delete this ShardingConfig and create another"
	Prefix string `json:"prefix"`
	// TargetStatefulSet is the StatefulSet in this namespace whose pods are assigned to the
	// shards by ordinal. It is a short form of targetRef.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	TargetStatefulSet string `json:"targetStatefulSet,omitempty"`
	// TargetRef is the workload in this namespace whose pods are assigned to the shards:
	// the pods of a StatefulSet by ordinal, each pod of a Deployment to the shard that lacks
	// most pods.
	// +optional
	TargetRef *TargetRef `json:"targetRef,omitempty"`
	// TargetSelector selects the pods in this namespace that are assigned to the subsets by
	// their labels, such as those of two Deployments with different versions of the operator.
	// Without subsets, all of them are one shard that owns everything.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(has(self.matchLabels) && size(self.matchLabels) > 0) || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",message="must not be empty: an empty selector would take every pod of the namespace"
	TargetSelector *metav1.LabelSelector `json:"targetSelector,omitempty"`
	// Canary is a shard of the first pods that owns some namespaces or buckets.
	// +optional
	Canary *CanaryConfig `json:"canary,omitempty"`
	// Subsets are shards of the pods with certain labels, each of which owns some namespaces.
	// One more shard, `<prefix>-default`, has all other pods and owns all other namespaces.
	// +optional
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=name
	Subsets []Subset `json:"subsets,omitempty"`
	// Auto divides all other keys evenly. Without it, all other pods are one shard that owns
	// all other keys.
	// +optional
	Auto *AutoConfig `json:"auto,omitempty"`
	// ResourceSelector lists the resources that the shards divide. A selector in it applies
	// to all shards.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ResourceSelector []ObjectLimiter `json:"resourceSelector,omitempty"`

	// Shared lists objects of the divided resources that every shard reads, such as
	// configuration that all members need. Objects in the operator's own namespace are
	// always shared for reading.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Shared []SharedObjects `json:"shared,omitempty"`

	// ClusterScoped is which shards write objects in no namespace; every shard reads them.
	// Everyone: every shard, so that the operator itself must avoid conflicts. DefaultOnly:
	// the shard of the default subset alone. Reviews of authentication and authorization are
	// exempt, and so are shared objects with writes: Everyone. DefaultOnly requires subsets or
	// targetSelector.
	// +optional
	// +kubebuilder:default=Everyone
	ClusterScoped ClusterScoped `json:"clusterScoped,omitempty"`

	// DefaultOnlyUserAgents are User-Agents of clients that the default subset alone serves:
	// exact values, or prefixes that end with "*". In other subsets their lists are empty,
	// their watches have no events, and all other requests for resources are refused with
	// 403, except those for locks. It requires subsets or targetSelector.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=256
	DefaultOnlyUserAgents []string `json:"defaultOnlyUserAgents,omitempty"`

	// Rollout replaces the pods of the StatefulSet after a change of its template, shard by shard:
	// first the canary, then the others in the order of their names. It requires that the
	// StatefulSet has updateStrategy OnDelete: RollingUpdate updates the highest ordinals first, at
	// any partition, and the canary has the lowest.
	// +optional
	Rollout *Rollout `json:"rollout,omitempty"`

	// PinnedNamespaces are the namespaces whose label owner-shard names a shard, by the shard's
	// name. The manager fills them in from the namespaces; they are in no object.
	PinnedNamespaces map[string][]string `json:"-"`

	// Key is how objects are assigned to shards. Namespace: by their namespace, which belongs to
	// the same shard in all clusters, see spec.clusters; every shard sees cluster-scoped objects.
	// Object: by their uid. Cluster: by the name of the cluster that a request goes to; the
	// objects of resourceSelector, in the apiserver's own cluster, are assigned by their own
	// names, which are those of clusters.
	// +optional
	// +kubebuilder:default=Namespace
	Key Key `json:"key,omitempty"`
	// Method is how lists and watches are narrowed. ServerSide: by the apiserver's
	// shardSelector. Filter: by the proxy. Labels: by labels that the mesh sets on all
	// objects. Auto: ServerSide if the apiserver supports it, else Filter.
	// +optional
	// +kubebuilder:default=Auto
	Method Method `json:"method,omitempty"`
	// OnChange is what happens to members whose caches contain objects that another shard owns
	// now. Restart: they are evicted, one at a time. Relist: their watches resume, and they
	// see those objects deleted.
	// +optional
	// +kubebuilder:default=Restart
	OnChange OnChange `json:"onChange,omitempty"`
}

// SharedObjects lists objects of divided resources that every shard reads.
type SharedObjects struct {
	// APIGroups are the names of API groups. "" is the core group, "*" alone is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups"`
	// Resources are plural resource names. "*" alone is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources"`
	// Namespaces of the objects. The default is all.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Namespaces []string `json:"namespaces,omitempty"`
	// Names of the objects. The default is all.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`
	// Writes is which shards may write them. Owner: the shard that owns the key. Everyone:
	// every shard, so that the operator itself must avoid conflicts.
	// +optional
	// +kubebuilder:default=Owner
	Writes SharedWrites `json:"writes,omitempty"`
}

// SharedWrites is which shards may write shared objects.
//
// +kubebuilder:validation:Enum=Owner;Everyone
type SharedWrites string

// Values of SharedWrites.
const (
	SharedWritesOwner    SharedWrites = "Owner"
	SharedWritesEveryone SharedWrites = "Everyone"
)

// ClusterScoped is which shards write objects in no namespace.
//
// +kubebuilder:validation:Enum=Everyone;DefaultOnly
type ClusterScoped string

// Values of ClusterScoped.
const (
	ClusterScopedEveryone    ClusterScoped = "Everyone"
	ClusterScopedDefaultOnly ClusterScoped = "DefaultOnly"
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

// Key is how objects are assigned to shards.
//
// +kubebuilder:validation:Enum=Namespace;Object;Cluster
type Key string

// Values of Key.
const (
	KeyNamespace Key = "Namespace"
	KeyObject    Key = "Object"
	KeyCluster   Key = "Cluster"
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

// OnChange is what happens to members whose caches contain objects of other shards.
//
// +kubebuilder:validation:Enum=Restart;Relist
type OnChange string

// Values of OnChange.
const (
	OnChangeRestart OnChange = "Restart"
	OnChangeRelist  OnChange = "Relist"
)

// Rebalance is what happens when the weights of shards differ much.
//
// +kubebuilder:validation:Enum=Off;Suggest;Automatic
type Rebalance string

// Values of Rebalance.
const (
	RebalanceOff       Rebalance = "Off"
	RebalanceSuggest   Rebalance = "Suggest"
	RebalanceAutomatic Rebalance = "Automatic"
)

// CanaryConfig is a shard on which a new version is tested.
//
// +kubebuilder:validation:XValidation:rule="(has(self.inNamespaces) && size(self.inNamespaces) > 0) || has(self.inNamespaceSelector) || (has(self.inClusters) && size(self.inClusters) > 0) || (has(self.inShardHash) && size(self.inShardHash) > 0)",message="list inNamespaces, inNamespaceSelector, inClusters, inShardHash, or several of them"
type CanaryConfig struct {
	// Replicas is the number of pods, from ordinal 0, of the canary shard.
	// +kubebuilder:validation:Minimum=1
	Replicas *int32 `json:"replicas"`
	// InNamespaces are the namespaces that the canary owns.
	// +optional
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=63
	InNamespaces []string `json:"inNamespaces,omitempty"`
	// InNamespaceSelector selects, by labels, namespaces that the canary owns besides
	// inNamespaces. A namespace whose labels change is handed over. At most 1024 namespaces
	// may be selected in all.
	// +optional
	InNamespaceSelector *metav1.LabelSelector `json:"inNamespaceSelector,omitempty"`
	// InClusters are the clusters that the canary owns. It requires spec.root.key: Cluster.
	// +optional
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=253
	InClusters []string `json:"inClusters,omitempty"`
	// InShardHash are the buckets, 0 to 31, that the canary owns.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Pattern=`^([0-9]|[12][0-9]|3[01])$`
	InShardHash []string `json:"inShardHash,omitempty"`
}

// Subset is a shard of the pods with certain labels, such as those of a new version.
type Subset struct {
	// Name of the subset. Its shard is named `<prefix>-<name>`, of at most 63 characters.
	// +kubebuilder:validation:MaxLength=40
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self != 'default'",message="the shard of all other pods has the name default: choose another"
	Name string `json:"name"`
	// PodLabels are the labels of its pods. A pod belongs to the first subset whose labels it
	// has. A pod whose labels change is restarted.
	// +kubebuilder:validation:MinProperties=1
	// +kubebuilder:validation:MaxProperties=16
	PodLabels map[string]string `json:"podLabels"`
	// Namespaces are what the subset owns: the namespaces that any entry matches, without
	// those of earlier subsets. A namespace whose labels change is handed over. At most 1024
	// namespaces may match.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	Namespaces []NamespaceMatch `json:"namespaces"`
}

// DefaultSubset is the name of the subset of all pods and namespaces that no other subset has.
const DefaultSubset = "default"

// NamespaceMatch matches namespaces in one way.
//
// +kubebuilder:validation:XValidation:rule="[has(self.names), has(self.selector), has(self.pattern)].filter(x, x).size() == 1",message="set one of names, selector and pattern"
type NamespaceMatch struct {
	// Names of namespaces, which need not exist.
	// +optional
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=63
	Names []string `json:"names,omitempty"`
	// Selector matches labels of existing namespaces.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
	// Pattern is a regular expression (RE2) that the names of existing namespaces contain a
	// match of, such as "^canary-". It must not compile to more than 1200 instructions.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Pattern string `json:"pattern,omitempty"`
}

// Rollout is how pods of a new revision of a StatefulSet replace the others.
type Rollout struct {
	// Paused stops the rollout before the next pod. Pods that are deleted by others get the new
	// revision all the same.
	// +optional
	Paused bool `json:"paused,omitempty"`
	// Soak is how long all pods of a shard must have served under the new revision before the
	// pods of the next shard are replaced.
	// +optional
	// +kubebuilder:default="1m"
	Soak Duration `json:"soak,omitempty"`
	// AutoRollback restores the pod template of the StatefulSet when the rollout halts: to that of
	// the revision that the last shard still has. Each revision is rolled back once. It requires that
	// ClusterRole ctrlmesh-rollback is bound to the manager in the namespace, and that the StatefulSet
	// has annotation ctrlmesh.kusionstack.io/allow-rollback with value "true".
	// +optional
	AutoRollback bool `json:"autoRollback,omitempty"`
	// Analysis halts the rollout by what the pods of a shard do while it soaks.
	// +optional
	Analysis *RolloutAnalysis `json:"analysis,omitempty"`
}

// RolloutAnalysis bounds what the pods of a shard do while it soaks. Agents count requests and
// writes, and a bound on these applies from 50 of them on. A revision that exceeds a bound goes no
// further. An analysis takes 30 s at least. Comparisons with other shards begin after 30 s, because a
// new leader may write each of its objects once, and take 30 s at least.
//
// +kubebuilder:validation:MinProperties=1
type RolloutAnalysis struct {
	// MaxErrors is the highest percentage of requests to the apiserver that fail: with 5xx, or
	// with 4xx other than 404, 409, 410 and 429. What the mesh refuses counts.
	// +optional
	MaxErrors *Percent `json:"maxErrors,omitempty"`
	// MaxConflicts is the highest percentage of requests that are answered with 409.
	// +optional
	MaxConflicts *Percent `json:"maxConflicts,omitempty"`
	// MaxWritesRatio bounds the writes of the shard, for each object of the divided resources:
	// how many times as many as those of the other shard that writes most.
	// It finds versions that write the same objects again and again.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	MaxWritesRatio *int32 `json:"maxWritesRatio,omitempty"`
	// MaxLatencyRatio bounds how long the apiserver takes on average to answer a request of the
	// shard: how many times as long as for the other shard for which it takes longest. Watches, logs
	// that are followed and connections into pods do not count. It finds versions that send more
	// expensive requests, such as large lists.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	MaxLatencyRatio *int32 `json:"maxLatencyRatio,omitempty"`
	// MaxRestarts is the highest number of restarts of containers in the pods of the shard that
	// have the revision. They are counted from when the rollout reaches the shard until it has soaked.
	// It finds versions that crash now and then, and serve in between.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	MaxRestarts *int32 `json:"maxRestarts,omitempty"`
	// Queries are bounds on what Prometheus knows of the pods of the shard. The administrator of the
	// mesh names the Prometheus.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Queries []AnalysisQuery `json:"queries,omitempty"`
}

// AnalysisQuery bounds the result of a PromQL query, which is evaluated about every 15 s while a
// shard soaks. It is judged once the shard has soaked for as long as the analysis takes at least. If it
// has no result, the rollout waits, and status.root.rollout.message says why.
//
// +kubebuilder:validation:XValidation:rule="has(self.min) || has(self.max)",message="set min or max"
// +kubebuilder:validation:XValidation:rule="!has(self.min) || !has(self.max) || double(self.min) <= double(self.max)",message="min must not exceed max"
type AnalysisQuery struct {
	// Name of the query, which messages show.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`
	// Query in PromQL. Its result must be a scalar or an instant vector. $namespace stands for the
	// namespace of this object, and $shard for the name of the shard. $pods stands for a regular
	// expression that matches the names of the shard's pods which have the revision, as in {pod=~"$pods"}.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	Query string `json:"query"`
	// Min is the least value that the scalar, or each sample of the vector, may have.
	// +optional
	Min *Decimal `json:"min,omitempty"`
	// Max is the greatest value that the scalar, or each sample of the vector, may have.
	// +optional
	Max *Decimal `json:"max,omitempty"`
}

// AutoConfig divides all keys that the canary does not own into equal shards.
type AutoConfig struct {
	// ShardingSize is the number of shards.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	ShardingSize int32 `json:"shardingSize"`
	// EveryShardReplicas is the number of pods of each shard.
	// +kubebuilder:validation:Minimum=1
	EveryShardReplicas int32 `json:"everyShardReplicas"`
	// Rebalance is what happens when the heaviest shard has more than 1.25 times the mean
	// weight. The weight of a shard is the number of objects of the divided resources in its
	// namespaces. Automatic: namespaces are handed over within a minute, one batch at a
	// time. Under onChange Restart, a correction is a single batch and evicts the pods of
	// the shards that give up namespaces. The next correction waits a minute, then two, up
	// to an hour. Suggest: the status says what Automatic would do. Off: objects are counted
	// only when the shards are created.
	// +optional
	// +kubebuilder:default=Automatic
	Rebalance Rebalance `json:"rebalance,omitempty"`
}

// Condition types of a ShardingConfig.
const (
	// ConditionReady: every member is captured and applies the current policy.
	ConditionReady = "Ready"
	// ConditionProgressing: members have not received a policy yet, or existing objects are
	// being labelled.
	ConditionProgressing = "Progressing"
	// ConditionDegraded: a user must act; the message says how.
	ConditionDegraded = "Degraded"
	// ConditionLeaderMissing: a shard with ready members has had no leader for a
	// while; the message names the shard and what its pods wait for.
	ConditionLeaderMissing = "LeaderMissing"
	// ConditionUndivided: several shards of a root write a resource that it does not divide,
	// and may reconcile the same objects. It is a warning: the shards go on.
	ConditionUndivided = "Undivided"
	// ConditionShardIdle: a shard of a root has objects and never writes, while others do. It
	// is a warning: there may be nothing to write.
	ConditionShardIdle = "ShardIdle"
)

// ShardingConfigStatus is the observed state of a ShardingConfig.
type ShardingConfigStatus struct {
	// ObservedGeneration is the generation of the spec that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Conditions have the types Ready, Progressing, Degraded and LeaderMissing, and those of a
	// root also Undivided and ShardIdle.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Shards is the number of shards of this configuration.
	// +optional
	Shards int32 `json:"shards,omitempty"`
	// Selector selects the members of all shards of a root, as the subresource scale requires.
	// +optional
	Selector string `json:"selector,omitempty"`
	// Members is the number of selected pods.
	// +optional
	Members int32 `json:"members"`
	// ReadyMembers is the number of members that are captured and apply the current policy.
	// +optional
	ReadyMembers int32 `json:"readyMembers"`
	// Method is how lists and watches are narrowed in fact: ServerSide, Labels or Filter, or
	// several if resources or nodes differ.
	// +optional
	Method string `json:"method,omitempty"`
	// Lock is the name of this shard's lock.
	// +optional
	Lock string `json:"lock,omitempty"`
	// Held are the keys that a derived shard owns, as in status.root.shards.
	// +optional
	// +listType=atomic
	Held []string `json:"held,omitempty"`
	// Pods describes each member, at most 200.
	// +optional
	// +listType=map
	// +listMapKey=name
	Pods []MemberStatus `json:"pods,omitempty"`
	// Stamping is the progress of labelling existing objects.
	// +optional
	Stamping *StampingStatus `json:"stamping,omitempty"`
	// Locks are the operator's locks, named and discovered.
	// +optional
	// +listType=map
	// +listMapKey=namespace
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Locks []LockStatus `json:"locks,omitempty"`
	// Shadow compares the writes of a shadow with those of others.
	// +optional
	Shadow *ShadowStatus `json:"shadow,omitempty"`
	// Acting are the limits that the members of a hand-written configuration act by. They differ
	// from those of the spec while other pods of the operator may act by earlier ones. If anybody
	// else writes this, two shards may own one object.
	// +optional
	Acting *ActingLimits `json:"acting,omitempty"`
	// Root describes the derived shards.
	// +optional
	Root *RootStatus `json:"root,omitempty"`
}

// ActingLimits are limits of a hand-written configuration.
type ActingLimits struct {
	// Hash identifies the limits; "none" while members own nothing.
	// +kubebuilder:validation:MaxLength=64
	Hash string `json:"hash"`
	// Limits are what the hash identifies. It is empty if they are those of the spec, or too long.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=128
	Limits []ObjectLimiter `json:"limits,omitempty"`
}

// ShadowStatus counts the writes of a shadow since the agents serve its pods, by how they ended.
type ShadowStatus struct {
	// Agreed is the number of writes that changed nothing, or what others changed equally within
	// the window.
	// +optional
	Agreed int64 `json:"agreed"`
	// Differed is the number of writes whose changes nobody made within the window.
	// +optional
	Differed int64 `json:"differed"`
	// Refused is the number of writes that the apiserver refused, except for conflicts: the
	// operator may lack permissions, or a webhook does not support dry runs.
	// +optional
	Refused int64 `json:"refused"`
	// Uncompared is the number of other writes: the object changed meanwhile, its name is
	// generated, or it is not read as JSON.
	// +optional
	Uncompared int64 `json:"uncompared"`
	// Differences are the fields that differed, by resource and verb.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Differences []ShadowDifference `json:"differences,omitempty"`
}

// ShadowDifference is what writes of a shadow would have changed, and nobody did.
type ShadowDifference struct {
	// Group of the resource; empty for the core group.
	// +optional
	Group string `json:"group,omitempty"`
	// Resource is such as "deployments", or "deployments/status".
	Resource string `json:"resource"`
	// Verb of the writes.
	Verb string `json:"verb"`
	// Writes is their number.
	Writes int64 `json:"writes"`
	// Fields are the paths of fields with other values, at most 8. It is empty if the object was
	// to be deleted, or was not created by others.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	Fields []string `json:"fields,omitempty"`
}

// LockStatus describes one lock of the operator.
type LockStatus struct {
	// Namespace of the lock.
	Namespace string `json:"namespace"`
	// Name of the lock.
	Name string `json:"name"`
	// Resources of which the lock consists: leases, configmaps or endpoints.
	// +optional
	// +listType=set
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources,omitempty"`
	// Discovered is true if the lock was seen in a member's requests and is not named
	// in spec.controller.
	// +optional
	Discovered bool `json:"discovered,omitempty"`
	// Holder is the identity outside the mesh that holds the lock; empty if none does.
	// +optional
	Holder string `json:"holder,omitempty"`
	// HeldByMesh is true while the manager holds the lock, so that no pod outside the
	// mesh can lead.
	// +optional
	HeldByMesh bool `json:"heldByMesh,omitempty"`
}

// MemberStatus describes one member.
type MemberStatus struct {
	// Name of the pod.
	Name string `json:"name"`
	// Node is the name of the pod's node.
	// +optional
	Node string `json:"node,omitempty"`
	// Capture is the capture mode: ebpf, iptables or address; empty while the pod is not
	// captured.
	// +optional
	Capture string `json:"capture,omitempty"`
	// PolicyVersion is the version of the policy that the pod's agent applies.
	// +optional
	PolicyVersion string `json:"policyVersion,omitempty"`
	// LockHolder is true while the pod holds the shard's lock.
	// +optional
	LockHolder bool `json:"lockHolder,omitempty"`
	// Message says why the member is not ready.
	// +optional
	Message string `json:"message,omitempty"`
}

// StampingStatus is the progress of labelling existing objects.
type StampingStatus struct {
	// Done is true when all existing objects have the labels.
	Done bool `json:"done"`
	// Resource that is being listed, as plural.group.
	// +optional
	Resource string `json:"resource,omitempty"`
	// Continue is the token with which the list of resource goes on.
	// +optional
	Continue string `json:"continue,omitempty"`
	// Completed are the resources whose objects all have the labels.
	// +optional
	// +listType=set
	Completed []string `json:"completed,omitempty"`
	// Seen is the number of objects that were checked.
	// +optional
	Seen int64 `json:"seen,omitempty"`
	// Stamped is the number of objects that were labelled.
	// +optional
	Stamped int64 `json:"stamped,omitempty"`
	// Message is the last error.
	// +optional
	Message string `json:"message,omitempty"`
}

// RootStatus describes the shards derived from a root. It is also the manager's durable
// state: which keys each shard owns, and which pods may still act on them. If anybody else
// writes it, two shards may own one key.
type RootStatus struct {
	// ChildShardingConfigs are the names of the derived objects.
	// +optional
	ChildShardingConfigs []string `json:"childShardingConfigs,omitempty"`
	// Shards are the derived shards, by name.
	// +optional
	// +listType=map
	// +listMapKey=name
	Shards []ShardStatus `json:"shards,omitempty"`
	// MinSerial is the lowest serial of any policy of the root. It is raised above the serials
	// that agents report and that this status does not account for.
	// +optional
	MinSerial int64 `json:"minSerial,omitempty"`
	// RolledBack is true after an agent reported a later serial than this status has, as
	// after a restore of etcd: pods may act on other keys than the status says. All members
	// are in standby. The root starts anew once all of them have confirmed that.
	// +optional
	RolledBack bool `json:"rolledBack,omitempty"`
	// Acting is what of the spec decides which pod may act on what, as the shards act by it
	// now. Another spec takes effect once no shard owns any key.
	// +optional
	Acting *ActingSpec `json:"acting,omitempty"`
	// Assignments are the pods that were assigned to shards and may still run.
	// +optional
	// +listType=map
	// +listMapKey=uid
	Assignments []Assignment `json:"assignments,omitempty"`
	// Handovers are the handovers in progress.
	// +optional
	Handovers []HandoverStatus `json:"handovers,omitempty"`
	// Handover summarizes the handovers: Settled, Releasing, Granting, Restarting, Waiting or
	// Blocked.
	// +optional
	Handover string `json:"handover,omitempty"`
	// Skew is the weight of the heaviest automatic shard divided by the mean, such as "1.04".
	// +optional
	Skew string `json:"skew,omitempty"`
	// Suggestion is what rebalancing would do.
	// +optional
	Suggestion string `json:"suggestion,omitempty"`
	// Weighing says why the manager cannot count objects, and how to permit it. Until then
	// all namespaces have equal weight.
	// +optional
	Weighing string `json:"weighing,omitempty"`
	// Rollout is the progress of spec.root.rollout.
	// +optional
	Rollout *RolloutStatus `json:"rollout,omitempty"`
	// Undivided are resources that the root does not divide although several shards write
	// them: in the same namespaces, or while they watch all namespaces. At most 16.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Undivided []UndividedResource `json:"undivided,omitempty"`
	// ForeignWrites are writes of divided resources to objects of other shards that the mesh
	// did not refuse: under isolation Observe or Off, or to objects that every shard may
	// write. At most 16 resources.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	ForeignWrites []ForeignWrites `json:"foreignWrites,omitempty"`
}

// RolloutPhase is what a rollout does.
//
// +kubebuilder:validation:Enum=Complete;Updating;Soaking;Paused;Halted;Waiting;Blocked
type RolloutPhase string

// Values of RolloutPhase.
const (
	// RolloutComplete: all pods have the revision.
	RolloutComplete RolloutPhase = "Complete"
	// RolloutUpdating: pods of a shard are being replaced, or do not all serve yet.
	RolloutUpdating RolloutPhase = "Updating"
	// RolloutSoaking: all pods of a shard have the revision and serve.
	RolloutSoaking RolloutPhase = "Soaking"
	// RolloutPaused: pods have another revision, and spec.root.rollout.paused is set.
	RolloutPaused RolloutPhase = "Paused"
	// RolloutHalted: pods of a shard do not serve under the revision, or the analysis failed. It
	// goes on once they do, or the analysis is removed.
	RolloutHalted RolloutPhase = "Halted"
	// RolloutWaiting: no pods can be replaced yet.
	RolloutWaiting RolloutPhase = "Waiting"
	// RolloutBlocked: pods cannot be replaced in order; the message says what to do.
	RolloutBlocked RolloutPhase = "Blocked"
)

// RolloutStatus is the progress of a rollout.
type RolloutStatus struct {
	// Revision that pods get: status.updateRevision of the StatefulSet.
	// +optional
	Revision string `json:"revision,omitempty"`
	// Phase is what the rollout does.
	Phase RolloutPhase `json:"phase"`
	// Shard whose pods are being replaced, or soak.
	// +optional
	Shard string `json:"shard,omitempty"`
	// UnservedSince is since when the shard has not served.
	// +optional
	UnservedSince *metav1.Time `json:"unservedSince,omitempty"`
	// Failure is why the analysis has halted the rollout of the revision.
	// +optional
	Failure string `json:"failure,omitempty"`
	// Message says what the rollout waits for.
	// +optional
	Message string `json:"message,omitempty"`
	// Shards are those of the root, in the order in which their pods are replaced.
	// +optional
	// +listType=map
	// +listMapKey=name
	Shards []RolloutShard `json:"shards,omitempty"`
	// RolledBack are the revisions that autoRollback has rolled back and that have not been rolled
	// out to all shards since, the last one at the end. At most 10.
	// +optional
	// +listType=map
	// +listMapKey=revision
	// +kubebuilder:validation:MaxItems=10
	RolledBack []RolledBackRevision `json:"rolledBack,omitempty"`
}

// RolledBackRevision is a revision whose template autoRollback has replaced.
type RolledBackRevision struct {
	// Revision that failed.
	Revision string `json:"revision"`
	// To is the revision whose template the StatefulSet has got instead.
	To string `json:"to"`
	// Generation of the StatefulSet with the template that failed. It is written before the template
	// is restored, which is done only while the StatefulSet has this generation.
	Generation int64 `json:"generation"`
	// Reason why the rollout had halted.
	// +optional
	Reason string `json:"reason,omitempty"`
}

// RolloutShard is the progress of a rollout in one shard.
type RolloutShard struct {
	// Name of the shard.
	Name string `json:"name"`
	// Pods is the number of its pods.
	Pods int32 `json:"pods"`
	// Updated is the number of those that have the revision.
	Updated int32 `json:"updated"`
	// Since is when all of its pods had the revision and served. With an analysis, a manager that
	// starts anew lets the shard soak anew.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
	// Soaked is true once they have served for the soak time, and passed the analysis.
	// +optional
	Soaked bool `json:"soaked,omitempty"`
}

// UndividedResource is a resource that several shards write and the root does not divide.
// All numbers are of the last hour at most, and at most a minute old.
type UndividedResource struct {
	// Group is the API group of the resource; empty for the core group.
	// +optional
	Group string `json:"group,omitempty"`
	// Resource is the plural name of the resource.
	Resource string `json:"resource"`
	// Shards are those that wrote it, sorted.
	// +listType=atomic
	Shards []string `json:"shards"`
	// Writes is the number of successful writes of these shards.
	Writes int64 `json:"writes"`
	// Common is in how many namespaces several shards wrote, in a sample. Objects are counted
	// instead of namespaces if they have none, or if spec.root.key is Object. 0: no common one
	// is known, but several shards watch the resource in all namespaces.
	// +optional
	Common int32 `json:"common,omitempty"`
	// Namespaces are some of those in which several shards wrote, if they are known.
	// +optional
	// +listType=atomic
	Namespaces []string `json:"namespaces,omitempty"`
}

// ForeignWrites are writes of one divided resource to objects of other shards.
type ForeignWrites struct {
	// Group is the API group of the resource; empty for the core group.
	// +optional
	Group string `json:"group,omitempty"`
	// Resource is the plural name of the resource.
	Resource string `json:"resource"`
	// Shards are those that wrote to objects of others, sorted.
	// +listType=atomic
	Shards []string `json:"shards"`
	// Writes is the number of those writes within the last hour at most.
	Writes int64 `json:"writes"`
}

// ActingSpec is the part of the spec of a root that decides which pod may act on what. All
// shards act by the same one.
type ActingSpec struct {
	// Controller has the operator's locks.
	// +optional
	Controller *ControllerConfig `json:"controller,omitempty"`
	// DryRun is whether nothing is enforced.
	// +optional
	DryRun bool `json:"dryRun,omitempty"`
	// Limits are those of the spec, with the divided resources.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Limits []ObjectLimiter `json:"limits,omitempty"`
	// ResourceSelector lists the divided resources.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ResourceSelector []ObjectLimiter `json:"resourceSelector,omitempty"`
	// Key is how objects are assigned to shards.
	// +optional
	Key Key `json:"key,omitempty"`
	// Clusters are the paths that lead to member clusters.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=pathPrefix
	Clusters []ClusterPath `json:"clusters,omitempty"`
	// Method is how lists and watches are narrowed.
	// +optional
	Method Method `json:"method,omitempty"`
	// ClusterScoped is which shards write objects in no namespace.
	// +optional
	ClusterScoped ClusterScoped `json:"clusterScoped,omitempty"`
	// TargetStatefulSet is the StatefulSet whose pods are assigned to the shards.
	// +optional
	TargetStatefulSet string `json:"targetStatefulSet,omitempty"`
	// TargetRef is the workload whose pods are assigned to the shards.
	// +optional
	TargetRef *TargetRef `json:"targetRef,omitempty"`
	// TargetSelector selects the pods that are assigned to the shards.
	// +optional
	TargetSelector *metav1.LabelSelector `json:"targetSelector,omitempty"`
}

// ShardStatus describes one derived shard.
type ShardStatus struct {
	// Name of the shard and of its ShardingConfig.
	Name string `json:"name"`
	// Serial increases with every change of the members' policies.
	Serial int64 `json:"serial"`
	// Held are the keys that the shard owns, including those that it is releasing. No two
	// shards of a root own the same key. Each entry lists ranges of the key space (FNV-1a 64
	// of the namespace's name) in hexadecimal, for all buckets or for some.
	// +optional
	// +listType=atomic
	Held []string `json:"held,omitempty"`
	// Target are the keys that the shard is to own. It is releasing all others.
	// +optional
	// +listType=atomic
	Target []string `json:"target,omitempty"`
	// Wanted are the planned keys: those that the shard is to own once each shard that
	// receives keys has a ready pod.
	// +optional
	// +listType=atomic
	Wanted []string `json:"wanted,omitempty"`
	// Namespaces is the number of existing namespaces that the shard owns.
	// +optional
	Namespaces int32 `json:"namespaces"`
	// Weight is the number of objects in those namespaces at the last count.
	// +optional
	Weight int64 `json:"weight,omitempty"`
	// Members is the number of the shard's pods.
	// +optional
	Members int32 `json:"members"`
	// ReadyMembers is the number of the shard's pods that are ready, captured and apply the
	// current policy.
	// +optional
	ReadyMembers int32 `json:"readyMembers"`
	// Leader is the pod that holds the shard's locks; empty if none does, or if the operator
	// has no lock.
	// +optional
	Leader string `json:"leader,omitempty"`
	// Idle is true if the shard's pods watch its objects and have written nothing for ten
	// minutes, while other shards have written much.
	// +optional
	Idle bool `json:"idle,omitempty"`
}

// Assignment is the shard of a pod, which never changes.
type Assignment struct {
	// UID of the pod.
	UID string `json:"uid"`
	// Name of the pod.
	Name string `json:"name"`
	// Node is the name of the pod's node.
	// +optional
	Node string `json:"node,omitempty"`
	// Shard is the name of the pod's shard.
	Shard string `json:"shard"`
	// Serial is the lowest serial of the policies that the pod may still act on.
	Serial int64 `json:"serial"`
	// Stale is true if the pod must be replaced, because its caches contain objects of other
	// shards or it belongs to another shard now.
	// +optional
	Stale bool `json:"stale,omitempty"`
}

// HandoverStatus describes one handover.
type HandoverStatus struct {
	// From is the shard that releases the keys; empty if no shard owned them.
	// +optional
	From string `json:"from,omitempty"`
	// To is the shard that receives the keys; empty if no shard will own them.
	// +optional
	To string `json:"to,omitempty"`
	// Keys that are handed over, as in status.root.shards.
	// +optional
	// +listType=atomic
	Keys []string `json:"keys,omitempty"`
	// Phase is Releasing until the members of the first shard no longer act on the keys, then
	// Granting until those of the second shard do.
	Phase string `json:"phase"`
	// Since is when the phase began.
	Since metav1.Time `json:"since"`
	// Began is when the handover began.
	// +optional
	Began metav1.Time `json:"began,omitempty"`
	// WaitsFor lists the pods that the phase waits for, and why.
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
