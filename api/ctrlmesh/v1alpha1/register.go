package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName is the API group of this package's kinds.
const GroupName = "ctrlmesh.kusionstack.io"

// GroupVersion is the group and version of this package's kinds.
var GroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1alpha1"}

// AddToScheme adds this group's kinds to a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&ShardingConfig{}, &ShardingConfigList{},
		&CircuitBreaker{}, &CircuitBreakerList{},
		&FaultInjection{}, &FaultInjectionList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
