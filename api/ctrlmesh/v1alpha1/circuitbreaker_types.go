package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CircuitBreaker limits what the pods that it selects may ask of the apiserver and of
// other hosts, and cuts them off when it is too much.
//
// Of its rules the one that names a request most specifically decides about it, alone:
// the one with the fewest wildcards, and of those with as few the one written first.
// A rule without userAgents has one wildcard for that, and one without podSelector.
// A request that no rule matches passes. Where several CircuitBreakers select a pod,
// each decides so, and all must let a request pass.
//
// Leader-election locks are exempt unless a rule has the lock's name in names.
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

	Spec CircuitBreakerSpec `json:"spec"`
	// +optional
	Status CircuitBreakerStatus `json:"status,omitempty"`
}

// CircuitBreakerSpec is what a user asks of a CircuitBreaker.
type CircuitBreakerSpec struct {
	// Selector names the pods, in this object's namespace. An empty one selects all that
	// are on the mesh.
	Selector *metav1.LabelSelector `json:"selector"`

	// Disabled takes all effect away.
	// +optional
	Disabled bool `json:"disabled,omitempty"`

	// RateLimitings limit requests.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	RateLimitings []Limiting `json:"rateLimitings,omitempty"`

	// TrafficInterceptRules allow and deny requests to other hosts than the apiserver.
	// What a Blacklist matches is refused; of the rest what a Whitelist matches passes;
	// of the rest all is refused if there is any Whitelist, else all passes.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	TrafficInterceptRules []TrafficInterceptRule `json:"trafficInterceptRules,omitempty"`

	// Egress says more about requests to other hosts. It counts where a rule is about
	// those.
	// +optional
	Egress *EgressConfig `json:"egress,omitempty"`
}

// Limiting is a limit on the requests that one of its rules matches.
//
// +kubebuilder:validation:XValidation:rule="(has(self.resourceRules) && size(self.resourceRules) > 0) || (has(self.nonResourceRules) && size(self.nonResourceRules) > 0) || (has(self.restRules) && size(self.restRules) > 0)",message="list what is limited in resourceRules, nonResourceRules or restRules"
// +kubebuilder:validation:XValidation:rule="has(self.bucket) || has(self.maxInFlight) || has(self.exponentialBackoff) || has(self.trip) || (has(self.triggerPolicy) && self.triggerPolicy.startsWith('Force'))",message="set a limit: bucket, maxInFlight, exponentialBackoff or trip"
type Limiting struct {
	// Name is told to whoever is refused.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`

	// ResourceRules match requests for resources of the apiserver.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ResourceRules []ResourceRule `json:"resourceRules,omitempty"`

	// NonResourceRules match other requests to the apiserver.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	NonResourceRules []NonResourceRule `json:"nonResourceRules,omitempty"`

	// RestRules match requests to other hosts. Those in https are seen, and counted, only in
	// pods that opted in by the annotation trust-egress; elsewhere connections are, and
	// trip.slowPercent sees none.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	RestRules []RestRule `json:"restRules,omitempty"`

	// UserAgents limits the rule to requests with one of these User-Agents: exact, or
	// a prefix that ends with "*". Only of HTTP that is seen.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=256
	UserAgents []string `json:"userAgents,omitempty"`

	// PodSelector limits the rule to those of the selected pods that have these labels.
	// +optional
	PodSelector *metav1.LabelSelector `json:"podSelector,omitempty"`

	// Bucket is how many requests pass.
	// +optional
	Bucket *Bucket `json:"bucket,omitempty"`

	// MaxInFlight is how many requests may be under way at once. Watches do not count.
	// +optional
	// +kubebuilder:validation:Minimum=1
	MaxInFlight *int32 `json:"maxInFlight,omitempty"`

	// ExponentialBackoff refuses for a while after failures in a row.
	// +optional
	ExponentialBackoff *ExponentialBackoff `json:"exponentialBackoff,omitempty"`

	// Trip opens the breaker on errors and on slow answers.
	// +optional
	Trip *Trip `json:"trip,omitempty"`

	// Scope says whose bucket and requests in flight are counted together: Pod, or
	// Workload for all selected members of the pod's workload. Each of n members has one
	// n-th; of a burst that is less than their number, each has its turn in time, so that
	// the bucket's limit must not be 0; of maxInFlight each has at least one. The workload
	// is known by its name: a Deployment and a StatefulSet of one name count together.
	// +optional
	// +kubebuilder:default=Pod
	Scope LimitScope `json:"scope,omitempty"`

	// TriggerPolicy says what happens beyond the limit. Normal: the breaker opens and
	// refuses all until it recovers. LimiterOnly: what is beyond is refused.
	// ForceOpened: all is refused, and what is under way to other hosts is cut.
	// ForceClosed: all passes. Where members take turns in a bucket, an empty one opens
	// nothing, with Normal too.
	// +optional
	// +kubebuilder:default=Normal
	TriggerPolicy TriggerPolicy `json:"triggerPolicy,omitempty"`

	// RecoverPolicy says how an opened breaker closes. Without it: as SleepingWindow
	// of 10s.
	// +optional
	RecoverPolicy *RecoverPolicy `json:"recoverPolicy,omitempty"`

	// Properties are carried and mean nothing.
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	Properties map[string]string `json:"properties,omitempty"`
}

// ResourceRule matches requests for resources. "*" in a list means all.
type ResourceRule struct {
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups"`
	// Resources are "pods", "pods/status", "pods/*", "*/scale"; "*" is all, subresources too.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^(\*|[a-z0-9.-]+)(/(\*|[a-z0-9.-]+))?$`
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources"`
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum="*";get;list;watch;create;update;patch;delete;deletecollection;proxy
	Verbs []string `json:"verbs"`
	// Namespaces of the objects; those of cluster-scoped ones and of requests for all
	// namespaces are matched by "*" alone.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Namespaces []string `json:"namespaces"`
	// Names of the objects. Without it: of any. Requests for single leases, and for a shard's
	// lock, are matched by theirs alone; what is created, by no name, which is in the body.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`
}

// NonResourceRule matches requests to the apiserver for other than resources.
type NonResourceRule struct {
	// NonResourceURLs are paths, exact or as prefixes that end with "*".
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^(/[^*]*\*?|\*)$`
	NonResourceURLs []string `json:"nonResourceURLs"`
	// Verbs are methods in lower case; "*" is all.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum="*";get;head;post;put;patch;delete;options
	Verbs []string `json:"verbs"`
}

// RestRule matches requests to other hosts.
type RestRule struct {
	// URL is [scheme://]host[:port][/path]. The host is exact, "*.domain" or "*"; a path
	// that ends with "*" is a prefix, and without one, or with "/*", all paths match.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	URL string `json:"url"`
	// Method in upper case; empty or "*" for all.
	// +optional
	// +kubebuilder:validation:Pattern=`^(\*|[A-Za-z]*)$`
	Method string `json:"method,omitempty"`
}

// Bucket holds burst tokens at first, and gets limit more in each interval. A request
// takes one.
type Bucket struct {
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	Burst int64 `json:"burst"`
	// +kubebuilder:validation:XValidation:rule="duration(self) > duration('0s')",message="must be longer than 0s"
	Interval Duration `json:"interval"`
	// Limit of 0 never adds any.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	Limit int64 `json:"limit"`
}

// ExponentialBackoff refuses for baseDelay after so many failures in a row, and twice
// as long after each further one. Answers 5xx and 429 are failures, and requests
// that are not answered.
type ExponentialBackoff struct {
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	ContinuouslyFailureTimes int32 `json:"continuouslyFailureTimes,omitempty"`
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600000
	BaseDelayInMillisecond int32 `json:"baseDelayInMillisecond"`
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600000
	MaxDelayInMillisecond int32 `json:"maxDelayInMillisecond"`
}

// Trip opens a breaker when of the requests that ended within window a part failed or
// was slow. Answers 5xx and 429 are failures, and requests that are not answered;
// 404, 409 and 410 are none. None is slow of watches, logs, and what goes on through the
// proxy subresources; exec, attach and port-forward are until they begin.
//
// +kubebuilder:validation:XValidation:rule="has(self.errorPercent) || has(self.slowPercent)",message="set errorPercent or slowPercent"
// +kubebuilder:validation:XValidation:rule="has(self.slowPercent) == has(self.slowCall)",message="slowPercent and slowCall go together"
type Trip struct {
	// +optional
	// +kubebuilder:default="10s"
	Window Duration `json:"window,omitempty"`
	// MinRequests is how many must have ended in the window.
	// +optional
	// +kubebuilder:default=20
	// +kubebuilder:validation:Minimum=1
	MinRequests int32 `json:"minRequests,omitempty"`
	// ErrorPercent of them fail.
	// +optional
	ErrorPercent Percent `json:"errorPercent,omitempty"`
	// SlowPercent of them take longer than slowCall.
	// +optional
	SlowPercent Percent `json:"slowPercent,omitempty"`
	// +optional
	SlowCall Duration `json:"slowCall,omitempty"`
}

// LimitScope says whose requests are counted together.
//
// +kubebuilder:validation:Enum=Pod;Workload
type LimitScope string

// Values of LimitScope.
const (
	LimitScopePod      LimitScope = "Pod"
	LimitScopeWorkload LimitScope = "Workload"
)

// TriggerPolicy says what happens beyond a limit.
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

// RecoverPolicy says how an opened breaker closes.
//
// +kubebuilder:validation:XValidation:rule="self.type != 'Manual' || !has(self.sleepingWindowSize)",message="sleepingWindowSize is for type SleepingWindow"
type RecoverPolicy struct {
	// Type is SleepingWindow: after sleepingWindowSize one request is let through, and
	// closes the breaker if it succeeds. Or Manual: the breaker closes when the
	// annotation ctrlmesh.kusionstack.io/recover of the CircuitBreaker changes.
	Type RecoverType `json:"type"`
	// SleepingWindowSize is 10s if it is not given.
	// +optional
	SleepingWindowSize *Duration `json:"sleepingWindowSize,omitempty"`
}

// RecoverType says what an opened breaker waits for.
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
	// Name is told to whoever is refused.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// InterceptType is Whitelist, to allow, or Blacklist, to deny.
	InterceptType InterceptType `json:"interceptType"`
	// ContentType says how contents are read. Normal: host[:port][/path], where the host
	// is exact, "*.domain" or "*", and the path is exact. Prefix: the path is a
	// prefix. Regexp: an RE2 expression that matches all of the host, in upper or lower
	// case and without a port, and, from its first "/" on, one that matches all of the
	// path. A prefix "/" and an expression "/.*" are any path, as none is.
	ContentType ContentType `json:"contentType"`
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=1024
	Contents []string `json:"contents"`
	// Methods in upper case; empty or "*" for all.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Pattern=`^(\*|[A-Za-z]+)$`
	Methods []string `json:"methods,omitempty"`
}

// InterceptType says what becomes of what a rule matches.
//
// +kubebuilder:validation:Enum=Whitelist;Blacklist
type InterceptType string

// Values of InterceptType.
const (
	InterceptWhitelist InterceptType = "Whitelist"
	InterceptBlacklist InterceptType = "Blacklist"
)

// ContentType says how the contents of a rule are read.
//
// +kubebuilder:validation:Enum=Normal;Prefix;Regexp
type ContentType string

// Values of ContentType.
const (
	ContentNormal ContentType = "Normal"
	ContentPrefix ContentType = "Prefix"
	ContentRegexp ContentType = "Regexp"
)

// EgressConfig says which connections to other hosts rules see.
type EgressConfig struct {
	// Ports are the TCP ports whose connections are redirected; 80 and 443 if none are
	// given. UDP to the same ports is refused, for HTTP/3 would go around. Where several
	// CircuitBreakers select a pod, the ports of all are redirected, and each sees all.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	Ports []int32 `json:"ports,omitempty"`
	// Unseen says what becomes of connections that a rule would have to decide about by
	// something that cannot be seen: TLS without a server name or with an encrypted one
	// (ECH), paths within TLS that is not decrypted, what is not HTTP. Deny if it is
	// not given and there is a Whitelist, else Allow. It is for the rules of this
	// CircuitBreaker alone.
	// +optional
	Unseen UnseenPolicy `json:"unseen,omitempty"`
}

// UnseenPolicy says what becomes of what cannot be seen.
//
// +kubebuilder:validation:Enum=Allow;Deny
type UnseenPolicy string

// Values of UnseenPolicy.
const (
	UnseenAllow UnseenPolicy = "Allow"
	UnseenDeny  UnseenPolicy = "Deny"
)

// CircuitBreakerStatus is how a CircuitBreaker fares.
type CircuitBreakerStatus struct {
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// LastUpdatedTime is when anything else of this status changed.
	// +optional
	LastUpdatedTime *metav1.Time `json:"lastUpdatedTime,omitempty"`
	// CurrentSpecHash is what TargetStatus.configHash is when a pod has the spec in force.
	// +optional
	CurrentSpecHash string `json:"currentSpecHash,omitempty"`
	// Conditions: Ready.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Pods that are selected.
	Pods int32 `json:"pods"`
	// PodsInForce are those of them in which the spec is in force.
	PodsInForce int32 `json:"podsInForce"`
	// Opened counts the pods in which a breaker is not closed.
	Opened int32 `json:"opened"`
	// Refused counts requests, of the pods that there are now.
	Refused int64 `json:"refused"`
	// TargetStatus is by pod, of 200 at most.
	// +optional
	// +listType=atomic
	TargetStatus []TargetStatus `json:"targetStatus,omitempty"`
	// Shares are the parts of rules of scope Workload that pods may have, of those too
	// that are selected no more. They outlive the manager: nobody is given a part that is
	// not here.
	// +optional
	// +listType=atomic
	Shares []RuleShares `json:"shares,omitempty"`
}

// RuleShares are the parts that pods may have of each of some rules.
type RuleShares struct {
	// +listType=atomic
	Rules []string `json:"rules"`
	// Pods are those that may have any, with what LimitingSnapshot.share says.
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
