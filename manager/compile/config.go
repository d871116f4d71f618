package compile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// Labelled reports whether a pod has the label that adds it to the mesh.
func Labelled(pod *corev1.Pod) bool { return pod.Labels[v1alpha1.EnableProxyLabel] == "true" }

// Ended reports whether all containers of a pod have exited for good.
func Ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// AccountOf returns the name of a pod's ServiceAccount.
func AccountOf(pod *corev1.Pod) string { return cmp.Or(pod.Spec.ServiceAccountName, "default") }

// ForbidsFaults reports whether a namespace forbids fault injection.
func ForbidsFaults(namespace metav1.Object) bool {
	v, ok := namespace.GetLabels()[v1alpha1.NoFaultsLabel]
	return ok && v != "false"
}

// Members returns the selector for the pods of a hand-written configuration, in its
// namespace. It is nil for roots and derived shards. It is nil with a problem if the
// selector is empty or invalid.
func Members(c *v1alpha1.ShardingConfig) (labels.Selector, *Problem) {
	if c.Spec.Root != nil || Derived(c) {
		return nil, nil
	}
	s := c.Spec.Selector
	if s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		return nil, &Problem{v1alpha1.ReasonInvalid, "spec.selector is empty: name the pods of this shard"}
	}
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return nil, &Problem{v1alpha1.ReasonInvalid, "spec.selector: " + err.Error()}
	}
	return sel, nil
}

// Selects returns a function that reports whether a configuration selects a pod of its
// namespace, or a problem if the selector is invalid. Admission uses it too.
func Selects(c *v1alpha1.ShardingConfig) (func(metav1.Object) bool, *Problem) {
	switch {
	case Derived(c):
		return func(metav1.Object) bool { return false }, nil // the root selects them
	case c.Spec.Root != nil:
		return layout.Selects(c.Spec.Root), nil
	}
	sel, problem := Members(c)
	if problem != nil {
		return nil, problem
	}
	return func(pod metav1.Object) bool { return sel.Matches(labels.Set(pod.GetLabels())) }, nil
}

// Derived reports whether a configuration was derived from a root. The root, not the
// derived configuration, selects the pods.
func Derived(c *v1alpha1.ShardingConfig) bool { return c.Labels[v1alpha1.RootLabel] != "" }

// Withdrawn reports whether a root is disabled or being deleted, so that it must have no
// shards.
func Withdrawn(root *v1alpha1.ShardingConfig) bool {
	return root.DeletionTimestamp != nil || root.Spec.Root.Disable != nil && *root.Spec.Root.Disable
}

// Trust returns the value of the trust annotation for pods that are admitted while c
// selects them; c is nil for pods that no configuration selects. Pods that may bypass the
// proxy must be able to verify the apiserver. This includes the pods of a withdrawn root,
// which run unsharded and may outlive it.
func Trust(c *v1alpha1.ShardingConfig) string {
	if c == nil || c.Spec.FailurePolicy == v1alpha1.FailOpen || PassesThrough(c) || c.Spec.Root != nil && Withdrawn(c) {
		return v1alpha1.TrustBoth
	}
	return v1alpha1.TrustMesh
}

// CanFailOpen reports whether a pod's clients could verify the real apiserver.
func CanFailOpen(pod *corev1.Pod) bool {
	return pod.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustBoth
}

// CanPassThrough reports whether a pod's connections could end at the real
// apiserver. A pod that connects to the agent's address would not accept the
// apiserver's certificate there.
func CanPassThrough(pod *corev1.Pod) bool {
	return CanFailOpen(pod) && pod.Annotations[v1alpha1.CaptureAnnotation] != v1alpha1.CaptureAddress
}

// PassesThrough reports whether the proxy forwards the connections of a configuration's
// pods without decrypting them.
func PassesThrough(c *v1alpha1.ShardingConfig) bool {
	return c.Spec.ClientCertificates == v1alpha1.ClientCertificatesPassthrough
}

// ConflictMessage returns the message for a pod that several configurations select, with
// the ways to fix it.
func ConflictMessage(namespace string, configs []string) string {
	return fmt.Sprintf("ShardingConfigs %s in namespace %s all select this pod, which must belong to one shard: change the pod's labels, or delete all but one and create them again so that they exclude each other",
		strings.Join(configs, ", "), namespace)
}

// SameSpec reports whether two versions of a configuration have the same spec, by what was
// written and by what the shards of a root act by.
func SameSpec(a, b *v1alpha1.ShardingConfig) bool {
	return a.UID == b.UID && a.Generation == b.Generation && equality.Semantic.DeepEqual(a.Spec, b.Spec)
}

// HandWritten reports whether a configuration is hand-written and divides resources: it is
// neither a root nor derived, and sets neither passthrough nor a dry run.
func HandWritten(c *v1alpha1.ShardingConfig) bool {
	return c.Spec.Root == nil && !Derived(c) && !PassesThrough(c) && !c.Spec.DryRun
}

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
	return pod.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustMesh && !MountsClusterCA(&pod.Spec)
}

// MountsClusterCA reports whether the volumes or the environment of a pod have the CA of the
// cluster.
func MountsClusterCA(spec *corev1.PodSpec) bool {
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
