package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What CircuitBreaker and FaultInjection have in common.

// Duration is a length of time in the syntax of Go, such as "500ms", "10s" or "1h30m".
//
// +kubebuilder:validation:MaxLength=32
// +kubebuilder:validation:Pattern=`^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`
type Duration string

// Percent is a percentage of requests or events, from "0" to "100", with fractions such as
// "0.5".
//
// +kubebuilder:validation:MaxLength=16
// +kubebuilder:validation:Pattern=`^(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)$`
type Percent string

// Decimal is a decimal number, such as "0.5" or "-3".
//
// +kubebuilder:validation:MaxLength=32
// +kubebuilder:validation:Pattern=`^-?[0-9]+(\.[0-9]+)?$`
type Decimal string

// HeaderMatch matches a request with a header of which one value is equal.
type HeaderMatch struct {
	// Name of the header, in upper or lower case.
	// +kubebuilder:validation:Pattern=`^[!#$%&'*+.^_|~0-9A-Za-z-]+$`
	// +kubebuilder:validation:MaxLength=256
	Name string `json:"name"`
	// Value that the header must have.
	// +kubebuilder:validation:MaxLength=1024
	Value string `json:"value"`
}

// RequestScope is which requests a rule matches, by the namespace in their path. Namespaced:
// those with a namespace. Cluster: those without one. All: both.
//
// +kubebuilder:validation:Enum=Namespaced;Cluster;All
type RequestScope string

// Values of RequestScope.
const (
	RequestScopeNamespaced RequestScope = "Namespaced"
	RequestScopeCluster    RequestScope = "Cluster"
	RequestScopeAll        RequestScope = "All"
)

// TargetStatus is the state of a CircuitBreaker or a FaultInjection in one pod. Lists of it
// are atomic, or metadata.managedFields would double the size of the object.
type TargetStatus struct {
	// PodName is the name of the pod.
	PodName string `json:"podName"`
	// PodIP is the address of the pod.
	// +optional
	PodIP string `json:"podIP,omitempty"`
	// ConfigHash is the hash of the spec that applies to the pod.
	// +optional
	ConfigHash string `json:"configHash,omitempty"`
	// Message says what is wrong and what to do.
	// +optional
	Message string `json:"message,omitempty"`
	// LimitingSnapshots are the states of rules that limit requests, some seconds old.
	// +optional
	// +listType=atomic
	LimitingSnapshots []LimitingSnapshot `json:"limitingSnapshots,omitempty"`
	// FaultSnapshots are the states of rules that inject faults, some seconds old.
	// +optional
	// +listType=atomic
	FaultSnapshots []FaultSnapshot `json:"faultSnapshots,omitempty"`
}

// LimitingSnapshot is the state of one rule in one pod.
type LimitingSnapshot struct {
	// Name of the rule.
	Name string `json:"name"`
	// State of the circuit breaker.
	State BreakerState `json:"state"`
	// LastTransitionTime is when the breaker entered this state.
	// +optional
	LastTransitionTime *metav1.Time `json:"lastTransitionTime,omitempty"`
	// Passed is the number of requests that the rule let through.
	Passed int64 `json:"passed"`
	// Refused is the number of requests that the rule refused.
	Refused int64 `json:"refused"`
	// Share is the pod's part of a rule of scope Workload: "2/5" is the second of five parts,
	// "-" means that the pod waits for one.
	// +optional
	Share string `json:"share,omitempty"`
}

// BreakerState is that of a circuit breaker.
//
// +kubebuilder:validation:Enum=Closed;Opened;HalfOpen
type BreakerState string

// Values of BreakerState.
const (
	BreakerClosed   BreakerState = "Closed"
	BreakerOpened   BreakerState = "Opened"
	BreakerHalfOpen BreakerState = "HalfOpen"
)

// FaultSnapshot is the state of one rule in one pod.
type FaultSnapshot struct {
	// Name of the rule.
	Name string `json:"name"`
	// Matched is the number of requests that the rule matched.
	Matched int64 `json:"matched"`
	// Injected is the number of requests into which the rule injected a fault.
	Injected int64 `json:"injected"`
}
