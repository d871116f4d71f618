package manager

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// cacheOptions restrict what is watched to what the mesh is about.
func cacheOptions(namespace string, dialects bool) cache.Options {
	named := func(name string) cache.Config {
		return cache.Config{FieldSelector: fields.OneTermEqualSelector("metadata.name", name)}
	}
	out := cache.Options{
		ReaderFailOnMissingInformer: true,
		DefaultTransform:            cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: {
				Label:     labels.SelectorFromSet(labels.Set{v1alpha1.EnableProxyLabel: "true"}),
				Transform: slimPod,
			},
			&corev1.Service{}: {
				Namespaces: map[string]cache.Config{apiserver.Namespace: named(apiserver.Name), namespace: named(apiserver.AgentService)},
			},
			&discoveryv1.EndpointSlice{}: {
				Namespaces: map[string]cache.Config{apiserver.Namespace: {}},
				Label:      labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: apiserver.Name}),
			},
			&v1alpha1.ShardingConfig{}:                        {},
			&v1alpha1.CircuitBreaker{}:                        {},
			&v1alpha1.FaultInjection{}:                        {},
			controllers.MetadataOf(controllers.NamespaceKind): {Transform: slimNamespace},
			controllers.MetadataOf(controllers.NodeKind):      {Transform: slimNode},
		},
	}
	if dialects {
		for _, o := range serve.Objects() {
			out.ByObject[o] = cache.ByObject{}
		}
	}
	return out
}

// slimPod keeps of a pod what the manager looks at.
func slimPod(o any) (any, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	slim := &corev1.Pod{ObjectMeta: pod.ObjectMeta}
	slim.ManagedFields = nil
	slim.Annotations = nil
	for _, key := range []string{v1alpha1.TrustAnnotation, v1alpha1.CaptureAnnotation, v1alpha1.TrustEgressAnnotation, v1alpha1.EgressTrustAnnotation} {
		if v, ok := pod.Annotations[key]; ok {
			metav1.SetMetaDataAnnotation(&slim.ObjectMeta, key, v)
		}
	}
	slim.Spec.NodeName, slim.Spec.ServiceAccountName = pod.Spec.NodeName, pod.Spec.ServiceAccountName
	if compile.MountsClusterCA(&pod.Spec) { // which of its volumes and variables do does not matter
		ca := &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: compile.ClusterBundle}}
		slim.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{ConfigMap: ca}}}
	}
	slim.Status.Phase, slim.Status.PodIP = pod.Status.Phase, pod.Status.PodIP
	if n := decide.Restarts(pod); n > 0 { // of all containers together
		slim.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: n}}
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			slim.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return slim, nil
}

// slimNamespace keeps that a namespace exists, and its labels.
func slimNamespace(o any) (any, error) {
	if m, ok := o.(*metav1.PartialObjectMetadata); ok {
		return slimMetadata(m, m.Labels), nil
	}
	return o, nil
}

// slimNode keeps that a node exists.
func slimNode(o any) (any, error) {
	if m, ok := o.(*metav1.PartialObjectMetadata); ok {
		return slimMetadata(m, nil), nil
	}
	return o, nil
}

func slimMetadata(m *metav1.PartialObjectMetadata, labels map[string]string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: m.TypeMeta, ObjectMeta: metav1.ObjectMeta{
		Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion, Labels: labels,
	}}
}
