package check

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Sections of the documentation.
const (
	docsUpgrade  = "docs/operations.md#upgrade"
	docsAgent    = "docs/operations.md#an-agent-without-a-manager"
	docsTrouble  = "docs/operations.md#troubleshooting"
	docsHelm     = "docs/operations.md#install-by-helm"
	docsSettings = "docs/operations.md#platform-settings"
)

// programs checks the manager and the agents.
func (f *findings) programs(s *snapshot.Snapshot) {
	if !s.Has(snapshot.Programs) {
		return
	}
	status := report.StatusOf(s)
	logs := fmt.Sprintf("see kubectl -n %s describe deployment %s, and its logs", s.Namespace, snapshot.Manager)
	switch m := status.Manager; {
	case s.Mesh.Manager == nil:
		f.add(Error, "manager-missing", "README.md#install-it", "install the mesh again: its policies apply, and nothing changes them", "Deployment %s does not exist in namespace %s", snapshot.Manager, s.Namespace)
	case m.Ready == 0:
		f.add(Error, "manager-not-ready", docsTrouble, logs, "none of %d replicas of the manager is ready", m.Replicas)
	case m.Ready < m.Replicas:
		f.add(Warning, "manager-not-ready", docsTrouble, logs, "%d of %d replicas of the manager are ready", m.Ready, m.Replicas)
	case m.Leader == "":
		f.add(Error, "manager-leaderless", docsTrouble, logs, "no replica of the manager leads: Lease %s/%s has no holder", s.Namespace, snapshot.Manager)
	}
	if s.Mesh.Agents == nil {
		f.add(Error, "agents-missing", "README.md#install-it", "install the mesh again: labelled pods cannot reach the apiserver", "DaemonSet %s does not exist in namespace %s", snapshot.Agent, s.Namespace)
		return
	}
	if slices.ContainsFunc(s.Mesh.Agents.Spec.Template.Spec.Containers, func(c corev1.Container) bool { return len(c.Args) > 0 && c.Args[0] == "cleanup" }) {
		f.add(Error, "agents-clean-up", "docs/operations.md#uninstall", "go on with the removal of the mesh, or install it again",
			"DaemonSet %s removes the redirections of its nodes: no pod there is on the mesh", snapshot.Agent)
	}
	for _, a := range status.Agents.Nodes {
		f.agent(s, a)
	}
}

// agent checks the agent of a node.
func (f *findings) agent(s *snapshot.Snapshot, a report.Agent) {
	describe := fmt.Sprintf("see kubectl -n %s describe daemonset %s, and the taints of the node", s.Namespace, snapshot.Agent)
	switch {
	case a.Pod == "":
		f.add(Error, "agent-missing", docsAgent, describe, "node %s has no agent, so that its labelled pods (%d) cannot reach the apiserver", a.Node, a.Members)
	case !a.Ready && a.Members > 0:
		f.add(Error, "agent-not-ready", docsAgent, fmt.Sprintf("see kubectl -n %s logs %s", s.Namespace, a.Pod), "agent %s on node %s is not ready; labelled pods there: %d", a.Pod, a.Node, a.Members)
	case !a.Ready:
		f.add(Warning, "agent-not-ready", docsAgent, fmt.Sprintf("see kubectl -n %s logs %s", s.Namespace, a.Pod), "agent %s on node %s is not ready", a.Pod, a.Node)
	}
}

// versions compares the versions of the programs.
func (f *findings) versions(s *snapshot.Snapshot) {
	agents, managers := report.Versions(s, snapshot.Agent), report.Versions(s, snapshot.Manager)
	if len(agents) > 1 {
		f.add(Warning, "agent-versions", docsUpgrade, fmt.Sprintf("wait for the rollout: kubectl -n %s rollout status daemonset %s", s.Namespace, snapshot.Agent),
			"agents have several versions: %s", strings.Join(agents, ", "))
	}
	for _, m := range managers {
		for _, a := range agents {
			if of, ok := minor(m); ok {
				if other, ok := minor(a); ok && of != other {
					f.add(Warning, "version-skew", docsUpgrade, "upgrade manager and agents to one version", "the manager has version %s, and agents have %s", m, a)
				}
			}
		}
	}
}

// minor returns the major and minor version of a text such as v1.2.3; ok is false for other texts.
func minor(text string) (version [2]int, ok bool) {
	_, err := fmt.Sscanf(strings.TrimPrefix(text, "v"), "%d.%d", &version[0], &version[1])
	return version, err == nil
}

// quotaRefusal is in the messages about pods of critical priority classes in namespaces without a
// quota for them.
const quotaRefusal = "insufficient quota to match these scopes"

// quotas checks whether quotas admit the pods of the mesh.
func (f *findings) quotas(s *snapshot.Snapshot) {
	if !s.Has(snapshot.Programs) || !s.Has(snapshot.Limits) {
		return
	}
	refused := slices.ContainsFunc(s.Mesh.Failures, func(m string) bool { return strings.Contains(m, quotaRefusal) })
	if refused && lacksPods(s) && !slices.ContainsFunc(s.Mesh.Quotas, forPriorityClasses) {
		f.add(Error, "quota-missing", docsHelm, "create the quota: set priorityClass.resourceQuota.enabled in the chart",
			"the cluster admits pods of critical priority classes only in namespaces with a ResourceQuota for them, and namespace %s has none", s.Namespace)
	}
	for _, q := range s.Mesh.Quotas {
		hard, used := q.Status.Hard[corev1.ResourcePods], q.Status.Used[corev1.ResourcePods]
		if _, bounded := q.Status.Hard[corev1.ResourcePods]; bounded && used.Cmp(hard) >= 0 {
			f.add(Error, "quota-used-up", docsHelm, "raise the quota: an upgrade needs two agents on each node", "ResourceQuota %s/%s allows %s pods, and all are used", q.Namespace, q.Name, hard.String())
		}
	}
}

// lacksPods reports whether pods of the mesh are missing.
func lacksPods(s *snapshot.Snapshot) bool {
	d, a := s.Mesh.Manager, s.Mesh.Agents
	return d != nil && d.Spec.Replicas != nil && d.Status.Replicas < *d.Spec.Replicas || a != nil && a.Status.CurrentNumberScheduled < a.Status.DesiredNumberScheduled
}

func forPriorityClasses(q corev1.ResourceQuota) bool {
	return q.Spec.ScopeSelector != nil && slices.ContainsFunc(q.Spec.ScopeSelector.MatchExpressions, func(r corev1.ScopedResourceSelectorRequirement) bool {
		return r.ScopeName == corev1.ResourceQuotaScopePriorityClass
	})
}

// settings checks the administrator's settings, and what exceeds them.
func (f *findings) settings(s *snapshot.Snapshot) {
	if !s.Has(snapshot.Limits) {
		return
	}
	settings := platform.Default()
	if s.Mesh.Settings != nil {
		parsed, err := platform.Parse(s.Mesh.Settings.Data)
		if err != nil {
			f.add(Error, "settings-invalid", docsSettings, "correct it: the manager keeps the former settings, and the defaults when it starts", "ConfigMap %s/%s is invalid: %v", s.Namespace, platform.ConfigMap, err)
			return
		}
		settings = parsed
	}
	for i := range s.Configs {
		if c := &s.Configs[i]; !compile.Derived(c) && !settings.ConfigsIn(c.Namespace) {
			f.add(Warning, "namespace-excluded", docsSettings, "delete it, or add the namespace to the setting", "ShardingConfig %s/%s is in a namespace that %s excludes", c.Namespace, c.Name, platform.ShardingNamespaces)
		}
	}
	for i := range s.Pods {
		if pod := &s.Pods[i]; pod.Namespace == s.Namespace {
			f.add(Error, "namespace-excluded", docsTrouble, "remove the label from its template: the mesh does not capture pods of its own namespace", "pod %s/%s has the label of the mesh", pod.Namespace, pod.Name)
		}
	}
}
