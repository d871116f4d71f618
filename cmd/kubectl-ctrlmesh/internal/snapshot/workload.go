package snapshot

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/usage"
)

// Workload is a StatefulSet or a Deployment.
type Workload struct {
	layout.Workload
	Replicas int32
	// Template has the labels of the pod template.
	Template map[string]string
	// OnDelete means that a pod keeps its revision until somebody deletes it.
	OnDelete bool
	// Start is the first ordinal of a StatefulSet.
	Start int32
	// Partition is the lowest ordinal that a rolling update of a StatefulSet replaces.
	Partition int32
	// Paused means that a Deployment replaces no pods.
	Paused bool
	// Pods are its pods that have not exited, by name.
	Pods []corev1.Pod
}

// Target reads a workload and its pods.
func Target(namespace string, of layout.Workload) Part {
	return Part{of.String(), func(ctx context.Context, r Reader, s *Snapshot) error {
		w, selector, err := workload(ctx, r, namespace, of)
		if err != nil || w == nil {
			return err
		}
		selects, err := metav1.LabelSelectorAsSelector(selector)
		if err != nil {
			return err
		}
		s.Subjects.Workload = w
		return list(ctx, r, func(page corev1.PodList) {
			for _, pod := range page.Items {
				if owner, ok := layout.WorkloadOf(&pod); ok && owner == of && !ended(&pod) {
					w.Pods = append(w.Pods, pod)
				}
			}
		}, client.InNamespace(namespace), client.MatchingLabelsSelector{Selector: selects})
	}}
}

// workload reads a workload and its selector. It returns nil if it does not exist.
func workload(ctx context.Context, r Reader, namespace string, of layout.Workload) (*Workload, *metav1.LabelSelector, error) {
	if of.Kind == layout.Deployment {
		d, err := get[appsv1.Deployment](ctx, r, namespace, of.Name)
		if err != nil || d == nil {
			return nil, nil, err
		}
		return &Workload{
			Workload: of, Replicas: ptr.Deref(d.Spec.Replicas, 1), Template: d.Spec.Template.Labels, Paused: d.Spec.Paused,
		}, d.Spec.Selector, nil
	}
	set, err := get[appsv1.StatefulSet](ctx, r, namespace, of.Name)
	if err != nil || set == nil {
		return nil, nil, err
	}
	out := &Workload{
		Workload: of, Replicas: ptr.Deref(set.Spec.Replicas, 1), Template: set.Spec.Template.Labels,
		OnDelete: set.Spec.UpdateStrategy.Type == appsv1.OnDeleteStatefulSetStrategyType,
	}
	if ordinals := set.Spec.Ordinals; ordinals != nil {
		out.Start = ordinals.Start
	}
	if rolling := set.Spec.UpdateStrategy.RollingUpdate; rolling != nil {
		out.Partition = ptr.Deref(rolling.Partition, 0)
	}
	return out, set.Spec.Selector, nil
}

// Usage reads what the manager recorded of the requests of a workload.
func Usage(namespace string, of layout.Workload) Part {
	return Part{"usage of " + of.String(), func(ctx context.Context, r Reader, s *Snapshot) error {
		cm, err := get[corev1.ConfigMap](ctx, r, namespace, usage.ConfigMap)
		if cm != nil {
			s.Subjects.Usage = usage.Decode(cm.Data)[usage.Key(of)]
		}
		return err
	}}
}
