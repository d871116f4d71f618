package adoption

import (
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/clip"
	"github.com/ctrlmesh/ctrlmesh/internal/readiness"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// maxNamed bounds how many pods a line names.
const maxNamed = 5

// rollout waits until all pods are on the mesh, or none is, and all are ready. It returns nil if that is
// so.
func (v view) rollout(onMesh bool) *Step {
	var running, terminating, unready []string
	current := 0
	for i := range v.workload.Pods {
		pod := &v.workload.Pods[i]
		switch stale := compile.Labelled(pod) != onMesh; {
		case stale && pod.DeletionTimestamp != nil:
			terminating = append(terminating, pod.Name)
		case stale:
			running = append(running, pod.Name)
		case pod.DeletionTimestamp != nil:
		case readiness.Of(pod):
			current++
		default:
			unready = append(unready, pod.Name+unreadyReason(pod))
			current++
		}
	}
	replicas := int(v.workload.Replicas)
	if len(running)+len(terminating)+len(unready) == 0 && current >= replicas {
		return nil
	}
	why := []string{fmt.Sprintf("%d of %d pods are replaced", min(current, replicas), replicas)}
	for _, some := range []struct {
		what string
		pods []string
	}{{"old", running}, {"terminating", terminating}, {"not ready", unready}} {
		if len(some.pods) > 0 {
			why = append(why, some.what+": "+clip.Join(some.pods, maxNamed, ", "))
		}
	}
	do := fmt.Sprintf("kubectl -n %s describe %s", v.Namespace, v.Target.Argument())
	if held, instead := v.heldBack(running); held != "" {
		why, do = append(why, held), instead
	}
	return &Step{Kind: Wait, Why: strings.Join(why, "; "), Do: do}
}

// heldBack returns why the workload does not replace pods by itself, and the command that replaces them.
func (v view) heldBack(running []string) (why, do string) {
	w := v.workload
	switch {
	case len(running) == 0:
	case w.OnDelete:
		do = fmt.Sprintf("kubectl -n %s delete pod %s", v.Namespace, strings.Join(running, " "))
		return "its updateStrategy is OnDelete, so delete the old pods: " + do, do
	case w.Paused:
		do = fmt.Sprintf("kubectl -n %s rollout resume %s", v.Namespace, v.Target.Argument())
		return "it is paused: " + do, do
	case w.Partition > lowest(running):
		do = fmt.Sprintf(`kubectl -n %s patch %s --type=merge -p '{"spec":{"updateStrategy":{"rollingUpdate":{"partition":0}}}}'`, v.Namespace, v.Target.Argument())
		return fmt.Sprintf("its partition of %d keeps old pods: %s", w.Partition, do), do
	}
	return "", ""
}

// lowest returns the lowest ordinal of pods of a StatefulSet.
func lowest(pods []string) int32 {
	out := int32(1<<31 - 1)
	for _, name := range pods {
		ordinal, err := strconv.ParseInt(name[strings.LastIndexByte(name, '-')+1:], 10, 32)
		if err == nil {
			out = min(out, int32(ordinal))
		}
	}
	return out
}

// unreadyReason says why a pod is not ready, in brackets; empty if its status does not show it.
func unreadyReason(pod *corev1.Pod) string {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return fmt.Sprintf(" (%s: %s)", c.Reason, c.Message)
		}
	}
	for _, c := range pod.Status.ContainerStatuses {
		if waiting := c.State.Waiting; waiting != nil && waiting.Reason != "" {
			return fmt.Sprintf(" (%s)", strings.TrimSuffix(waiting.Reason+": "+waiting.Message, ": "))
		}
	}
	return ""
}

// uncovered returns the nodes of pods without a ready agent.
func uncovered(s *snapshot.Snapshot, pods []corev1.Pod) (nodes []string) {
	ready, seen := map[string]bool{}, map[string]bool{}
	for _, agent := range s.Program(snapshot.Agent) {
		if readiness.Of(agent) {
			ready[agent.Spec.NodeName] = true
		}
	}
	for i := range pods {
		node := pods[i].Spec.NodeName
		if node != "" && !ready[node] && !seen[node] {
			seen[node] = true
			nodes = append(nodes, node)
		}
	}
	return nodes
}
