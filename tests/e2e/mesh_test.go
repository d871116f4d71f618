package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// rollout is how long to wait for a rollout of the agents: on each of two nodes the old agent
// may take MaxExit to exit.
const rollout = patience + 2*takeover.MaxExit

// Functions that change the mesh itself. Each change is undone when the test ends.

// withoutManager scales the managers to zero, and returns a function that restores them.
func withoutManager(t *testing.T) (restore func()) {
	t.Helper()
	m := manager()
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	before := *m.Spec.Replicas
	scale := func(ctx context.Context, replicas int32) error {
		return cluster.SubResource("scale").Update(ctx, m,
			client.WithSubResourceBody(&autoscalingv1.Scale{ObjectMeta: m.ObjectMeta, Spec: autoscalingv1.ScaleSpec{Replicas: replicas}}))
	}
	restore = once(t, func(ctx context.Context) error {
		m.ResourceVersion = ""
		if err := scale(ctx, before); err != nil {
			return err
		}
		if err := kube.Until(ctx, "the manager to be ready again", func(ctx context.Context) error { return cluster.RolledOut(ctx, manager()) }); err != nil {
			return err
		}
		return kube.Until(ctx, "the apiserver to reach the manager's webhooks", reviewsConfigs)
	})
	require.NoError(t, scale(t.Context(), 0))
	until(t, "the managers to exit", func(ctx context.Context) error { return noPods(ctx, kube.ManagerName, "") })
	return restore
}

// reviewsConfigs returns an error unless a manager reviews ShardingConfigs. The apiserver learns a while
// after a manager has become ready where it is.
func reviewsConfigs(ctx context.Context) error {
	return cluster.Create(ctx, shard(kube.SystemNamespace, "reviewed", []string{"nobody"}, []string{"nowhere"}, "configmaps"), client.DryRunAll)
}

// changedAgents changes the agents' pod template, waits for the rollout, and returns a
// function that undoes it.
func changedAgents(t *testing.T, change func(*corev1.PodTemplateSpec)) (restore func()) {
	t.Helper()
	var before corev1.PodTemplateSpec
	roll := func(ctx context.Context, change func(*corev1.PodTemplateSpec)) error {
		err := kube.Until(ctx, "the agents to be changed", func(ctx context.Context) error { // its status changes concurrently
			a := agent()
			if err := cluster.Get(ctx, client.ObjectKeyFromObject(a), a); err != nil {
				return err
			}
			change(&a.Spec.Template)
			return cluster.Update(ctx, a)
		})
		if err != nil {
			return err
		}
		return kube.Until(ctx, "the agents' rollout", agentsCurrent)
	}
	restore = once(t, func(ctx context.Context) error {
		return roll(ctx, func(s *corev1.PodTemplateSpec) { *s = before })
	})
	ctx, cancel := context.WithTimeout(t.Context(), rollout)
	defer cancel()
	require.NoError(t, roll(ctx, func(s *corev1.PodTemplateSpec) {
		s.DeepCopyInto(&before)
		change(s)
	}))
	return restore
}

// agentsCurrent returns an error unless exactly the agents of the current DaemonSet run.
func agentsCurrent(ctx context.Context) error {
	a := agent()
	if err := cluster.RolledOut(ctx, a); err != nil {
		return err
	}
	var pods corev1.PodList
	if err := cluster.List(ctx, &pods, inMesh(kube.AgentName)...); err != nil {
		return err
	}
	if n := int32(len(pods.Items)); n != a.Status.DesiredNumberScheduled {
		return fmt.Errorf("there are %d agents, not %d", n, a.Status.DesiredNumberScheduled)
	}
	return nil
}

// once runs undo when it is called, or else when the test ends.
func once(t *testing.T, undo func(context.Context) error) func() {
	done := false
	run := func() {
		if done {
			return
		}
		done = true
		ctx, cancel := context.WithTimeout(context.Background(), rollout)
		defer cancel()
		require.NoError(t, undo(ctx))
	}
	t.Cleanup(run)
	return run
}

func inMesh(name string) []client.ListOption {
	return []client.ListOption{client.InNamespace(kube.SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": name}}
}

// noPods returns an error if pods of the mesh are still there: on the node, or on any if it
// is empty.
func noPods(ctx context.Context, name, node string) error {
	var pods corev1.PodList
	if err := cluster.List(ctx, &pods, inMesh(name)...); err != nil {
		return err
	}
	for _, p := range pods.Items {
		if node == "" || p.Spec.NodeName == node {
			return fmt.Errorf("%s is there", p.Name)
		}
	}
	return nil
}

// notOn excludes a node from the agents' DaemonSet.
func notOn(node string) func(*corev1.PodTemplateSpec) {
	return func(s *corev1.PodTemplateSpec) {
		s.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchFields: []corev1.NodeSelectorRequirement{
						{Key: "metadata.name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{node}},
					},
				}},
			},
		}}
	}
}

// withArgs adds arguments to the agents' command line.
func withArgs(args ...string) func(*corev1.PodTemplateSpec) {
	return func(s *corev1.PodTemplateSpec) {
		s.Spec.Containers[0].Args = append(slices.Clone(s.Spec.Containers[0].Args), args...)
	}
}

// killAgent kills the agent's process on a node, as the kernel does when it is out of
// memory. It returns when the process has exited.
func killAgent(t *testing.T, node string) {
	t.Helper()
	_, err := cluster.NodeExec(t.Context(), node, "bash", "-c",
		`pid=$(pidof ctrlmesh-agent) && kill -KILL $pid && while [ -e /proc/$pid ]; do sleep 0.01; done`)
	require.NoError(t, err)
}

// signalAgent sends a signal to the agent of a node, also when the test has ended.
func signalAgent(t *testing.T, node, signal string) {
	t.Helper()
	_, err := cluster.NodeExec(context.WithoutCancel(t.Context()), node, "bash", "-c", `for p in $(pidof ctrlmesh-agent); do kill -"$1" "$p"; done`, "bash", signal)
	require.NoError(t, err)
}

// agentStarted waits until the agent of a node has started since a time, and returns the
// start time in its own log: the line may come a moment after its first work.
func agentStarted(t *testing.T, node string, since time.Time) (started time.Time) {
	t.Helper()
	until(t, "a start of the agent on "+node, func(ctx context.Context) error {
		var pods corev1.PodList
		if err := cluster.List(ctx, &pods, inMesh(kube.AgentName)...); err != nil {
			return err
		}
		for _, p := range pods.Items {
			if p.Spec.NodeName != node {
				continue
			}
			log, err := cluster.Clientset.CoreV1().Pods(kube.SystemNamespace).GetLogs(p.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
			if err != nil {
				return err
			}
			if started = startIn(log); started.After(since) {
				return nil
			}
		}
		return errors.New("no agent's log says so")
	})
	return started
}

// startIn returns when an agent started, by its log; the zero time if it has not.
func startIn(log []byte) time.Time {
	lines := bufio.NewScanner(bytes.NewReader(log))
	for lines.Scan() {
		var line struct {
			Time time.Time
			Msg  string
		}
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Msg == "agent started" {
			return line.Time
		}
	}
	return time.Time{}
}
