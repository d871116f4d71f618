package policy

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// OnChange calls notify for each event that may change a policy. Writes of the status of
// the mesh's own objects, which are mostly the manager's, do not.
func OnChange(notify func()) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { notify() },
		DeleteFunc: func(any) { notify() },
		UpdateFunc: func(before, after any) {
			if !sameMeaning(before, after) {
				notify()
			}
		},
	}
}

// sameMeaning reports whether the same policies follow from two states of an object.
func sameMeaning(before, after any) bool {
	switch a := after.(type) {
	case *metav1.PartialObjectMetadata: // slim: all that matters else is whether it exists
		b, ok := before.(*metav1.PartialObjectMetadata)
		return ok && maps.Equal(a.Labels, b.Labels)
	case *v1alpha1.ShardingConfig:
		b, ok := before.(*v1alpha1.ShardingConfig)
		return ok && compile.SameSpec(a, b) && slices.Equal(compile.OperatorLocks(a, a.Status.Locks), compile.OperatorLocks(b, b.Status.Locks))
	case *v1alpha1.CircuitBreaker:
		b, ok := before.(*v1alpha1.CircuitBreaker)
		return ok && sameRules(a, b) && a.Annotations[v1alpha1.RecoverAnnotation] == b.Annotations[v1alpha1.RecoverAnnotation]
	case *v1alpha1.FaultInjection:
		b, ok := before.(*v1alpha1.FaultInjection)
		return ok && sameRules(a, b) &&
			a.Status.ExpirationGeneration == b.Status.ExpirationGeneration && a.Status.ExpirationTime.Equal(b.Status.ExpirationTime)
	}
	return false
}

// sameRules reports whether two states of an object have the same spec and labels.
func sameRules(a, b metav1.Object) bool {
	return a.GetUID() == b.GetUID() && a.GetGeneration() == b.GetGeneration() && maps.Equal(a.GetLabels(), b.GetLabels())
}
