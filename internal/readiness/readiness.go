// Package readiness says whether pods are ready.
package readiness

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Of reports whether the kubelet says that a pod is ready.
func Of(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
