package check

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Sections of the documentation about operators.
const (
	docsReasons    = "docs/operations.md#reasons-of-conditions"
	docsLeaderless = "docs/operations.md#shards-without-a-leader"
	docsAdopt      = "docs/shard.md#adopt-an-operator"
	docsUndivided  = "docs/operations.md#resources-that-several-shards-write"
)

// captureTime is how long a pod may take until it is captured and the status says so.
const captureTime = time.Minute

// operators checks the configurations that users wrote.
func (f *findings) operators(s *snapshot.Snapshot) {
	if !s.Has(snapshot.Configs("")) {
		return
	}
	for i := range s.Configs {
		c := &s.Configs[i]
		if compile.Derived(c) {
			continue
		}
		f.conditions(c)
		if !operator.True(c, v1alpha1.ConditionLeaderMissing) && s.Has(snapshot.Locks) && s.Has(snapshot.Members("")) {
			f.leaders(s, c)
		}
		if s.Has(snapshot.Locks) {
			f.outsiders(s, c)
		}
	}
}

// title names a configuration.
func title(c *v1alpha1.ShardingConfig) string { return origin.Of(c).String() }

// conditions adds what the manager found.
func (f *findings) conditions(c *v1alpha1.ShardingConfig) {
	add := func(severity Severity, id, docs, do string, is metav1.Condition) {
		f.add(severity, id, docs, do, "%s: %s: %s", title(c), is.Reason, is.Message)
	}
	const message = "do what the message says"
	pods := fmt.Sprintf("see the pods of the shard by kubectl ctrlmesh shards %s -n %s", c.Name, c.Namespace)
	ready, degraded := operator.Condition(c, v1alpha1.ConditionReady), operator.Condition(c, v1alpha1.ConditionDegraded)
	switch {
	case degraded.Status == metav1.ConditionTrue:
		add(Error, "operator-degraded", docsReasons, message, degraded)
	case ready.Status == metav1.ConditionFalse && v1alpha1.Reason(ready.Reason).Permanent():
		add(Error, "operator-degraded", docsReasons, message, ready)
	}
	for _, one := range []struct {
		condition         string
		severity          Severity
		finding, docs, do string
	}{
		{v1alpha1.ConditionLeaderMissing, Error, "shard-leaderless", docsLeaderless, pods},
		{v1alpha1.ConditionUndivided, Warning, "operator-undivided", docsUndivided, message},
		{v1alpha1.ConditionShardIdle, Warning, "shard-idle", docsLeaderless, pods},
	} {
		if is := operator.Condition(c, one.condition); is.Status == metav1.ConditionTrue {
			add(one.severity, one.finding, one.docs, one.do, is)
		}
	}
}

// leaders finds shards whose lock has no holder. No condition may report them yet, or no manager may
// run to report them.
func (f *findings) leaders(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) {
	shards, err := operator.Shards(s, c)
	if err != nil {
		f.add(Error, "status-invalid", docsReasons, "report it as a bug", "%v", err)
		return
	}
	for _, shard := range shards {
		if shard.Leader.State != operator.Missing {
			continue
		}
		since := ""
		if !shard.Leader.Since.IsZero() {
			since = fmt.Sprintf(" since %s", shard.Leader.Since.UTC().Format(time.RFC3339))
		}
		f.add(Error, "shard-leaderless", docsLeaderless, "see the log of the pods of the shard, and whether the apiserver refuses their Lease",
			"%s: shard %s has no leader: Lease %s has no holder%s", title(c), shard.Status.Name, shard.Leader.Lock, since)
	}
}

// outsiders finds locks of a sharded operator that somebody outside the mesh holds.
func (f *findings) outsiders(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) {
	if compile.Shadows(c) || compile.PassesThrough(c) || c.Spec.DryRun || c.Status.Members == 0 || c.Spec.Root != nil && compile.Withdrawn(c) {
		return
	}
	for _, l := range c.Status.Locks {
		lock := types.NamespacedName{Namespace: l.Namespace, Name: l.Name}
		holder := l.Holder
		if lease, ok := s.Leases[lock]; ok {
			holder, _ = snapshot.Holder(&lease, s.Now)
		}
		if holder == "" || strings.HasPrefix(holder, v1alpha1.LockIdentityPrefix) {
			continue
		}
		who := fmt.Sprintf("%q", holder)
		if pod, _, _ := strings.Cut(holder, "_"); s.Outside[types.NamespacedName{Namespace: l.Namespace, Name: pod}] {
			who = "pod " + pod + ", which lacks label " + v1alpha1.EnableProxyLabel + ","
		}
		f.add(Warning, "lock-outside", docsAdopt, "set the label on the pod template of all pods of the operator, and let them be replaced", "%s: %s holds lock %s, so that the shards are in standby", title(c), who, lock)
	}
}

// pods checks that labelled pods are captured. It leaves out those whose agent is not ready, which is
// a finding by itself, and those whose configuration names them in the condition Degraded.
func (f *findings) pods(s *snapshot.Snapshot) {
	if !s.Has(snapshot.Members("")) || !s.Has(snapshot.Configs("")) {
		return
	}
	served := map[string]bool{}
	for _, a := range report.AgentsByNode(s) {
		served[a.Node] = a.Ready
	}
	for i := range s.Pods {
		pod := &s.Pods[i]
		if pod.Namespace == s.Namespace || !started(pod, s.Now) || s.Has(snapshot.Programs) && !served[pod.Spec.NodeName] || named(s, pod) {
			continue
		}
		if pod.Annotations[v1alpha1.TrustAnnotation] == "" {
			f.add(Error, "pod-not-admitted", docsReasons, "delete the pod: its successor is admitted", "pod %s/%s was created while the mesh did not admit pods, so that it is not captured", pod.Namespace, pod.Name)
			continue
		}
		if m := memberOf(s, pod); m != nil && m.Capture == "" {
			f.add(Error, "pod-not-captured", docsReasons, "see the Events of the pod, and the log of the agent on its node", "pod %s/%s on node %s is not captured: %s", pod.Namespace, pod.Name, pod.Spec.NodeName, m.Message)
		}
	}
}

// started reports whether a pod runs, and is old enough to be captured.
func started(pod *corev1.Pod, now time.Time) bool {
	return pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodRunning && now.Sub(pod.CreationTimestamp.Time) > captureTime
}

// memberOf returns what a configuration says about a pod; nil if none does.
func memberOf(s *snapshot.Snapshot, pod *corev1.Pod) *v1alpha1.MemberStatus {
	for i := range s.Configs {
		c := &s.Configs[i]
		if c.Namespace != pod.Namespace {
			continue
		}
		for j := range c.Status.Pods {
			if m := &c.Status.Pods[j]; m.Name == pod.Name && m.Node == pod.Spec.NodeName {
				return m
			}
		}
	}
	return nil
}

// named reports whether the condition Degraded of a configuration is about its members, and a pod is
// one of those that are not captured.
func named(s *snapshot.Snapshot, pod *corev1.Pod) bool {
	about := []string{string(v1alpha1.ReasonNotAdmitted), string(v1alpha1.ReasonNotCaptured), string(v1alpha1.ReasonAgentAway)}
	for i := range s.Configs {
		c := &s.Configs[i]
		is := operator.Condition(c, v1alpha1.ConditionDegraded)
		if c.Namespace != pod.Namespace || is.Status != metav1.ConditionTrue || !slices.Contains(about, is.Reason) {
			continue
		}
		if slices.ContainsFunc(c.Status.Pods, func(m v1alpha1.MemberStatus) bool { return m.Name == pod.Name && m.Capture == "" }) {
			return true
		}
	}
	return false
}
