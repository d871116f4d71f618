package kube

import (
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/readiness"
)

// RolledOut returns an error unless all pods of a Deployment, StatefulSet or DaemonSet are
// updated and ready. It reads the object, of which only the name is needed. Use it in [Until].
func (c *Cluster) RolledOut(ctx context.Context, workload client.Object) error {
	if err := c.Get(ctx, client.ObjectKeyFromObject(workload), workload); err != nil {
		return err
	}
	var observed int64
	var want, updated, ready int32
	switch w := workload.(type) {
	case *appsv1.Deployment:
		observed, want, updated, ready = w.Status.ObservedGeneration, *w.Spec.Replicas, w.Status.UpdatedReplicas, w.Status.AvailableReplicas
		updated -= w.Status.Replicas - w.Status.UpdatedReplicas // old ones must be deleted
	case *appsv1.StatefulSet:
		observed, want, updated, ready = w.Status.ObservedGeneration, *w.Spec.Replicas, w.Status.UpdatedReplicas, w.Status.ReadyReplicas
	case *appsv1.DaemonSet:
		observed, want, updated, ready = w.Status.ObservedGeneration, w.Status.DesiredNumberScheduled, w.Status.UpdatedNumberScheduled, w.Status.NumberAvailable
	default:
		return Never(fmt.Errorf("%T has no pods to roll out", workload))
	}
	name := workload.GetNamespace() + "/" + workload.GetName()
	switch {
	case observed < workload.GetGeneration():
		return fmt.Errorf("%s: its controller has not seen it yet", name)
	case updated < want || ready < want || want == 0:
		return fmt.Errorf("%s: of %d pods %d are current, %d ready", name, want, updated, ready)
	}
	return nil
}

// Observed returns an error unless the controller of a StatefulSet has seen its template. It reads
// the object, of which only the name is needed. Use it in [Until].
func (c *Cluster) Observed(ctx context.Context, set *appsv1.StatefulSet) error {
	if err := c.Get(ctx, client.ObjectKeyFromObject(set), set); err != nil {
		return err
	}
	if set.Status.ObservedGeneration < set.Generation {
		return fmt.Errorf("generation %d of StatefulSet %s/%s has not been observed", set.Generation, set.Namespace, set.Name)
	}
	return nil
}

// PodReady reports whether a pod is running, ready and not terminating.
func PodReady(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodRunning && readiness.Of(pod)
}

// Ready reads a pod, and returns an error unless it is ready. Use it in [Until].
func (c *Cluster) Ready(ctx context.Context, pod *corev1.Pod) error {
	err := c.Get(ctx, client.ObjectKeyFromObject(pod), pod)
	if err == nil && !PodReady(pod) {
		err = fmt.Errorf("it is %s and not ready", pod.Status.Phase)
	}
	return err
}

// Restarts returns how often the containers of a pod were restarted.
func Restarts(pod *corev1.Pod) (n int32) {
	for _, c := range pod.Status.ContainerStatuses {
		n += c.RestartCount
	}
	return n
}

// MeshReady returns an error unless managers and agents are rolled out.
func (c *Cluster) MeshReady(ctx context.Context) error {
	for _, workload := range []client.Object{Manager(), Agents()} {
		err := c.RolledOut(ctx, workload)
		if apierrors.IsNotFound(err) {
			return Never(errors.New("ctrlmesh is not installed (make install)"))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Manager returns the Deployment of the manager, with its name alone.
func Manager() *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: SystemNamespace, Name: ManagerName}}
}

// Agents returns the DaemonSet of the agents, with its name alone.
func Agents() *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: SystemNamespace, Name: AgentName}}
}
