package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName is the API group of this package's kinds.
const GroupName = "kridge.kusionstack.io"

// GroupVersion is the group and version of this package's kinds.
var GroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1alpha1"}

// EnableProxyLabel with the value "true" puts a pod on the mesh when it is created.
const EnableProxyLabel = GroupName + "/enable-proxy"

// RootLabel is on the ShardingConfigs that Kridge's own manager derived from a root, with the
// root's name.
const RootLabel = GroupName + "/auto-sharding-root"

// AddToScheme adds this group's kinds to a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&ShardingConfig{}, &ShardingConfigList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
