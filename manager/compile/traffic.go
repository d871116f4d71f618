package compile

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Rules is what users ask of the traffic of pods, and what must be known for it.
type Rules struct {
	Breakers   []*v1alpha1.CircuitBreaker
	Injections []*v1alpha1.FaultInjection
	// NoFaults are the namespaces that forbid fault injection.
	NoFaults []string
	// Share is a pod's of a rule of scope Workload, by the names of the CircuitBreaker, the
	// rule and the pod. Without it nobody has one yet.
	Share func(breaker types.NamespacedName, rule, pod string, uid types.UID) *meshv1.Share
	// Now is when FaultInjections that expire before have none of their effect.
	Now time.Time
}

// Breaker is what became of one CircuitBreaker.
type Breaker struct {
	*v1alpha1.CircuitBreaker
	Ruling
}

// Injection is what became of one FaultInjection.
type Injection struct {
	*v1alpha1.FaultInjection
	Ruling
}

// Ruling is what CircuitBreakers and FaultInjections come to.
type Ruling struct {
	// Hash is of the spec.
	Hash string
	// Problem says why nothing of it has effect. Its Reason is one of ReasonInvalid,
	// ReasonDisabled, ReasonExpired, ReasonForbidden and ReasonPending.
	Problem *Problem
	// Problems are of parts that have no effect.
	Problems []*Problem
	// Targets are the pods that it selects, by name, whether or not it has effect.
	Targets []Target
	// Rules are those with effect, as written. Intercept rules are not among them.
	Rules []Rule
}

// Reasons of a Problem.
const (
	// ReasonDisabled: spec.disabled, the label, or it is being deleted.
	ReasonDisabled = "Disabled"
	// ReasonExpired: its duration has passed.
	ReasonExpired = "Expired"
	// ReasonForbidden: the namespace has NoFaultsLabel.
	ReasonForbidden = "Forbidden"
	// ReasonPending: its status does not say yet when it expires.
	ReasonPending = "Pending"
)

// Rule is one that counts in pods.
type Rule struct{ Name, Key string }

// Target is a pod that is selected.
type Target struct {
	Pod *corev1.Pod
	// Version is that of the policy with which the pod has the spec in force.
	Version string
	// Message says why nothing of it has effect in this pod, though it has in others.
	Message string
	// Shared are the keys of the rules of scope Workload of which the pod has or needs a
	// share. The members of one workload have the same namespace and PodPolicy.Workload.
	Shared []string
}
