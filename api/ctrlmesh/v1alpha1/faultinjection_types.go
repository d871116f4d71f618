package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FaultInjection injects faults into requests of the selected pods, to test how they behave.
//
// All rules that match a request apply: delays add up. Of faults that exclude each other
// the first one applies, by the name of the object and the order of the rules.
// Leader-election locks are exempt unless names of a rule lists the lock. Pods and objects
// in namespaces with the label ctrlmesh.kusionstack.io/no-faults are exempt. Lists and
// watches of all namespaces are not, but events of exempt objects are neither delayed,
// dropped nor duplicated.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=fj,categories=ctrlmesh
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.pods`
// +kubebuilder:printcolumn:name="In force",type=integer,JSONPath=`.status.podsInForce`
// +kubebuilder:printcolumn:name="Injected",type=integer,JSONPath=`.status.injected`
// +kubebuilder:printcolumn:name="Expires",type=string,format=date-time,JSONPath=`.status.expirationTime`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type FaultInjection struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is the desired state.
	Spec FaultInjectionSpec `json:"spec"`
	// Status is the observed state.
	// +optional
	Status FaultInjectionStatus `json:"status,omitempty"`
}

// FaultInjectionSpec is the desired state of a FaultInjection.
type FaultInjectionSpec struct {
	// Selector selects pods in this object's namespace. An empty selector selects all pods
	// that are on the mesh.
	Selector *metav1.LabelSelector `json:"selector"`

	// Disabled turns all rules off.
	// +optional
	Disabled bool `json:"disabled,omitempty"`

	// Duration is how long the rules apply, from when the mesh first observes this spec. The
	// default is until the object is deleted.
	// +optional
	Duration *Duration `json:"duration,omitempty"`

	// HTTPFaultInjections are the rules that inject faults.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	HTTPFaultInjections []HTTPFaultInjection `json:"httpFault,omitempty"`

	// Egress configures the redirection of connections to other hosts. It applies if a rule
	// has httpMatch.
	// +optional
	Egress *FaultEgress `json:"egress,omitempty"`
}

// FaultEgress configures which connections to other hosts are redirected.
type FaultEgress struct {
	// Ports are the TCP ports whose connections are redirected. The default is 80 and 443.
	// UDP to the same ports is refused, because HTTP/3 would bypass the rules. The ports of
	// all CircuitBreakers and FaultInjections that select a pod are redirected.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	Ports []int32 `json:"ports,omitempty"`
}

// HTTPFaultInjection is a rule: which faults are injected into which requests, and when.
//
// +kubebuilder:validation:XValidation:rule="has(self.delay) || has(self.abort) || has(self.reset) || has(self.truncate) || has(self.slowBody) || has(self.staleList) || has(self.watch)",message="set a fault: delay, abort, reset, truncate, slowBody, staleList or watch"
type HTTPFaultInjection struct {
	// Name of the rule, which injected errors and metrics show.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[\\\\pL\\\\pM\\\\pN\\\\pP\\\\pS ]+$')",message="must be printable text"
	Name string `json:"name"`

	// Match selects requests. The default is all requests to the apiserver.
	// +optional
	Match *FaultMatch `json:"match,omitempty"`

	// EffectiveTime is when the rule applies. The default is always.
	// +optional
	EffectiveTime *EffectiveTimeRange `json:"effectiveTime,omitempty"`

	// Seed makes runs repeatable: the same requests in the same order get the same faults in
	// each selected pod, while the object and the rule keep their names. Without a seed,
	// each pod gets different faults.
	// +optional
	Seed *int64 `json:"seed,omitempty"`

	// Count is the maximum number of requests of each pod that get a fault. The default is
	// no maximum.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Count *int64 `json:"count,omitempty"`

	// Delay delays requests before they are forwarded.
	// +optional
	Delay *FaultDelay `json:"delay,omitempty"`
	// Abort answers requests with an error instead of forwarding them.
	// +optional
	Abort *FaultAbort `json:"abort,omitempty"`
	// Reset resets connections.
	// +optional
	Reset *FaultReset `json:"reset,omitempty"`
	// Truncate ends responses within their bodies.
	// +optional
	Truncate *FaultTruncate `json:"truncate,omitempty"`
	// SlowBody sends the bodies of responses slowly.
	// +optional
	SlowBody *FaultSlowBody `json:"slowBody,omitempty"`
	// StaleList answers lists of resources with an earlier state.
	// +optional
	StaleList *FaultStaleList `json:"staleList,omitempty"`
	// Watch injects faults into watches of resources. The clients' caches become consistent
	// in the end.
	// +optional
	Watch *FaultWatch `json:"watch,omitempty"`
}

// FaultMatch matches a request that one of its entries matches. Without entries it matches
// all requests to the apiserver.
type FaultMatch struct {
	// Resources match requests for resources of the apiserver.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Resources []FaultResourceMatch `json:"resources,omitempty"`
	// NonResourceRules match other requests to the apiserver, such as discovery.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	NonResourceRules []NonResourceRule `json:"nonResourceRules,omitempty"`
	// HTTPMatch matches requests to other hosts at the ports of spec.egress. Requests over
	// HTTPS are matched one by one only in pods that opted in by the annotation
	// trust-egress. In other pods the rule applies to each connection, and abort refuses it.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	HTTPMatch []FaultHTTPMatch `json:"httpMatch,omitempty"`
}

// FaultResourceMatch matches requests for resources. An empty list matches all, as a list
// with "*" does.
//
// +kubebuilder:validation:XValidation:rule="!has(self.scope) || self.scope != 'Cluster' || !has(self.namespaces) || size(self.namespaces) == 0 || '*' in self.namespaces",message="requests of scope Cluster are in no namespace: remove namespaces"
type FaultResourceMatch struct {
	// APIGroups are the names of API groups; "" is the core group.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups,omitempty"`
	// Resources are such as "pods", "pods/status", "pods/*" or "*/scale"; "*" is all resources
	// and subresources.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^(\*|[a-z0-9.-]+)(/(\*|[a-z0-9.-]+))?$`
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources,omitempty"`
	// Verbs of the requests.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum="*";get;list;watch;create;update;patch;delete;deletecollection;proxy
	Verbs []string `json:"verbs,omitempty"`
	// Namespaces of the objects.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Namespaces []string `json:"namespaces,omitempty"`
	// Clusters restricts it to requests into member clusters of these names, see spec.clusters of
	// ShardingConfigs; "" is the cluster of the apiserver itself. If it is empty, all match.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Clusters []string `json:"clusters,omitempty"`
	// Scope restricts the entry to requests with or without a namespace in their path. A list
	// of all namespaces has none. A request for a Namespace has its name. The default is All.
	// +optional
	Scope RequestScope `json:"scope,omitempty"`
	// Names of the objects. Requests for a single Lease, or for a shard's lock, match by name
	// only. Requests that create objects match no name, because the name is in the body.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`
	// Headers that the request must have, all of them.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	Headers []HeaderMatch `json:"headers,omitempty"`
}

// FaultHTTPMatch matches requests to other hosts that match all of its fields.
type FaultHTTPMatch struct {
	// Host of the request, without its port.
	// +optional
	Host *StringMatch `json:"host,omitempty"`
	// Path of the request, without its query.
	// +optional
	Path *StringMatch `json:"path,omitempty"`
	// Method is an HTTP method in upper case; empty or "*" is all.
	// +optional
	// +kubebuilder:validation:Pattern=`^(\*|[A-Za-z]*)$`
	Method string `json:"method,omitempty"`
	// Headers that the request must have, all of them.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	Headers []HeaderMatch `json:"headers,omitempty"`
}

// StringMatch matches a text by exactly one of its fields.
//
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:MaxProperties=1
type StringMatch struct {
	// Exact is the whole text.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Exact string `json:"exact,omitempty"`
	// Prefix is the beginning of the text.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Prefix string `json:"prefix,omitempty"`
	// Regex is an RE2 expression that must match the whole text. Hosts are matched ignoring
	// case.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Regex string `json:"regex,omitempty"`
}

// EffectiveTimeRange is the times that match all of its fields.
//
// +kubebuilder:validation:XValidation:rule="has(self.startTime) == has(self.endTime)",message="startTime and endTime go together"
type EffectiveTimeRange struct {
	// StartTime is the time of day, "15:04:05", at which the window begins.
	// +optional
	// +kubebuilder:validation:Pattern=`^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$`
	StartTime string `json:"startTime,omitempty"`
	// EndTime is the time of day at which the window ends. If it is before startTime, the
	// window ends on the next day and belongs to the day on which it begins.
	// +optional
	// +kubebuilder:validation:Pattern=`^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$`
	EndTime string `json:"endTime,omitempty"`
	// DaysOfWeek are numbers from 0 for Sunday to 6.
	// +optional
	// +kubebuilder:validation:MaxItems=7
	// +kubebuilder:validation:items:Minimum=0
	// +kubebuilder:validation:items:Maximum=6
	DaysOfWeek []int `json:"daysOfWeek,omitempty"`
	// DaysOfMonth are numbers from 1 to 31.
	// +optional
	// +kubebuilder:validation:MaxItems=31
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=31
	DaysOfMonth []int `json:"daysOfMonth,omitempty"`
	// Months are numbers from 1 for January to 12.
	// +optional
	// +kubebuilder:validation:MaxItems=12
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=12
	Months []int `json:"months,omitempty"`
	// TimeZone is a name of the IANA time zone database, such as Europe/Berlin. The default
	// is UTC.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	TimeZone string `json:"timeZone,omitempty"`
}

// FaultDelay delays requests or events.
type FaultDelay struct {
	// FixedDelay is how long each is delayed.
	FixedDelay Duration `json:"fixedDelay"`
	// Percent of them that are delayed.
	Percent Percent `json:"percent"`
}

// FaultAbort answers requests with an error. Where the apiserver would, the body is a
// metav1.Status.
type FaultAbort struct {
	// HTTPStatus is the status code of the response.
	// +kubebuilder:validation:Minimum=200
	// +kubebuilder:validation:Maximum=599
	HTTPStatus int `json:"httpStatus"`
	// Percent of the requests.
	Percent Percent `json:"percent"`
	// Reason of the Status. The default is the usual one for httpStatus.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
}

// FaultReset resets connections.
type FaultReset struct {
	// Percent of the requests.
	Percent Percent `json:"percent"`
	// AfterAnswer forwards the request first: it takes effect, but the client gets no
	// response.
	// +optional
	AfterAnswer bool `json:"afterAnswer,omitempty"`
}

// FaultTruncate ends responses within their bodies.
type FaultTruncate struct {
	// AfterBytes is how many bytes of the body are sent.
	// +optional
	// +kubebuilder:validation:Minimum=0
	AfterBytes int64 `json:"afterBytes,omitempty"`
	// Percent of the requests.
	Percent Percent `json:"percent"`
}

// FaultSlowBody sends the bodies of responses slowly.
type FaultSlowBody struct {
	// BytesPerSecond is the rate.
	// +kubebuilder:validation:Minimum=1
	BytesPerSecond int64 `json:"bytesPerSecond"`
	// Percent of the requests.
	Percent Percent `json:"percent"`
}

// FaultStaleList answers lists with an earlier state. It cannot be older than the pod's
// first request for the resource, nor than the history that the apiserver keeps.
type FaultStaleList struct {
	// Age of the state.
	Age Duration `json:"age"`
	// Percent of the lists.
	Percent Percent `json:"percent"`
}

// FaultWatch injects faults into watches.
//
// +kubebuilder:validation:MinProperties=1
type FaultWatch struct {
	// Gone ends watches with 410, so that the client must list again.
	// +optional
	Gone *WatchEnd `json:"gone,omitempty"`
	// Cut ends watches without an error.
	// +optional
	Cut *WatchEnd `json:"cut,omitempty"`
	// Stall delays all events of a watch without ending it.
	// +optional
	Stall *WatchStall `json:"stall,omitempty"`
	// Delay delays events, and all later events of the watch with them.
	// +optional
	Delay *FaultDelay `json:"delay,omitempty"`
	// Duplicate sends events twice.
	// +optional
	Duplicate *WatchDuplicate `json:"duplicate,omitempty"`
	// Drop drops events. The client learns the state of the objects after a while.
	// +optional
	Drop *WatchDrop `json:"drop,omitempty"`
}

// WatchEnd ends watches.
type WatchEnd struct {
	// Percent of watches.
	Percent Percent `json:"percent"`
	// After is how long after the beginning of the watch. The default is at once.
	// +optional
	After Duration `json:"after,omitempty"`
}

// WatchStall delays all events of watches.
type WatchStall struct {
	// Percent of watches.
	Percent Percent `json:"percent"`
	// After is how long after the beginning of the watch. The default is at once.
	// +optional
	After Duration `json:"after,omitempty"`
	// Lasts is how long the events are delayed. The default is until the watch ends.
	// +optional
	Lasts Duration `json:"lasts,omitempty"`
}

// WatchDuplicate sends events twice.
type WatchDuplicate struct {
	// Percent of events.
	Percent Percent `json:"percent"`
}

// WatchDrop drops events.
type WatchDrop struct {
	// Percent of events.
	Percent Percent `json:"percent"`
	// MadeUpAfter is how long after the event the client learns the state of the object. The
	// default is 30s.
	// +optional
	MadeUpAfter Duration `json:"madeUpAfter,omitempty"`
}

// FaultInjectionStatus is the observed state of a FaultInjection.
type FaultInjectionStatus struct {
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
	// ExpirationTime is when spec.duration ends.
	// +optional
	ExpirationTime *metav1.Time `json:"expirationTime,omitempty"`
	// ExpirationGeneration is the generation of the spec to which expirationTime belongs.
	// +optional
	ExpirationGeneration int64 `json:"expirationGeneration,omitempty"`
	// Pods is the number of selected pods.
	Pods int32 `json:"pods"`
	// PodsInForce is the number of selected pods to which the spec applies.
	PodsInForce int32 `json:"podsInForce"`
	// Injected is the number of requests of the current pods that got a fault.
	Injected int64 `json:"injected"`
	// TargetStatus describes each selected pod, at most 200.
	// +optional
	// +listType=atomic
	TargetStatus []TargetStatus `json:"targetStatus,omitempty"`
}

// FaultInjectionList is a list of FaultInjections.
//
// +kubebuilder:object:root=true
type FaultInjectionList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []FaultInjection `json:"items"`
}
