package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// TrafficPolicy refuses and limits requests of the pods of VirtualApps to the apiserver. It is
// translated to CircuitBreakers.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,categories=ctrlmesh
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.pods`
// +kubebuilder:printcolumn:name="In force",type=integer,JSONPath=`.status.podsInForce`
// +kubebuilder:printcolumn:name="Refused",type=integer,JSONPath=`.status.refused`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type TrafficPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is the desired state.
	Spec TrafficPolicySpec `json:"spec"`
	// Status is the observed state.
	// +optional
	Status v1alpha1.CircuitBreakerStatus `json:"status,omitempty"`
}

// TrafficPolicySpec is the desired state of a TrafficPolicy.
type TrafficPolicySpec struct {
	// TargetVirtualApps are the VirtualApps in this object's namespace whose pods it concerns.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	TargetVirtualApps []TargetVirtualApp `json:"targetVirtualApps"`
	// CircuitBreaking refuses requests.
	// +optional
	CircuitBreaking *CircuitBreaking `json:"circuitBreaking,omitempty"`
	// RateLimiting limits requests.
	// +optional
	RateLimiting *RateLimiting `json:"rateLimiting,omitempty"`
}

// TargetVirtualApp names a VirtualApp and subsets of it.
type TargetVirtualApp struct {
	// Name of the VirtualApp; "*" is all.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// SpecificSubsets are names of subsets; "" is the default subset, "*" is all. If the list
	// is empty, all.
	// +optional
	// +kubebuilder:validation:MaxItems=33
	// +kubebuilder:validation:items:MaxLength=63
	SpecificSubsets []string `json:"specificSubsets,omitempty"`
}

// CircuitBreaking refuses requests.
type CircuitBreaking struct {
	// APIServer matches the requests to the apiserver that are refused.
	// +optional
	APIServer *APIServerRules `json:"apiServer,omitempty"`
	// Webhook matches the admission reviews that are refused. It is accepted for
	// compatibility and has no effect.
	// +optional
	Webhook *WebhookRules `json:"webhook,omitempty"`
}

// APIServerRules match requests to the apiserver: those that any rule matches.
type APIServerRules struct {
	// ResourceRules match requests for resources.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ResourceRules []ResourceRule `json:"resourceRules,omitempty"`
	// NonResourceRules match other requests.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	NonResourceRules []NonResourceRule `json:"nonResourceRules,omitempty"`
}

// ResourceRule matches requests for resources.
//
// +kubebuilder:validation:XValidation:rule="(has(self.clusterScope) && self.clusterScope) || (has(self.namespaces) && size(self.namespaces) > 0)",message="list namespaces, or set clusterScope"
type ResourceRule struct {
	// Verbs of the requests; "*" alone is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum="*";get;list;watch;create;update;patch;delete;deletecollection;proxy
	Verbs []string `json:"verbs"`
	// APIGroups are the names of API groups. "" is the core group, "*" alone is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups"`
	// Resources are such as "pods" and "pods/status"; "*" alone is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^(\*|[a-z0-9.-]+(/[a-z0-9.-]+)?)$`
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources"`
	// ClusterScope adds the requests that name no namespace: those for cluster-scoped objects
	// and for all namespaces.
	// +optional
	ClusterScope bool `json:"clusterScope,omitempty"`
	// Namespaces of the requests; "*" alone is all requests that name a namespace.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Namespaces []string `json:"namespaces,omitempty"`
}

// NonResourceRule matches requests for paths that are not resources.
type NonResourceRule struct {
	// Verbs are HTTP methods in lower case; "*" alone is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum="*";get;head;post;put;patch;delete;options
	Verbs []string `json:"verbs"`
	// NonResourceURLs are paths, each with those below it; "*" is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=1024
	// +kubebuilder:validation:items:Pattern=`^(/[^*]*\*?|\*)$`
	NonResourceURLs []string `json:"nonResourceURLs"`
}

// WebhookRules match admission reviews.
type WebhookRules struct {
	// AdmissionRules match admission reviews.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	AdmissionRules []AdmissionRule `json:"admissionRules,omitempty"`
}

// AdmissionRule matches admission reviews by operation and resource.
type AdmissionRule struct {
	// Operations of the reviews; "*" is all.
	// +optional
	// +kubebuilder:validation:MaxItems=5
	// +kubebuilder:validation:items:Enum="*";CREATE;UPDATE;DELETE;CONNECT
	Operations []string `json:"operations,omitempty"`
	// APIGroups are the names of API groups. "" is the core group, "*" alone is all.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups,omitempty"`
	// APIVersions are the versions of the groups; "*" alone is all.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=63
	APIVersions []string `json:"apiVersions,omitempty"`
	// Resources are such as "pods" and "pods/status"; "*" is all resources, "*/*" is all
	// resources and subresources.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources,omitempty"`
	// Scope of the resources.
	// +optional
	// +kubebuilder:validation:Enum="*";Cluster;Namespaced
	Scope *string `json:"scope,omitempty"`
}

// RateLimiting limits requests.
type RateLimiting struct {
	// RatePolicies are limits. A request must be within all that match it.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	RatePolicies []RatePolicy `json:"ratePolicies,omitempty"`
}

// RatePolicy limits the requests that match its rules.
type RatePolicy struct {
	// Rules match the requests that are limited.
	Rules APIServerRules `json:"rules"`
	// MaxInFlight is the maximum number of requests in flight. Watches do not count.
	// +optional
	// +kubebuilder:validation:Minimum=1
	MaxInFlight *int32 `json:"maxInFlight,omitempty"`
	// Bucket limits the rate of requests.
	// +optional
	Bucket *RateBucket `json:"bucket,omitempty"`
	// ExponentialBackoff refuses requests for a while after consecutive failures.
	// +optional
	ExponentialBackoff *ExponentialBackoff `json:"exponentialBackoff,omitempty"`
}

// RateBucket is a token bucket. A request takes one token.
type RateBucket struct {
	// QPS is the number of tokens that each second adds.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	QPS int32 `json:"qps"`
	// Burst is the maximum number of tokens.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	Burst int32 `json:"burst"`
}

// ExponentialBackoff refuses requests for the base delay after a number of consecutive
// failures, and twice as long after each further failure.
//
// +kubebuilder:validation:XValidation:rule="self.maxDelayInMillisecond >= self.baseDelayInMillisecond",message="maxDelayInMillisecond must not be less than baseDelayInMillisecond"
type ExponentialBackoff struct {
	// BaseDelayInMillisecond is the first delay.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600000
	BaseDelayInMillisecond int32 `json:"baseDelayInMillisecond"`
	// MaxDelayInMillisecond is the longest delay.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600000
	MaxDelayInMillisecond int32 `json:"maxDelayInMillisecond"`
	// ContinuouslyFailureTimes is the number of consecutive failures. The default is 1.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ContinuouslyFailureTimes int32 `json:"continuouslyFailureTimes,omitempty"`
}

// TrafficPolicyList is a list of TrafficPolicies.
//
// +kubebuilder:object:root=true
type TrafficPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []TrafficPolicy `json:"items"`
}
