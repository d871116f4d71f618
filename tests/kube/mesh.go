package kube

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// AgentPod returns the running agent of a node.
func (c *Cluster) AgentPod(ctx context.Context, node string) (*corev1.Pod, error) {
	agents, err := c.MeshPods(ctx, AgentName)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(agents, func(p corev1.Pod) bool { return p.Spec.NodeName == node })
	if i < 0 {
		return nil, fmt.Errorf("no agent runs on %s", node)
	}
	return &agents[i], nil
}

// MeshPods returns the running pods of a workload of the mesh.
func (c *Cluster) MeshPods(ctx context.Context, name string) ([]corev1.Pod, error) {
	var pods corev1.PodList
	if err := c.List(ctx, &pods, client.InNamespace(SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": name}); err != nil {
		return nil, fmt.Errorf("listing the pods of %s: %w", name, err)
	}
	running := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning
	})
	if len(running) == 0 {
		return nil, fmt.Errorf("no pod of %s runs", name)
	}
	return running, nil
}
