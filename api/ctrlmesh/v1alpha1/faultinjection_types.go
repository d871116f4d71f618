package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FaultInjection harms requests of the pods that it selects, to see how they take it.
//
// All rules that match a request apply: delays add up, and of what cannot be done
// together the first by name and order is. Leader-election locks are exempt unless a
// rule has the lock's name in names. Objects in namespaces with the label
// ctrlmesh.kusionstack.io/no-faults are left alone, and so are pods there. Lists and
// watches of all namespaces meet faults as a whole; of the events of such a watch, those
// of these objects are neither held back, dropped nor sent twice.
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

	Spec FaultInjectionSpec `json:"spec"`
	// +optional
	Status FaultInjectionStatus `json:"status,omitempty"`
}

// FaultInjectionSpec is what a user asks of a FaultInjection.
type FaultInjectionSpec struct {
	// Selector names the pods, in this object's namespace. An empty one selects all that
	// are on the mesh.
	Selector *metav1.LabelSelector `json:"selector"`

	// Disabled takes all effect away.
	// +optional
	Disabled bool `json:"disabled,omitempty"`

	// Duration is how long this has effect, from when the mesh first sees this spec.
	// Without it: until it is deleted.
	// +optional
	Duration *Duration `json:"duration,omitempty"`

	// HTTPFaultInjections are the rules.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	HTTPFaultInjections []HTTPFaultInjection `json:"httpFault,omitempty"`

	// Egress says which connections to other hosts are seen. It counts where a rule has
	// httpMatch.
	// +optional
	Egress *FaultEgress `json:"egress,omitempty"`
}

// FaultEgress says which connections to other hosts rules see.
type FaultEgress struct {
	// Ports are the TCP ports whose connections are redirected; 80 and 443 if none are
	// given. UDP to the same ports is refused, for HTTP/3 would go around. What a pod is
	// redirected for by several CircuitBreakers and FaultInjections adds up.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	Ports []int32 `json:"ports,omitempty"`
}

// HTTPFaultInjection is one rule: what is done to which requests, and when.
//
// +kubebuilder:validation:XValidation:rule="has(self.delay) || has(self.abort) || has(self.reset) || has(self.truncate) || has(self.slowBody) || has(self.staleList) || has(self.watch)",message="set a fault: delay, abort, reset, truncate, slowBody, staleList or watch"
type HTTPFaultInjection struct {
	// Name is told with each fault.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`

	// Match says which requests. Without it: all to the apiserver.
	// +optional
	Match *FaultMatch `json:"match,omitempty"`

	// EffectiveTime says when. Without it: always.
	// +optional
	EffectiveTime *EffectiveTimeRange `json:"effectiveTime,omitempty"`

	// Seed makes a run repeat: the same requests in the same order meet the same faults,
	// in each pod that is selected, as long as this and the rule have the same names.
	// Without it each pod meets faults of its own.
	// +optional
	Seed *int64 `json:"seed,omitempty"`

	// Count is how many requests of each pod are harmed at most. Without it: any number.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Count *int64 `json:"count,omitempty"`

	// Delay lets requests wait before they are sent on.
	// +optional
	Delay *FaultDelay `json:"delay,omitempty"`
	// Abort answers requests with an error and does not send them on.
	// +optional
	Abort *FaultAbort `json:"abort,omitempty"`
	// Reset breaks connections off.
	// +optional
	Reset *FaultReset `json:"reset,omitempty"`
	// Truncate breaks answers off within their bodies.
	// +optional
	Truncate *FaultTruncate `json:"truncate,omitempty"`
	// SlowBody sends answers' bodies slowly.
	// +optional
	SlowBody *FaultSlowBody `json:"slowBody,omitempty"`
	// StaleList answers lists of resources with what was there a while ago.
	// +optional
	StaleList *FaultStaleList `json:"staleList,omitempty"`
	// Watch harms watches of resources. The clients' caches come to the truth in the end.
	// +optional
	Watch *FaultWatch `json:"watch,omitempty"`
}

// FaultMatch matches a request if one of the entries does; without any, all to the
// apiserver.
type FaultMatch struct {
	// Resources match requests for resources of the apiserver.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Resources []FaultResourceMatch `json:"resources,omitempty"`
	// NonResourceRules match other requests to the apiserver, such as those of discovery.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	NonResourceRules []NonResourceRule `json:"nonResourceRules,omitempty"`
	// HTTPMatch matches requests to other hosts, at the ports of spec.egress. Those in https
	// are seen, and harmed one by one, only in pods that opted in by the annotation
	// trust-egress; elsewhere connections are, and abort refuses those.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	HTTPMatch []FaultHTTPMatch `json:"httpMatch,omitempty"`
}

// FaultResourceMatch matches requests for resources. An empty list matches all, as
// "*" in it does.
type FaultResourceMatch struct {
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	APIGroups []string `json:"apiGroups,omitempty"`
	// Resources are "pods", "pods/status", "pods/*", "*/scale"; "*" is all, subresources too.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^(\*|[a-z0-9.-]+)(/(\*|[a-z0-9.-]+))?$`
	// +kubebuilder:validation:items:MaxLength=253
	Resources []string `json:"resources,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum="*";get;list;watch;create;update;patch;delete;deletecollection;proxy
	Verbs []string `json:"verbs,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Namespaces []string `json:"namespaces,omitempty"`
	// Names of the objects. Requests for single leases, and for a shard's lock, are matched
	// by theirs alone; what is created, by no name, which is in the body.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`
	// Headers that the request must have, all of them.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	Headers []HeaderMatch `json:"headers,omitempty"`
}

// FaultHTTPMatch matches requests to other hosts, if all that is set agrees.
type FaultHTTPMatch struct {
	// +optional
	Host *StringMatch `json:"host,omitempty"`
	// +optional
	Path *StringMatch `json:"path,omitempty"`
	// Method in upper case; empty or "*" for all.
	// +optional
	// +kubebuilder:validation:Pattern=`^(\*|[A-Za-z]*)$`
	Method string `json:"method,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxItems=16
	Headers []HeaderMatch `json:"headers,omitempty"`
}

// StringMatch is one of its fields.
//
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:MaxProperties=1
type StringMatch struct {
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Exact string `json:"exact,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Prefix string `json:"prefix,omitempty"`
	// Regex is an RE2 expression that all of the text must match; of a host in upper or
	// lower case.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Regex string `json:"regex,omitempty"`
}

// EffectiveTimeRange is when all that is set agrees.
//
// +kubebuilder:validation:XValidation:rule="has(self.startTime) == has(self.endTime)",message="startTime and endTime go together"
type EffectiveTimeRange struct {
	// StartTime and EndTime are times of day, "15:04:05". With an end before the start the
	// window goes over midnight, and belongs to the day on which it starts.
	// +optional
	// +kubebuilder:validation:Pattern=`^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$`
	StartTime string `json:"startTime,omitempty"`
	// +optional
	// +kubebuilder:validation:Pattern=`^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$`
	EndTime string `json:"endTime,omitempty"`
	// DaysOfWeek from 0 for Sunday to 6.
	// +optional
	// +kubebuilder:validation:MaxItems=7
	// +kubebuilder:validation:items:Minimum=0
	// +kubebuilder:validation:items:Maximum=6
	DaysOfWeek []int `json:"daysOfWeek,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxItems=31
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=31
	DaysOfMonth []int `json:"daysOfMonth,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxItems=12
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=12
	Months []int `json:"months,omitempty"`
	// TimeZone is a name of the IANA database, such as Europe/Berlin; UTC without it.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	TimeZone string `json:"timeZone,omitempty"`
}

// FaultDelay lets requests wait.
type FaultDelay struct {
	FixedDelay Duration `json:"fixedDelay"`
	Percent    Percent  `json:"percent"`
}

// FaultAbort answers requests with an error: a metav1.Status where the apiserver would.
type FaultAbort struct {
	// +kubebuilder:validation:Minimum=200
	// +kubebuilder:validation:Maximum=599
	HTTPStatus int     `json:"httpStatus"`
	Percent    Percent `json:"percent"`
	// Reason of the Status. Without it: the one that goes with httpStatus.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
}

// FaultReset breaks connections off.
type FaultReset struct {
	Percent Percent `json:"percent"`
	// AfterAnswer sends the request on first: it takes effect, and the client does not
	// learn of it.
	// +optional
	AfterAnswer bool `json:"afterAnswer,omitempty"`
}

// FaultTruncate breaks answers off.
type FaultTruncate struct {
	// +optional
	// +kubebuilder:validation:Minimum=0
	AfterBytes int64   `json:"afterBytes,omitempty"`
	Percent    Percent `json:"percent"`
}

// FaultSlowBody sends answers slowly.
type FaultSlowBody struct {
	// +kubebuilder:validation:Minimum=1
	BytesPerSecond int64   `json:"bytesPerSecond"`
	Percent        Percent `json:"percent"`
}

// FaultStaleList answers lists with what was there a while ago. It cannot be older than
// the pod's acquaintance with the resource, nor than what the apiserver keeps.
type FaultStaleList struct {
	Age     Duration `json:"age"`
	Percent Percent  `json:"percent"`
}

// FaultWatch harms watches.
//
// +kubebuilder:validation:MinProperties=1
type FaultWatch struct {
	// Gone ends watches with 410: the client must list again.
	// +optional
	Gone *WatchEnd `json:"gone,omitempty"`
	// Cut ends watches.
	// +optional
	Cut *WatchEnd `json:"cut,omitempty"`
	// Stall holds back all events of a watch, without ending it.
	// +optional
	Stall *WatchStall `json:"stall,omitempty"`
	// Delay holds back events, and all later ones of the watch behind them.
	// +optional
	Delay *FaultDelay `json:"delay,omitempty"`
	// Duplicate sends events twice.
	// +optional
	Duplicate *WatchDuplicate `json:"duplicate,omitempty"`
	// Drop leaves events out. The gap is made up for after a while.
	// +optional
	Drop *WatchDrop `json:"drop,omitempty"`
}

// WatchEnd ends watches.
type WatchEnd struct {
	// Percent of watches.
	Percent Percent `json:"percent"`
	// After so long; at once if it is not given.
	// +optional
	After Duration `json:"after,omitempty"`
}

// WatchStall holds all events back.
type WatchStall struct {
	// Percent of watches.
	Percent Percent `json:"percent"`
	// After so long; at once if it is not given.
	// +optional
	After Duration `json:"after,omitempty"`
	// Lasts is how long; without it until the watch ends.
	// +optional
	Lasts Duration `json:"lasts,omitempty"`
}

// WatchDuplicate sends events twice.
type WatchDuplicate struct {
	// Percent of events.
	Percent Percent `json:"percent"`
}

// WatchDrop leaves events out.
type WatchDrop struct {
	// Percent of events.
	Percent Percent `json:"percent"`
	// MadeUpAfter is when the client hears of the object after all; 30s if it is not given.
	// +optional
	MadeUpAfter Duration `json:"madeUpAfter,omitempty"`
}

// FaultInjectionStatus is how a FaultInjection fares.
type FaultInjectionStatus struct {
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
	// ExpirationTime is when spec.duration has passed.
	// +optional
	ExpirationTime *metav1.Time `json:"expirationTime,omitempty"`
	// ExpirationGeneration is the generation of the spec that expires then.
	// +optional
	ExpirationGeneration int64 `json:"expirationGeneration,omitempty"`
	// Pods that are selected.
	Pods int32 `json:"pods"`
	// PodsInForce are those of them in which the spec is in force.
	PodsInForce int32 `json:"podsInForce"`
	// Injected counts requests that were harmed, of the pods that there are now.
	Injected int64 `json:"injected"`
	// TargetStatus is by pod, of 200 at most.
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
