package tap

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Agent returns the agent that serves a pod, from a snapshot with programs and members. It returns an
// error if there is none, or if it logs no access lines.
func Agent(s *snapshot.Snapshot, namespace, name string) (*corev1.Pod, error) {
	pod := collect.Find(s.Pods, func(pod corev1.Pod) bool { return pod.Namespace == namespace && pod.Name == name })
	if pod == nil {
		return nil, fmt.Errorf("there is no pod %s with label %s in namespace %s: name another namespace by -n, or put the pod on the mesh", name, v1alpha1.EnableProxyLabel, namespace)
	}
	node := pod.Spec.NodeName
	if node == "" {
		return nil, fmt.Errorf("pod %s is on no node yet: see kubectl -n %s describe pod %s", name, namespace, name)
	}
	agents, all := report.AgentsByNode(s), s.Program(snapshot.Agent)
	at := slices.IndexFunc(agents, func(a report.Agent) bool { return a.Node == node })
	of := slices.IndexFunc(all, func(pod *corev1.Pod) bool { return at >= 0 && pod.Name == agents[at].Pod })
	if of < 0 {
		return nil, fmt.Errorf("node %s has no agent: see kubectl -n %s describe daemonset %s", node, s.Namespace, snapshot.Agent)
	}
	if !logsAccess(all[of]) {
		return nil, fmt.Errorf("agent %s logs no access lines: turn them on by kubectl apply -k deploy/debug, or with Helm by helm -n %s upgrade ctrlmesh deploy/chart --reset-then-reuse-values --set agent.accessLog=true --wait", all[of].Name, s.Namespace)
	}
	return all[of], nil
}

// logsAccess reports whether the arguments of an agent turn access lines on.
func logsAccess(agent *corev1.Pod) bool {
	return len(agent.Spec.Containers) > 0 && slices.Contains(agent.Spec.Containers[0].Args, "--log-level=debug")
}
