package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CircuitBreaker limits the requests of the selected pods to the apiserver and to other
// hosts, and stops them when they exceed a limit.
//
// For each request, the most specific rule alone applies: the one with the fewest
// wildcards, and of several with equally few the first one. Missing userAgents and a
// missing podSelector count as one wildcard each. A request that matches no rule passes.
// If several CircuitBreakers select a pod, a request must pass all of them.
//
// Leader-election locks are exempt unless names of a rule lists the lock.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=cbk,categories=ctrlmesh
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.pods`
// +kubebuilder:printcolumn:name="In force",type=integer,JSONPath=`.status.podsInForce`
// +kubebuilder:printcolumn:name="Opened",type=integer,JSONPath=`.status.opened`
// +kubebuilder:printcolumn:name="Refused",type=integer,JSONPath=`.status.refused`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type CircuitBreaker struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is the desired state.
	Spec CircuitBreakerSpec `json:"spec"`
	// Status is the observed state.
	// +optional
	Status CircuitBreakerStatus `json:"status,omitempty"`
}

// CircuitBreakerSpec is the desired state of a CircuitBreaker.
type CircuitBreakerSpec struct {
	// Selector selects pods in this object's namespace. An empty selector selects all pods
	// that are on the mesh.
	Selector *metav1.LabelSelector `json:"selector"`

	// Disabled turns all rules off.
	// +optional
	Disabled bool `json:"disabled,omitempty"`

	// RateLimitings are the rules that limit requests.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	RateLimitings []Limiting `json:"rateLimitings,omitempty"`

	// TrafficInterceptRules allow and deny requests to other hosts than the apiserver.
	// A request that a Blacklist matches is denied. Otherwise, a request that a Whitelist
	// matches passes. All other requests pass if there is no Whitelist, and are denied if
	// there is one.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	TrafficInterceptRules []TrafficInterceptRule `json:"trafficInterceptRules,omitempty"`

	// Egress configures the redirection of connections to other hosts. It applies if some
	// rule matches requests to other hosts.
	// +optional
	Egress *EgressConfig `json:"egress,omitempty"`
}

// Limiting limits the requests that match one of its rules.
//
// +kubebuilder:validation:XValidation:rule="(has(self.resourceRules) && size(self.resourceRules) > 0) || (has(self.nonResourceRules) && size(self.nonResourceRules) > 0) || (has(self.restRules) && size(self.restRules) > 0)",message="list what is limited in resourceRules, nonResourceRules or restRules"
// +kubebuilder:validation:XValidation:rule="has(self.bucket) || has(self.maxInFlight) || has(self.exponentialBackoff) || has(self.trip) || (has(self.triggerPolicy) && self.triggerPolicy.startsWith('Force'))",message="set a limit: bucket, maxInFlight, exponentialBackoff or trip"
type Limiting struct {
	// Name of the rule, which refusals and metrics show.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[\\\\pL\\\\pM\\\\pN\\\\pP\\\\pS ]+$')",message="must be printable text"
	Name string `json:"name"`

	// ResourceRules match requests for resources of the apiserver.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ResourceRules []ResourceRule `json:"resourceRules,omitempty"`

	// NonResourceRules match other requests to the apiserver.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	NonResourceRules []NonResourceRule `json:"nonResourceRules,omitempty"`

	// RestRules match requests to other hosts. Requests over HTTPS are counted one by one
	// only in pods that opted in by the annotation trust-egress. In other pods each
	// connection counts as one request, and trip.slowPercent does not apply.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	RestRules []RestRule `json:"restRules,omitempty"`

	// UserAgents restricts the rule to requests with one of these User-Agents: an exact
	// value, or a prefix that ends with "*". Encrypted requests that are not decrypted
	// never match.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=256
	UserAgents []string `json:"userAgents,omitempty"`

	// PodSelector restricts the rule to selected pods with these labels.
	// +optional
	PodSelector *metav1.LabelSelector `json:"podSelector,omitempty"`

	// Bucket limits the rate of requests.
	// +optional
	Bucket *Bucket `json:"bucket,omitempty"`

	// MaxInFlight is the maximum number of requests in flight. Watches do not count.
	// +optional
	// +kubebuilder:validation:Minimum=1
	MaxInFlight *int32 `json:"maxInFlight,omitempty"`

	// ExponentialBackoff refuses requests for a while after consecutive failures.
	// +optional
	ExponentialBackoff *ExponentialBackoff `json:"exponentialBackoff,omitempty"`

	// Trip opens the breaker on errors and on slow responses.
	// +optional
	Trip *Trip `json:"trip,omitempty"`

	// Scope is whose requests share the bucket and maxInFlight. Pod: each pod has its own.
	// Workload: the selected pods of a workload share them. Each of n pods gets 1/n. If
	// burst is less than n, the pods take turns, and the bucket's limit must not be 0. Each
	// pod gets at least 1 of maxInFlight. Workloads are identified by name alone, so a
	// Deployment and a StatefulSet of the same name share.
	// +optional
	// +kubebuilder:default=Pod
	Scope LimitScope `json:"scope,omitempty"`

	// TriggerPolicy is what happens above the limit. Normal: the breaker opens, and all
	// requests are refused until it recovers. LimiterOnly: only requests above the limit are
	// refused. ForceOpened: all requests are refused, and open connections to other hosts
	// are closed. ForceClosed: all requests pass. If pods take turns in a bucket, an empty
	// bucket does not open the breaker.
	// +optional
	// +kubebuilder:default=Normal
	TriggerPolicy TriggerPolicy `json:"triggerPolicy,omitempty"`

	// RecoverPolicy is how an open breaker closes. The default is a SleepingWindow of 10s.
	// +optional
	RecoverPolicy *RecoverPolicy `json:"recoverPolicy,omitempty"`

	// Properties have no effect. They are kept for tools that read them.
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	Properties map[string]string `json:"properties,omitempty"`
}

// ResourceRule matches requests for resources. "*" in a list means all.
//
// +kubebuilder:validation:XValidation:rule="!has(self.scope) || self.scope != 'Cluster' || '*' in self.namespaces",message="requests of scope Cluster are in no namespace: set namespaces to [\"*\"]"
type ResourceRule struct {
	// APIGroups are the names of API groups; "" is the core group, "*" is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups"`
	// Resources are such as "pods", "pods/status", "pods/*" or "*/scale"; "*" is all resources
	// and subresources.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^(\*|[a-z0-9.-]+)(/(\*|[a-z0-9.-]+))?$`
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources"`
	// Verbs of the requests; "*" is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum="*";get;list;watch;create;update;patch;delete;deletecollection;proxy
	Verbs []string `json:"verbs"`
	// Namespaces of the objects. Only "*" matches requests for cluster-scoped objects or for
	// all namespaces.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Namespaces []string `json:"namespaces"`
	// Clusters restricts it to requests into member clusters of these names, see spec.clusters of
	// ShardingConfigs; "" is the cluster of the apiserver itself. If it is empty, all match.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Clusters []string `json:"clusters,omitempty"`
	// Scope restricts the rule to requests with or without a namespace in their path. A list
	// of all namespaces has none. A request for a Namespace has its name. The default is All.
	// Another value than All counts as half a wildcard less if namespaces has "*".
	// +optional
	Scope RequestScope `json:"scope,omitempty"`
	// Names of the objects; if empty, all. Requests for a single Lease, or for a shard's
	// lock, match by name only. Requests that create objects match no name, because the
	// name is in the body.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`
}

// NonResourceRule matches requests to the apiserver for paths that are not resources.
type NonResourceRule struct {
	// NonResourceURLs are exact paths, or prefixes that end with "*".
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^(/[^*]*\*?|\*)$`
	NonResourceURLs []string `json:"nonResourceURLs"`
	// Verbs are HTTP methods in lower case; "*" is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum="*";get;head;post;put;patch;delete;options
	Verbs []string `json:"verbs"`
}

// RestRule matches requests to other hosts.
type RestRule struct {
	// URL is [scheme://]host[:port][/path]. The host is an exact name, "*.domain" or "*". A
	// path that ends with "*" is a prefix. Without a path, or with "/*", all paths match.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	URL string `json:"url"`
	// Method is an HTTP method in upper case; empty or "*" is all.
	// +optional
	// +kubebuilder:validation:Pattern=`^(\*|[A-Za-z]*)$`
	Method string `json:"method,omitempty"`
}

// Bucket is a token bucket. It starts with burst tokens and gets limit more in each
// interval. A request takes one.
type Bucket struct {
	// Burst is the maximum number of tokens.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	Burst int64 `json:"burst"`
	// Interval in which limit tokens are added.
	// +kubebuilder:validation:XValidation:rule="duration(self) > duration('0s')",message="must be longer than 0s"
	Interval Duration `json:"interval"`
	// Limit is the number of tokens that each interval adds. With 0 the bucket is never
	// refilled.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	Limit int64 `json:"limit"`
}

// ExponentialBackoff refuses requests for the base delay after a number of consecutive
// failures, and twice as long after each further failure. Responses 5xx and 429 are
// failures, and so are requests without a response.
type ExponentialBackoff struct {
	// ContinuouslyFailureTimes is the number of consecutive failures.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	ContinuouslyFailureTimes int32 `json:"continuouslyFailureTimes,omitempty"`
	// BaseDelayInMillisecond is the first delay.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600000
	BaseDelayInMillisecond int32 `json:"baseDelayInMillisecond"`
	// MaxDelayInMillisecond is the longest delay.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600000
	MaxDelayInMillisecond int32 `json:"maxDelayInMillisecond"`
}

// Trip opens a breaker when a percentage of the requests that ended within the window
// failed or were slow. Responses 5xx and 429 are failures, and so are requests without a
// response; 404, 409 and 410 are not. Watches, logs and requests through proxy subresources
// are never slow. Of exec, attach and port-forward, only the time until they begin counts.
//
// +kubebuilder:validation:XValidation:rule="has(self.errorPercent) || has(self.slowPercent)",message="set errorPercent or slowPercent"
// +kubebuilder:validation:XValidation:rule="has(self.slowPercent) == has(self.slowCall)",message="slowPercent and slowCall go together"
type Trip struct {
	// Window is the length of the sliding window.
	// +optional
	// +kubebuilder:default="10s"
	Window Duration `json:"window,omitempty"`
	// MinRequests is the number of requests that must have ended within the window.
	// +optional
	// +kubebuilder:default=20
	// +kubebuilder:validation:Minimum=1
	MinRequests int32 `json:"minRequests,omitempty"`
	// ErrorPercent is the percentage of failed requests that opens the breaker.
	// +optional
	ErrorPercent Percent `json:"errorPercent,omitempty"`
	// SlowPercent is the percentage of slow requests that opens the breaker.
	// +optional
	SlowPercent Percent `json:"slowPercent,omitempty"`
	// SlowCall is the duration above which a request is slow.
	// +optional
	SlowCall Duration `json:"slowCall,omitempty"`
}

// LimitScope is whose requests share a limit.
//
// +kubebuilder:validation:Enum=Pod;Workload
type LimitScope string

// Values of LimitScope.
const (
	LimitScopePod      LimitScope = "Pod"
	LimitScopeWorkload LimitScope = "Workload"
)

// TriggerPolicy is what happens above a limit.
//
// +kubebuilder:validation:Enum=Normal;LimiterOnly;ForceOpened;ForceClosed
type TriggerPolicy string

// Values of TriggerPolicy.
const (
	TriggerNormal      TriggerPolicy = "Normal"
	TriggerLimiterOnly TriggerPolicy = "LimiterOnly"
	TriggerForceOpened TriggerPolicy = "ForceOpened"
	TriggerForceClosed TriggerPolicy = "ForceClosed"
)

// RecoverPolicy is how an open breaker closes.
//
// +kubebuilder:validation:XValidation:rule="self.type != 'Manual' || !has(self.sleepingWindowSize)",message="sleepingWindowSize is for type SleepingWindow"
type RecoverPolicy struct {
	// Type is SleepingWindow or Manual. SleepingWindow: after sleepingWindowSize one request
	// passes, and closes the breaker if it succeeds. Manual: the breaker closes when the
	// annotation ctrlmesh.kusionstack.io/recover of the CircuitBreaker changes.
	Type RecoverType `json:"type"`
	// SleepingWindowSize is how long the breaker stays open. The default is 10s.
	// +optional
	SleepingWindowSize *Duration `json:"sleepingWindowSize,omitempty"`
}

// RecoverType is what closes an open breaker.
//
// +kubebuilder:validation:Enum=Manual;SleepingWindow
type RecoverType string

// Values of RecoverType.
const (
	RecoverManual         RecoverType = "Manual"
	RecoverSleepingWindow RecoverType = "SleepingWindow"
)

// TrafficInterceptRule allows or denies requests to other hosts.
type TrafficInterceptRule struct {
	// Name of the rule, which refusals and logs show.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[\\\\pL\\\\pM\\\\pN\\\\pP\\\\pS ]+$')",message="must be printable text"
	Name string `json:"name"`
	// InterceptType is Whitelist, to allow, or Blacklist, to deny.
	InterceptType InterceptType `json:"interceptType"`
	// ContentType is the syntax of contents. Normal: host[:port][/path] with an exact path;
	// the host is an exact name, "*.domain" or "*". Prefix: the same, with a path prefix.
	// Regexp: an RE2 expression that must match the whole host, ignoring case and the port.
	// From its first "/" on it must match the whole path. Without a path, with the prefix
	// "/" or with the expression "/.*", all paths match.
	ContentType ContentType `json:"contentType"`
	// Contents are the hosts and paths that the rule matches, in the syntax of contentType.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=1024
	Contents []string `json:"contents"`
	// Methods are HTTP methods in upper case; empty or "*" is all.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Pattern=`^(\*|[A-Za-z]+)$`
	Methods []string `json:"methods,omitempty"`
}

// InterceptType is whether matching requests are allowed or denied.
//
// +kubebuilder:validation:Enum=Whitelist;Blacklist
type InterceptType string

// Values of InterceptType.
const (
	InterceptWhitelist InterceptType = "Whitelist"
	InterceptBlacklist InterceptType = "Blacklist"
)

// ContentType is the syntax of the contents of a rule.
//
// +kubebuilder:validation:Enum=Normal;Prefix;Regexp
type ContentType string

// Values of ContentType.
const (
	ContentNormal ContentType = "Normal"
	ContentPrefix ContentType = "Prefix"
	ContentRegexp ContentType = "Regexp"
)

// EgressConfig configures which connections to other hosts are redirected.
type EgressConfig struct {
	// Ports are the TCP ports whose connections are redirected. The default is 80 and 443.
	// UDP to the same ports is refused, because HTTP/3 would bypass the rules. If several
	// CircuitBreakers select a pod, the ports of all are redirected for all.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	Ports []int32 `json:"ports,omitempty"`
	// Unseen is what happens to connections that a rule cannot judge: TLS without a server
	// name or with an encrypted one (ECH), paths within TLS that is not decrypted, and
	// protocols other than HTTP. The default is Deny if there is a Whitelist, else Allow.
	// It applies to the rules of this CircuitBreaker alone.
	// +optional
	Unseen UnseenPolicy `json:"unseen,omitempty"`
}

// UnseenPolicy is what happens to connections that rules cannot judge.
//
// +kubebuilder:validation:Enum=Allow;Deny
type UnseenPolicy string

// Values of UnseenPolicy.
const (
	UnseenAllow UnseenPolicy = "Allow"
	UnseenDeny  UnseenPolicy = "Deny"
)

// CircuitBreakerStatus is the observed state of a CircuitBreaker.
type CircuitBreakerStatus struct {
	// ObservedGeneration is the generation of the spec that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// LastUpdatedTime is when another field of this status last changed.
	// +optional
	LastUpdatedTime *metav1.Time `json:"lastUpdatedTime,omitempty"`
	// CurrentSpecHash is the hash of the spec. A pod to which the spec applies has it in
	// targetStatus.configHash.
	// +optional
	CurrentSpecHash string `json:"currentSpecHash,omitempty"`
	// Conditions has the type Ready.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Pods is the number of selected pods.
	Pods int32 `json:"pods"`
	// PodsInForce is the number of selected pods to which the spec applies.
	PodsInForce int32 `json:"podsInForce"`
	// Opened is the number of pods with a breaker that is not closed.
	Opened int32 `json:"opened"`
	// Refused is the number of refused requests of the current pods.
	Refused int64 `json:"refused"`
	// TargetStatus describes each selected pod, at most 200.
	// +optional
	// +listType=atomic
	TargetStatus []TargetStatus `json:"targetStatus,omitempty"`
	// Shares are the parts of rules of scope Workload that pods may use, including pods that
	// are no longer selected. They outlive the manager: a pod gets no part that is not
	// recorded here.
	// +optional
	// +listType=atomic
	Shares []RuleShares `json:"shares,omitempty"`
}

// RuleShares are the parts of some rules that pods may use.
type RuleShares struct {
	// Rules are the names of the rules.
	// +listType=atomic
	Rules []string `json:"rules"`
	// Pods are the shares by pod name, as in limitingSnapshots.share.
	// +mapType=atomic
	Pods map[string]string `json:"pods"`
}

// CircuitBreakerList is a list of CircuitBreakers.
//
// +kubebuilder:object:root=true
type CircuitBreakerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []CircuitBreaker `json:"items"`
}
