package harness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// AgentPID returns the process id of the agent on a node, in the node's PID namespace. It
// fails unless exactly one agent runs.
func (w *World) AgentPID(ctx context.Context, node string) (string, error) {
	out, err := w.NodeExec(ctx, node, "pidof", "ctrlmesh-agent")
	if err != nil {
		return "", fmt.Errorf("no agent runs: %w", err)
	}
	pids := strings.Fields(out)
	if len(pids) != 1 {
		return "", fmt.Errorf("%d agents run on %s", len(pids), node)
	}
	return pids[0], nil
}

// WaitAgentRestart waits for an agent other than process pid, and returns when its process
// started.
func (w *World) WaitAgentRestart(ctx context.Context, node, pid string) (started time.Time, err error) {
	const age = `pid=$(pidof ctrlmesh-agent) || exit 1
[ "$pid" != "$1" ] || exit 1
read -r up _ </proc/uptime
set -- $(cat /proc/"$pid"/stat) && echo "$up ${22}"`
	err = w.Until(ctx, "the agent's return", func(ctx context.Context) error {
		out, err := w.NodeExec(ctx, node, "bash", "-c", age, "bash", pid)
		if err != nil {
			return errors.New("it is not back")
		}
		started, err = startTime(out, time.Now())
		return err
	})
	return started, err
}

// startTime parses the uptime of the machine in seconds and the start of a process in ticks of
// 10 ms after boot.
func startTime(text string, now time.Time) (time.Time, error) {
	fields := strings.Fields(text)
	if len(fields) != 2 {
		return time.Time{}, fmt.Errorf("not two numbers: %q", text)
	}
	up, err := strconv.ParseFloat(fields[0], 64)
	start, err2 := strconv.ParseFloat(fields[1], 64)
	if err := errors.Join(err, err2); err != nil {
		return time.Time{}, fmt.Errorf("reading when the agent began: %w", err)
	}
	return now.Add(-time.Duration((up - start/100) * float64(time.Second))), nil
}

// AgentPod returns the running agent of a node.
func (w *World) AgentPod(ctx context.Context, node string) (*corev1.Pod, error) {
	agents, err := w.MeshPods(ctx, kube.AgentName)
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
func (w *World) MeshPods(ctx context.Context, name string) ([]corev1.Pod, error) {
	var pods corev1.PodList
	if err := w.List(ctx, &pods, client.InNamespace(kube.SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": name}); err != nil {
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

// RestartAgents replaces all agents by a rolling update, and waits until the old ones have
// exited.
func (w *World) RestartAgents(ctx context.Context) error {
	workload := "daemonset/" + kube.AgentName
	for _, args := range [][]string{{"restart", workload}, {"status", workload, "--timeout=120s"}} {
		if _, err := w.Kubectl(ctx, append([]string{"-n", kube.SystemNamespace, "rollout"}, args...)...); err != nil {
			return err
		}
	}
	return w.Until(ctx, "the old agents' end", w.oneAgentEach)
}

// oneAgentEach returns an error unless exactly one agent runs on each node.
func (w *World) oneAgentEach(ctx context.Context) error {
	for _, node := range w.Nodes {
		if _, err := w.AgentPID(ctx, node); err != nil {
			return err
		}
	}
	return nil
}
