package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// VirtualApp assigns the selected pods of an operator to subsets, and namespaces to the
// subsets. It is translated to a ShardingConfig with spec.root.subsets.
//
// A pod belongs to the first subset whose labels it has, a namespace to the first subset
// with a matching rule. The default subset has all other pods and namespaces. The members
// lead under a lock of their subset, with the name
// `<leaderElectionName>---<name of the VirtualApp>-<name of the subset>`.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=vapp,categories=ctrlmesh
// +kubebuilder:printcolumn:name="Subsets",type=integer,JSONPath=`.status.shards`
// +kubebuilder:printcolumn:name="Members",type=integer,JSONPath=`.status.members`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyMembers`
// +kubebuilder:printcolumn:name="Handover",type=string,JSONPath=`.status.root.handover`
// +kubebuilder:printcolumn:name="Lock",type=string,JSONPath=`.spec.configuration.controller.leaderElectionName`,priority=1
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) + size('default') < 63 && (!has(self.spec.subsets) || self.spec.subsets.all(s, size(self.metadata.name) + size(s.name) < 63))",message="the shards of the subsets, which are named <metadata.name>-<name>, would have names of more than 63 characters: shorten metadata.name or the names of spec.subsets"
type VirtualApp struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is the desired state.
	Spec VirtualAppSpec `json:"spec"`
	// Status is the observed state.
	// +optional
	Status v1alpha1.ShardingConfigStatus `json:"status,omitempty"`
}

// VirtualAppSpec is the desired state of a VirtualApp.
type VirtualAppSpec struct {
	// Selector selects the pods of the operator in this object's namespace. Immutable.
	// +kubebuilder:validation:XValidation:rule="(has(self.matchLabels) && size(self.matchLabels) > 0) || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",message="must not be empty: an empty selector would take every pod of the namespace"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: delete this VirtualApp and create another"
	Selector *metav1.LabelSelector `json:"selector"`

	// Configuration describes the operator.
	// +optional
	Configuration *VirtualAppConfiguration `json:"configuration,omitempty"`

	// Route assigns namespaces.
	// +optional
	Route *VirtualAppRoute `json:"route,omitempty"`

	// Subsets are groups of pods, such as those of a new version. The default subset has all
	// other pods.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=name
	Subsets []VirtualAppSubset `json:"subsets,omitempty"`
}

// VirtualAppConfiguration describes the operator.
type VirtualAppConfiguration struct {
	// Controller configures the leader election of the operator.
	// +optional
	Controller *ControllerConfiguration `json:"controller,omitempty"`
	// Webhook is where the operator serves its own webhooks.
	// +optional
	Webhook *WebhookConfiguration `json:"webhook,omitempty"`
	// RestConfigOverrides change the operator's requests.
	// +optional
	RestConfigOverrides *RestConfigOverrides `json:"restConfigOverrides,omitempty"`
}

// ControllerConfiguration names the operator's lock in one of two spellings. Without it,
// the mesh discovers the locks that members try to acquire.
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

// RestConfigOverrides change the operator's requests.
type RestConfigOverrides struct {
	// UserAgentOrPrefix replaces the User-Agent of requests. If it ends with "/", it is
	// prepended instead.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	UserAgentOrPrefix *string `json:"userAgentOrPrefix,omitempty"`
}

// VirtualAppRoute assigns namespaces.
type VirtualAppRoute struct {
	// GlobalLimits limit all subsets to the namespaces or objects that every entry matches.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	GlobalLimits []MatchLimitSelector `json:"globalLimits,omitempty"`
	// SubRules match the namespaces of subsets, which refer to them by name.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=name
	SubRules []SubRule `json:"subRules,omitempty"`
	// SubsetPublicResources are resources that every subset reads and writes in all
	// namespaces.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	SubsetPublicResources []APIGroupResource `json:"subsetPublicResources,omitempty"`
	// SubsetDefaultOnlyUserAgents are User-Agents whose requests only the default subset may
	// send.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=256
	SubsetDefaultOnlyUserAgents []string `json:"subsetDefaultOnlyUserAgents,omitempty"`
}

// SubRule matches namespaces.
type SubRule struct {
	// Name of the rule.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// Match lists what the rule matches: a namespace that any entry matches.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	Match []MatchLimitSelector `json:"match"`
}

// MatchLimitSelector matches namespaces or objects in one way.
//
// +kubebuilder:validation:XValidation:rule="[has(self.namespaceSelector), has(self.namespaceRegex), has(self.objectSelector)].filter(x, x).size() == 1",message="set one of namespaceSelector, namespaceRegex and objectSelector"
// +kubebuilder:validation:XValidation:rule="!has(self.objectSelector) || (has(self.resources) && size(self.resources) > 0)",message="objectSelector requires resources: list whose labels it selects"
type MatchLimitSelector struct {
	// NamespaceSelector matches labels of namespaces.
	// +optional
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	// NamespaceRegex is a regular expression (RE2) that the names of namespaces contain a
	// match of, such as "^canary.*".
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	NamespaceRegex *string `json:"namespaceRegex,omitempty"`
	// ObjectSelector matches labels of objects. It narrows lists and watches alone.
	// +optional
	ObjectSelector *metav1.LabelSelector `json:"objectSelector,omitempty"`
	// Resources are what the entry concerns. The default is all.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Resources []APIGroupResource `json:"resources,omitempty"`
}

// APIGroupResource lists resources of API groups.
type APIGroupResource struct {
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
}

// VirtualAppSubset is a group of pods that owns namespaces.
type VirtualAppSubset struct {
	// Name of the subset.
	// +kubebuilder:validation:MaxLength=40
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self != 'default'",message="the subset of all other pods has the name default: choose another"
	Name string `json:"name"`
	// Labels are the labels of its pods. A pod belongs to the first subset whose labels it
	// has. A pod whose labels change is restarted.
	// +kubebuilder:validation:MinProperties=1
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(key, size(key) <= 317 && size(self[key]) <= 63)",message="a label has a key of at most 317 and a value of at most 63 characters"
	Labels map[string]string `json:"labels"`
	// RouteRules are the names of the rules that match its namespaces. A rule belongs to one
	// subset.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=253
	// +listType=set
	RouteRules []string `json:"routeRules"`
}

// VirtualAppList is a list of VirtualApps.
//
// +kubebuilder:object:root=true
type VirtualAppList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []VirtualApp `json:"items"`
}
