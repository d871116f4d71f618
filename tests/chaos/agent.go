package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// What is done to the mesh itself, and read from it.

// agentPID is the process of a node's agent, in the node's numbers.
func (w *world) agentPID(ctx context.Context, node string) (string, error) {
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

// signal sends a signal to a process of a node, and says when. The clock of a node
// is that of the machine.
func (w *world) signal(ctx context.Context, node, pid, signal string) (time.Time, error) {
	out, err := w.NodeExec(ctx, node, "bash", "-c", `kill -"$1" "$2" && echo "${EPOCHREALTIME/,/.}"`, "bash", signal, pid)
	if err != nil {
		return time.Time{}, err
	}
	seconds, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("reading the time of a signal: %w", err)
	}
	return time.UnixMicro(int64(seconds * 1e6)), nil
}

// agentReturned waits for another agent than the one of pid, and says when its process began.
func (w *world) agentReturned(ctx context.Context, node, pid string) (began time.Time, err error) {
	const age = `pid=$(pidof ctrlmesh-agent) || exit 1
[ "$pid" != "$1" ] || exit 1
read -r up _ </proc/uptime
set -- $(cat /proc/"$pid"/stat) && echo "$up ${22}"`
	err = w.until(ctx, "the agent's return", func(ctx context.Context) error {
		out, err := w.NodeExec(ctx, node, "bash", "-c", age, "bash", pid)
		if err != nil {
			return errors.New("it is not back")
		}
		began, err = beganAt(out, time.Now())
		return err
	})
	return began, err
}

// beganAt reads the machine's uptime in seconds and a process's start in hundredths of one.
func beganAt(text string, now time.Time) (time.Time, error) {
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

// agentPod is the agent of a node.
func (w *world) agentPod(ctx context.Context, node string) (*corev1.Pod, error) {
	var pods corev1.PodList
	if err := w.List(ctx, &pods, client.InNamespace(kube.SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": kube.AgentName}); err != nil {
		return nil, fmt.Errorf("listing agents: %w", err)
	}
	for i := range pods.Items {
		if p := &pods.Items[i]; p.Spec.NodeName == node && p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning {
			return p, nil
		}
	}
	return nil, fmt.Errorf("no agent runs on %s", node)
}

// scrape reads the metrics of the agent of a node.
func (w *world) scrape(ctx context.Context, node string) (map[string]*dto.MetricFamily, error) {
	agent, err := w.agentPod(ctx, node)
	if err != nil {
		return nil, err
	}
	body, err := w.Clientset.CoreV1().Pods(agent.Namespace).ProxyGet("http", agent.Name, agent.Annotations["prometheus.io/port"], "/metrics", nil).DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of %s: %w", agent.Name, err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of %s: %w", agent.Name, err)
	}
	return families, nil
}

// metric adds up the series of a name at the agent of a node.
func (w *world) metric(ctx context.Context, node, name string) (float64, error) {
	families, err := w.scrape(ctx, node)
	if err != nil {
		return 0, err
	}
	if families[name] == nil {
		return 0, fmt.Errorf("the agent on %s has no metric %s", node, name)
	}
	return total(families[name], nil), nil
}

// total adds up the series of a counter or gauge that have the given labels.
func total(family *dto.MetricFamily, labels map[string]string) (sum float64) {
	for _, series := range family.GetMetric() {
		matching := 0
		for _, l := range series.GetLabel() {
			if value, ok := labels[l.GetName()]; ok && value == l.GetValue() {
				matching++
			}
		}
		if matching == len(labels) {
			sum += series.GetCounter().GetValue() + series.GetGauge().GetValue()
		}
	}
	return sum
}

// withoutManager takes all managers away, and returns what brings them back.
func (w *world) withoutManager(ctx context.Context) (restore func() error, err error) {
	m := manager()
	if err := w.Get(ctx, client.ObjectKeyFromObject(m), m); err != nil {
		return nil, fmt.Errorf("reading the manager: %w", err)
	}
	before := *m.Spec.Replicas
	scale := func(ctx context.Context, replicas int32) error {
		m.ResourceVersion = ""
		return w.SubResource("scale").Update(ctx, m,
			client.WithSubResourceBody(&autoscalingv1.Scale{ObjectMeta: m.ObjectMeta, Spec: autoscalingv1.ScaleSpec{Replicas: replicas}}))
	}
	restore = func() error {
		ctx := context.WithoutCancel(ctx) // it must come back, however the part ends
		if err := scale(ctx, before); err != nil {
			return fmt.Errorf("bringing the manager back: %w", err)
		}
		return w.until(ctx, "the manager's return", func(ctx context.Context) error { return w.RolledOut(ctx, manager()) })
	}
	if err := scale(ctx, 0); err != nil {
		return restore, fmt.Errorf("taking the manager away: %w", err)
	}
	return restore, w.until(ctx, "the managers' end", func(ctx context.Context) error {
		var pods corev1.PodList
		if err := w.List(ctx, &pods, client.InNamespace(kube.SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": kube.ManagerName}); err != nil {
			return err
		}
		if n := len(pods.Items); n > 0 {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	})
}
