package compile

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const (
	// BothBundle is the ConfigMap with the mesh CA and the cluster's.
	BothBundle = "ctrlmesh-cluster-ca.crt"
	// ClusterBundle is the ConfigMap with the cluster's CA that Kubernetes puts into every
	// namespace.
	ClusterBundle = "kube-root-ca.crt"
)

// Exclusive reports whether a pod's clients trust the mesh alone, as far as the pod shows.
// Its annotation can be changed after admission, so the volumes count as well, which
// cannot. A CA in a Secret or in the image is not seen.
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
