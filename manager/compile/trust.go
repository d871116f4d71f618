package compile

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const (
	// BothBundle is the ConfigMap with the CA of the mesh and the CA of the cluster.
	BothBundle = "ctrlmesh-cluster-ca.crt"
	// ClusterBundle is the ConfigMap with the CA of the cluster, which Kubernetes publishes
	// in every namespace.
	ClusterBundle = "kube-root-ca.crt"
)

// Exclusive reports whether a pod's clients trust the mesh alone, as far as its spec
// shows. The annotation can change after admission, so the volumes and the environment
// count too, because they cannot. A CA in a Secret or in the image is not detected.
func Exclusive(pod *corev1.Pod) bool {
	return pod.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustMesh && !mountsClusterCA(&pod.Spec)
}

func mountsClusterCA(spec *corev1.PodSpec) bool {
	is := func(name string) bool { return name == BothBundle || name == ClusterBundle }
	for _, v := range spec.Volumes {
		if v.ConfigMap != nil && is(v.ConfigMap.Name) {
			return true
		}
		if v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
			return s.ConfigMap != nil && is(s.ConfigMap.Name)
		}) {
			return true
		}
	}
	env := func(c corev1.Container) bool {
		return slices.ContainsFunc(c.EnvFrom, func(e corev1.EnvFromSource) bool { return e.ConfigMapRef != nil && is(e.ConfigMapRef.Name) }) ||
			slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool {
				return e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil && is(e.ValueFrom.ConfigMapKeyRef.Name)
			})
	}
	return slices.ContainsFunc(spec.Containers, env) || slices.ContainsFunc(spec.InitContainers, env)
}
