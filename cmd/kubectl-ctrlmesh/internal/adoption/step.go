// Package adoption decides the steps by which an operator is put on the mesh, and removed from it.
// Each step follows from a snapshot alone, so a command that was interrupted goes on where it was. It
// is pure.
package adoption

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Request is what a user asked for.
type Request struct {
	Namespace string
	Target    layout.Workload
	// Wanted is the root to create; nil if it must exist already.
	Wanted *v1alpha1.ShardingConfig
}

// Kind is what a step consists of.
type Kind string

// Kinds of steps.
const (
	// Done: nothing is left to do.
	Done Kind = "Done"
	// Act: the command changes something.
	Act Kind = "Act"
	// Wait: others have to do something first.
	Wait Kind = "Wait"
	// Stop: waiting cannot help.
	Stop Kind = "Stop"
)

// Action is what a command changes.
type Action string

// Actions.
const (
	CreateRoot Action = "CreateRoot"
	DeleteRoot Action = "DeleteRoot"
	SetLabel   Action = "SetLabel"
	UnsetLabel Action = "UnsetLabel"
)

// Step is the next step.
type Step struct {
	Kind Kind
	// Action is set for Act.
	Action Action
	// Why says what Wait waits for, or why the command stops.
	Why string
	// Do is what a user can do, usually a command.
	Do string
}

// view is a snapshot, with what a request is about.
type view struct {
	Request
	s        *snapshot.Snapshot
	workload *snapshot.Workload
	root     *v1alpha1.ShardingConfig
}

func (r Request) view(s *snapshot.Snapshot) view {
	return view{r, s, s.Subjects.Workload, r.Root(s)}
}

// Root returns the root of the workload; nil if there is none. If a root is wanted, it is the one of
// that name.
func (r Request) Root(s *snapshot.Snapshot) *v1alpha1.ShardingConfig {
	for i := range s.Configs {
		c := &s.Configs[i]
		named := r.Wanted == nil || c.Name == r.Wanted.Name
		if c.Namespace == r.Namespace && c.Spec.Root != nil && layout.Target(c.Spec.Root) == r.Target && origin.IsNative(c) && named {
			return c
		}
	}
	return nil
}

// Adopt returns the next step of an adoption.
func Adopt(s *snapshot.Snapshot, r Request) Step {
	return r.view(s).first(view.exists, view.created, view.labelled, view.replaced, view.settled, view.led)
}

// Remove returns the next step of a removal.
func Remove(s *snapshot.Snapshot, r Request) Step {
	return r.view(s).first(view.deleted, view.unlabelled, view.restored)
}

// first returns the step of the first stage that is not complete.
func (v view) first(stages ...func(view) *Step) Step {
	for _, stage := range stages {
		if step := stage(v); step != nil {
			return *step
		}
	}
	return Step{Kind: Done}
}

func (v view) exists() *Step {
	switch {
	case v.workload == nil:
		return &Step{Kind: Stop, Why: fmt.Sprintf("there is no %s in namespace %s", v.Target, v.Namespace), Do: "name another namespace by -n"}
	case v.root != nil && v.root.DeletionTimestamp != nil:
		return &Step{Kind: Stop, Why: "ShardingConfig " + v.root.Name + " is being deleted", Do: "wait for its end: kubectl ctrlmesh remove " + v.argument()}
	}
	return nil
}

func (v view) created() *Step {
	switch {
	case v.root == nil && v.Wanted == nil:
		return &Step{Kind: Stop, Why: v.aboutRoot()[0], Do: "kubectl ctrlmesh adopt " + v.argument() + " -f FILE"}
	case v.root == nil:
		return &Step{Kind: Act, Action: CreateRoot}
	}
	return nil
}

func (v view) labelled() *Step {
	if v.workload.Template[v1alpha1.EnableProxyLabel] != "true" {
		return &Step{Kind: Act, Action: SetLabel}
	}
	return nil
}

// replaced waits until all pods have the label.
func (v view) replaced() *Step {
	step := v.rollout(true)
	if step == nil {
		return nil
	}
	if ready := operator.Condition(v.root, v1alpha1.ConditionReady); ready.Reason != "" && !operator.True(v.root, v1alpha1.ConditionReady) {
		step.Why += fmt.Sprintf("; ShardingConfig %s: %s: %s%s", v.root.Name, ready.Reason, ready.Message, hint(ready.Reason))
	}
	return step
}

// settled waits until the manager has divided the operator.
func (v view) settled() *Step {
	step := &Step{Kind: Wait, Do: fmt.Sprintf("kubectl -n %s describe shardingconfig %s", v.Namespace, v.root.Name)}
	ready := operator.Condition(v.root, v1alpha1.ConditionReady)
	switch {
	case ready.Reason == "" || v.root.Status.ObservedGeneration < v.root.Generation:
		step.Why = fmt.Sprintf("the manager has not written the status of ShardingConfig %s yet", v.root.Name)
		if problem := report.StatusOf(v.s).Manager.Problem; problem != "" {
			step.Why += ": " + problem
		}
		return step
	case !operator.True(v.root, v1alpha1.ConditionReady):
		step.Why = fmt.Sprintf("ShardingConfig %s: %s: %s%s", v.root.Name, ready.Reason, ready.Message, hint(ready.Reason))
		return step
	}
	return nil
}

// led waits until each shard has a leader.
func (v view) led() *Step {
	step := &Step{Kind: Wait, Do: fmt.Sprintf("kubectl ctrlmesh shards %s -n %s", v.root.Name, v.Namespace)}
	shards, err := operator.Shards(v.s, v.root)
	if err != nil {
		return &Step{Kind: Stop, Why: err.Error(), Do: "report it as a bug"}
	}
	for _, shard := range shards {
		switch shard.Leader.State {
		case operator.Missing:
			step.Why = fmt.Sprintf("shard %s has no leader: Lease %s has no holder", shard.Status.Name, shard.Leader.Lock)
			return step
		case operator.Unknown:
			step.Why = fmt.Sprintf("the leader of shard %s is not in the status yet, and the Leases cannot be read", shard.Status.Name)
			return step
		}
	}
	return nil
}

// deleted waits until the root is gone. Its finalizer ends once the locks are released and the members
// are replaced.
func (v view) deleted() *Step {
	switch {
	case v.root == nil:
		return nil
	case v.root.DeletionTimestamp == nil:
		return &Step{Kind: Act, Action: DeleteRoot}
	}
	step := &Step{
		Kind: Wait, Why: fmt.Sprintf("ShardingConfig %s is being deleted", v.root.Name),
		Do: fmt.Sprintf("kubectl -n %s describe shardingconfig %s", v.Namespace, v.root.Name),
	}
	if ready := operator.Condition(v.root, v1alpha1.ConditionReady); ready.Reason != "" {
		step.Why += fmt.Sprintf(": %s: %s", ready.Reason, ready.Message)
	}
	if problem := report.StatusOf(v.s).Manager.Problem; problem != "" {
		step.Why += "; the manager must release it: " + problem
	}
	return step
}

func (v view) unlabelled() *Step {
	if v.workload != nil && v.workload.Template[v1alpha1.EnableProxyLabel] != "" {
		return &Step{Kind: Act, Action: UnsetLabel}
	}
	return nil
}

// restored waits until no pod has the label.
func (v view) restored() *Step {
	if v.workload == nil {
		return nil
	}
	return v.rollout(false)
}

// argument is how the user names the workload.
func (v view) argument() string {
	return fmt.Sprintf("%s -n %s", v.Target.Argument(), v.Namespace)
}

// kinds are the names of the kinds of workloads on a command line.
var kinds = map[string]string{
	"statefulset": layout.StatefulSet, "statefulsets": layout.StatefulSet, "sts": layout.StatefulSet,
	"deployment": layout.Deployment, "deployments": layout.Deployment, "deploy": layout.Deployment,
}

// ParseTarget parses KIND/NAME.
func ParseTarget(argument string) (layout.Workload, error) {
	kind, name, _ := strings.Cut(argument, "/")
	found := kinds[strings.TrimSuffix(strings.ToLower(kind), ".apps")]
	if found == "" || name == "" || strings.Contains(name, "/") {
		return layout.Workload{}, fmt.Errorf("invalid workload %q: name it as statefulset/NAME or deployment/NAME", argument)
	}
	return layout.Workload{Kind: found, Name: name}, nil
}

// hints say what to do about reasons of the condition Ready whose messages do not.
var hints = map[v1alpha1.Reason]string{
	v1alpha1.ReasonHeldOutside: "the rolling update must replace the pod that leads; if it has exited, its lease must end",
	v1alpha1.ReasonUnknownLock: "name the lock in spec.controller.locks, or exclude it in spec.controller.excludedLocks if it elects no leader",
	v1alpha1.ReasonNoLeader:    "see the log of the pods of the shard",
	v1alpha1.ReasonNotCaptured: "see the Events of the pod, and the log of the agent on its node",
	v1alpha1.ReasonAgentAway:   "see the agent of the node",
}

// hint returns what to do about a reason, in brackets; empty if its message says it.
func hint(reason string) string {
	if text := hints[v1alpha1.Reason(reason)]; text != "" {
		return " (" + text + ")"
	}
	return ""
}

// Leaders returns the leaders of the shards of a root, sorted.
func Leaders(s *snapshot.Snapshot, root *v1alpha1.ShardingConfig) (out []string) {
	shards, err := operator.Shards(s, root)
	if err != nil {
		return nil
	}
	for _, shard := range shards {
		if shard.Leader.Pod != "" {
			out = append(out, shard.Leader.Pod)
		}
	}
	slices.Sort(out)
	return out
}
