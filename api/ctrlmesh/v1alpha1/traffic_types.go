package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What CircuitBreaker and FaultInjection have in common.

// Duration is a length of time as Go writes it: "500ms", "10s", "1h30m".
//
// +kubebuilder:validation:MaxLength=32
// +kubebuilder:validation:Pattern=`^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`
type Duration string

// Percent is of requests, or of events: "0" for none to "100" for all, with
// fractions as in "0.5".
//
// +kubebuilder:validation:MaxLength=16
// +kubebuilder:validation:Pattern=`^(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)$`
type Percent string

// HeaderMatch matches a request that has the value among those of the header.
type HeaderMatch struct {
	// +kubebuilder:validation:Pattern=`^[!#$%&'*+.^_|~0-9A-Za-z-]+$`
	// +kubebuilder:validation:MaxLength=256
	Name string `json:"name"`
	// +kubebuilder:validation:MaxLength=1024
	Value string `json:"value"`
}

// TargetStatus is how one pod fares under a CircuitBreaker or a FaultInjection. Lists of
// it are atomic, or metadata.managedFields would be as large again.
type TargetStatus struct {
	PodName string `json:"podName"`
	// +optional
	PodIP string `json:"podIP,omitempty"`
	// ConfigHash is that of the spec in force in the pod.
	// +optional
	ConfigHash string `json:"configHash,omitempty"`
	// Message says what is wrong and what to do.
	// +optional
	Message string `json:"message,omitempty"`
	// LimitingSnapshots are of the rules that limit, seconds old.
	// +optional
	// +listType=atomic
	LimitingSnapshots []LimitingSnapshot `json:"limitingSnapshots,omitempty"`
	// FaultSnapshots are of the rules that inject, seconds old.
	// +optional
	// +listType=atomic
	FaultSnapshots []FaultSnapshot `json:"faultSnapshots,omitempty"`
}

// LimitingSnapshot is what one rule has done in one pod.
type LimitingSnapshot struct {
	Name string `json:"name"`
	// State of the breaker.
	State BreakerState `json:"state"`
	// LastTransitionTime is when it came into this state.
	// +optional
	LastTransitionTime *metav1.Time `json:"lastTransitionTime,omitempty"`
	// Passed and Refused count requests.
	Passed  int64 `json:"passed"`
	Refused int64 `json:"refused"`
	// Share is the pod's part of a rule of scope Workload, as "2/5" for the second of
	// five; "-" while it waits for one.
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

// FaultSnapshot is what one rule has done in one pod.
type FaultSnapshot struct {
	Name string `json:"name"`
	// Matched and Injected count requests.
	Matched  int64 `json:"matched"`
	Injected int64 `json:"injected"`
}
