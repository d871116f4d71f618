package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/readiness"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Status is the state of the mesh and of each operator on it.
type Status struct {
	Healthy   bool       `json:"healthy"`
	Manager   Manager    `json:"manager"`
	Agents    Agents     `json:"agents"`
	Operators []Operator `json:"operators"`
	// Observed are the workloads on the mesh that no ShardingConfig selects.
	Observed []Observed `json:"observed,omitempty"`
}

// Manager is the state of the manager.
type Manager struct {
	Replicas int32 `json:"replicas"`
	Ready    int32 `json:"ready"`
	// Leader is the pod that leads; empty if none does.
	Leader   string   `json:"leader,omitempty"`
	Versions []string `json:"versions"`
	// Problem says what is wrong; empty if nothing is.
	Problem string `json:"problem,omitempty"`
}

// Agents is the state of the agents.
type Agents struct {
	Nodes    []Agent  `json:"nodes"`
	Ready    int      `json:"ready"`
	Versions []string `json:"versions"`
	Problem  string   `json:"problem,omitempty"`
}

// Agent is the state of the agent on a node.
type Agent struct {
	Node string `json:"node"`
	// Pod is the agent; empty if there is none. During a takeover it is the one that is ready.
	Pod     string `json:"pod,omitempty"`
	Ready   bool   `json:"ready"`
	Version string `json:"version,omitempty"`
	// Members is the number of labelled pods on the node.
	Members int `json:"members"`
}

// Operator is the state of a configuration that a user wrote.
type Operator struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Role is root, shard, shadow or passthrough.
	Role string `json:"role"`
	// State is the reason of the condition Ready.
	State        string `json:"state"`
	Healthy      bool   `json:"healthy"`
	Shards       int32  `json:"shards"`
	Members      int32  `json:"members"`
	ReadyMembers int32  `json:"readyMembers"`
	// Rollout is the phase of a rollout, with the shard that it has reached.
	Rollout string `json:"rollout,omitempty"`
	// Problems say why it is not healthy, and Warnings what a user should look at.
	Problems []string `json:"problems,omitempty"`
	Warnings []string `json:"warnings,omitempty"`
}

// StatusOf returns the state of the mesh in a snapshot with programs, configurations and members.
func StatusOf(s *snapshot.Snapshot) Status {
	out := Status{Manager: managerOf(s), Agents: agentsOf(s), Operators: []Operator{}}
	out.Healthy = out.Manager.Problem == "" && out.Agents.Problem == ""
	for i := range s.Configs {
		c := &s.Configs[i]
		if compile.Derived(c) {
			continue
		}
		o := OperatorOf(c)
		out.Healthy = out.Healthy && o.Healthy
		out.Operators = append(out.Operators, o)
	}
	out.Observed = observed(s)
	slices.SortFunc(out.Operators, func(a, b Operator) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Kind, b.Kind))
	})
	return out
}

func managerOf(s *snapshot.Snapshot) Manager {
	out := Manager{Versions: append([]string{}, Versions(s, snapshot.Manager)...)}
	d := s.Mesh.Manager
	if d == nil {
		out.Problem = fmt.Sprintf("there is no Deployment %s in namespace %s: install the mesh, or name its namespace by --mesh-namespace", snapshot.Manager, s.Namespace)
		return out
	}
	out.Replicas, out.Ready = ptr.Deref(d.Spec.Replicas, 1), d.Status.ReadyReplicas
	holder, _ := snapshot.Holder(s.Mesh.Lease, s.Now)
	out.Leader, _, _ = strings.Cut(holder, "_") // controller-runtime appends a random suffix
	switch {
	case out.Ready < out.Replicas:
		out.Problem = fmt.Sprintf("%d of %d replicas are ready: see kubectl -n %s describe deployment %s", out.Ready, out.Replicas, s.Namespace, snapshot.Manager)
	case out.Leader == "":
		out.Problem = fmt.Sprintf("no replica leads: see the logs of Deployment %s in namespace %s", snapshot.Manager, s.Namespace)
	}
	return out
}

func agentsOf(s *snapshot.Snapshot) Agents {
	out := Agents{Nodes: AgentsByNode(s), Versions: append([]string{}, Versions(s, snapshot.Agent)...)}
	var without []string
	for _, a := range out.Nodes {
		if a.Ready {
			out.Ready++
		} else {
			without = append(without, a.Node)
		}
	}
	switch d := s.Mesh.Agents; {
	case d == nil:
		out.Problem = fmt.Sprintf("there is no DaemonSet %s in namespace %s: install the mesh, or name its namespace by --mesh-namespace", snapshot.Agent, s.Namespace)
	case len(without) > 0:
		out.Problem = fmt.Sprintf("no agent is ready on %s: see kubectl -n %s describe daemonset %s", strings.Join(without, ", "), s.Namespace, snapshot.Agent)
	case out.Ready < int(d.Status.DesiredNumberScheduled):
		out.Problem = fmt.Sprintf("agents are ready on %d of %d nodes: see kubectl -n %s describe daemonset %s", out.Ready, d.Status.DesiredNumberScheduled, s.Namespace, snapshot.Agent)
	}
	return out
}

// AgentsByNode returns the agent of each node that has one, or has labelled pods, sorted by node.
func AgentsByNode(s *snapshot.Snapshot) []Agent {
	byNode := map[string]*Agent{}
	at := func(node string) *Agent {
		if byNode[node] == nil {
			byNode[node] = &Agent{Node: node}
		}
		return byNode[node]
	}
	for _, pod := range s.Program(snapshot.Agent) {
		if pod.Spec.NodeName == "" {
			continue
		}
		if a := at(pod.Spec.NodeName); a.Pod == "" || readiness.Of(pod) {
			a.Pod, a.Ready, a.Version = pod.Name, readiness.Of(pod), VersionOfImage(imageOf(pod))
		}
	}
	for i := range s.Pods {
		if node := s.Pods[i].Spec.NodeName; node != "" {
			at(node).Members++
		}
	}
	out := []Agent{}
	for _, a := range byNode {
		out = append(out, *a)
	}
	slices.SortFunc(out, func(a, b Agent) int { return strings.Compare(a.Node, b.Node) })
	return out
}

// OperatorOf returns the state of a configuration.
func OperatorOf(c *v1alpha1.ShardingConfig) Operator {
	ready := operator.Condition(c, v1alpha1.ConditionReady)
	out := Operator{
		Kind: origin.Of(c).Kind.String(), Namespace: c.Namespace, Name: c.Name, Role: roleOf(c), State: cmp.Or(ready.Reason, "Unknown"),
		Shards: c.Status.Shards, Members: c.Status.Members, ReadyMembers: c.Status.ReadyMembers,
	}
	if c.Status.Root != nil && c.Status.Root.Rollout != nil {
		r := c.Status.Root.Rollout
		if out.Rollout = string(r.Phase); r.Shard != "" {
			out.Rollout += " (" + r.Shard + ")"
		}
	}
	out.Problems = problemsOf(c, ready)
	for _, kind := range []string{v1alpha1.ConditionUndivided, v1alpha1.ConditionShardIdle} {
		if is := operator.Condition(c, kind); is.Status == metav1.ConditionTrue {
			out.Warnings = append(out.Warnings, describe(is))
		}
	}
	out.Healthy = len(out.Problems) == 0
	return out
}

// problemsOf returns what a user has to do, or wait for.
func problemsOf(c *v1alpha1.ShardingConfig, ready metav1.Condition) (out []string) {
	degraded, leaderless := operator.Condition(c, v1alpha1.ConditionDegraded), operator.Condition(c, v1alpha1.ConditionLeaderMissing)
	switch {
	case degraded.Status == metav1.ConditionTrue:
		out = append(out, describe(degraded))
	case leaderless.Status == metav1.ConditionTrue: // Ready repeats it
	case ready.Status == "":
		out = append(out, "the manager has not written its status yet: wait, or see whether the manager runs")
	case ready.Status != metav1.ConditionTrue && ready.Reason != string(v1alpha1.ReasonDisabled):
		out = append(out, describe(ready))
	case origin.IsNative(c) && c.Status.ObservedGeneration < c.Generation:
		out = append(out, "the status does not describe the current spec yet: wait, or see whether the manager runs")
	}
	if leaderless.Status == metav1.ConditionTrue {
		out = append(out, describe(leaderless))
	}
	return out
}

func describe(is metav1.Condition) string {
	return fmt.Sprintf("%s (%s): %s", is.Type, is.Reason, is.Message)
}

func roleOf(c *v1alpha1.ShardingConfig) string {
	switch {
	case c.Spec.Root != nil:
		return "root"
	case compile.Shadows(c):
		return "shadow"
	case compile.PassesThrough(c):
		return "passthrough"
	}
	return "shard"
}

// WriteText implements render.Report.
func (s Status) WriteText(t *render.Text) {
	t.Line("manager: %d/%d ready, leader %s, version %s", s.Manager.Ready, s.Manager.Replicas, cmp.Or(s.Manager.Leader, "NONE"), joined(s.Manager.Versions))
	t.Line("agents: %d/%d nodes ready, version %s", s.Agents.Ready, len(s.Agents.Nodes), joined(s.Agents.Versions))
	for _, problem := range []string{s.Manager.Problem, s.Agents.Problem} {
		if problem != "" {
			t.Line("! %s", problem)
		}
	}
	nodes := collect.Map(s.Agents.Nodes, func(a Agent) []string {
		return []string{a.Node, cmp.Or(a.Pod, "NONE"), yesNo(a.Ready), a.Version, render.Number(a.Members)}
	})
	t.Table([]string{"NODE", "AGENT", "READY", "VERSION", "MEMBERS"}, nodes)
	var rows [][]string
	var notes []string
	for _, o := range s.Operators {
		rows = append(rows, []string{o.Namespace, o.title(), o.Role, o.State, render.Number(o.Shards), fmt.Sprintf("%d/%d", o.ReadyMembers, o.Members), o.Rollout})
		for _, problem := range o.Problems {
			notes = append(notes, fmt.Sprintf("! %s/%s: %s", o.Namespace, o.Name, problem))
		}
		for _, warning := range o.Warnings {
			notes = append(notes, fmt.Sprintf("? %s/%s: %s", o.Namespace, o.Name, warning))
		}
	}
	t.Table([]string{"NAMESPACE", "OPERATOR", "ROLE", "STATE", "SHARDS", "READY", "ROLLOUT"}, rows)
	for _, o := range s.Observed {
		notes = append(notes, fmt.Sprintf("  %s is on the mesh without a ShardingConfig: %s", o.title(), o.next()))
	}
	if len(notes) > 0 {
		t.Line("")
	}
	for _, n := range notes {
		t.Line("%s", n)
	}
}

// title returns the name, with the kind of objects of the dialects.
func (o Operator) title() string {
	if o.Kind == origin.Native.GroupKind().String() {
		return o.Name
	}
	kind, _, _ := strings.Cut(o.Kind, ".")
	return kind + " " + o.Name
}

func joined(list []string) string { return cmp.Or(strings.Join(list, ", "), "unknown") }

func yesNo(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}
