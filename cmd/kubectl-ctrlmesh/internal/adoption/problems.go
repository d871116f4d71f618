package adoption

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/clip"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Problems returns what must be fixed before an adoption begins, and how. The workload must exist.
func Problems(s *snapshot.Snapshot, r Request) (out []string) {
	v := r.view(s)
	status := report.StatusOf(s)
	for _, problem := range []string{status.Manager.Problem, status.Agents.Problem} {
		if problem != "" {
			out = append(out, problem)
		}
	}
	if nodes := uncovered(s, v.workload.Pods); len(nodes) > 0 && status.Agents.Problem == "" {
		out = append(out, fmt.Sprintf("pods of %s run on nodes without a ready agent (%s): see kubectl -n %s describe daemonset %s", r.Target, clip.Join(nodes, maxNamed, ", "), s.Namespace, snapshot.Agent))
	}
	out = append(out, v.aboutRoot()...)
	for _, c := range v.others() {
		out = append(out, fmt.Sprintf("%s selects pods of %s as well: correct or delete it", origin.Of(c), r.Target))
	}
	return out
}

// aboutRoot returns what is wrong with the root that exists or is wanted.
func (v view) aboutRoot() (out []string) {
	root := v.root
	switch {
	case root == nil && v.Wanted == nil:
		return []string{fmt.Sprintf("no ShardingConfig targets %s: name one by -f, or have one made by --shards and --resources", v.Target)}
	case root == nil:
		root = v.Wanted
	case v.Wanted != nil && !equality.Semantic.DeepEqual(root.Spec, v.Wanted.Spec):
		out = append(out, fmt.Sprintf("ShardingConfig %s exists with another spec: put the new one in its place by kubectl replace, or repeat the command without -f, --shards and --resources to keep it", root.Name))
	}
	if ptr.Deref(root.Spec.Root.Disable, false) {
		out = append(out, fmt.Sprintf("ShardingConfig %s is disabled: remove spec.root.disable", root.Name))
	}
	if need := needed(root.Spec.Root); v.workload.Replicas < need {
		out = append(out, fmt.Sprintf("%s has %s, and its shards need %d: kubectl -n %s scale %s --replicas=%d", v.Target, render.Count(int(v.workload.Replicas), "replica"), need, v.Namespace, v.Target.Argument(), need))
	}
	return out
}

// needed returns how many pods the shards of a root need.
func needed(root *v1alpha1.RootConfig) (pods int32) {
	for _, shard := range layout.Shards(root) {
		pods += max(1, int32(shard.Replicas))
	}
	return pods
}

// others returns configurations beside the root that select pods of the workload.
func (v view) others() (out []*v1alpha1.ShardingConfig) {
	var pods []metav1.Object
	if v.workload != nil {
		template := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: v.workload.Template}}
		pods = append(pods, &template)
		for i := range v.workload.Pods {
			pods = append(pods, &v.workload.Pods[i])
		}
	}
	for i := range v.s.Configs {
		c := &v.s.Configs[i]
		if c.Namespace != v.Namespace || compile.Derived(c) || v.root != nil && origin.Of(c) == origin.Of(v.root) {
			continue
		}
		if v.selects(c, pods) {
			out = append(out, c)
		}
	}
	return out
}

// selects reports whether a configuration names the workload, or selects one of its pods.
func (v view) selects(c *v1alpha1.ShardingConfig, pods []metav1.Object) bool {
	if c.Spec.Root != nil && layout.Target(c.Spec.Root) == v.Target {
		return true
	}
	is := func(metav1.Object) bool { return false }
	if c.Spec.Root != nil {
		is = layout.Selects(c.Spec.Root)
	} else if selects, problem := compile.Selects(c); problem == nil {
		is = selects
	}
	return slices.ContainsFunc(pods, is)
}

// Named returns the request to remove a root by its name, or why the plugin does not remove it.
func Named(s *snapshot.Snapshot, namespace, name string) (Request, error) {
	c := s.Config(namespace, name)
	switch {
	case c == nil:
		return Request{}, fmt.Errorf("there is no ShardingConfig %s in namespace %s: name its namespace by -n; if it is deleted already, name the workload as statefulset/NAME or deployment/NAME", name, namespace)
	case compile.Derived(c):
		return Request{}, fmt.Errorf("ShardingConfig %s is a shard of root %s: name the root", name, c.Labels[v1alpha1.RootLabel])
	case !origin.IsNative(c):
		return Request{}, ofDialect(c)
	case c.Spec.Root == nil:
		return Request{}, handWritten(c)
	case c.Spec.Root.TargetSelector != nil:
		return Request{}, fmt.Errorf("ShardingConfig %s selects the pods of several workloads: run kubectl -n %s delete shardingconfig %s, then remove the label %s from their pod templates", name, namespace, name, v1alpha1.EnableProxyLabel)
	}
	return Request{Namespace: namespace, Target: layout.Target(c.Spec.Root)}, nil
}

// Removable returns an error if the plugin cannot remove the workload from the mesh.
func Removable(s *snapshot.Snapshot, r Request) error {
	v := r.view(s)
	if v.workload == nil && v.root == nil {
		return fmt.Errorf("there is no %s in namespace %s, and no ShardingConfig targets it: name another namespace by -n", r.Target, r.Namespace)
	}
	var names []string
	for _, c := range v.others() {
		switch {
		case !origin.IsNative(c):
			return ofDialect(c)
		case c.Spec.Root == nil:
			return handWritten(c)
		}
		names = append(names, c.Name)
	}
	if len(names) > 0 {
		return fmt.Errorf("another root selects pods of %s: %s: delete it first, or correct its target", r.Target, strings.Join(names, ", "))
	}
	return nil
}

func handWritten(c *v1alpha1.ShardingConfig) error {
	return fmt.Errorf("%s is a hand-written shard, whose pods are refused once it is deleted: remove the label %s from the pod template, wait until the pods are replaced, then run kubectl -n %s delete shardingconfig %s",
		origin.Of(c), v1alpha1.EnableProxyLabel, c.Namespace, c.Name)
}

func ofDialect(c *v1alpha1.ShardingConfig) error {
	return fmt.Errorf("%s is of a dialect: delete it by kubectl, wait for its end, then repeat this command with the workload as statefulset/NAME or deployment/NAME", origin.Of(c))
}

// Adoptions returns the actions that are left of an adoption.
func Adoptions(s *snapshot.Snapshot, r Request) (out []Action) {
	v := r.view(s)
	if v.created() != nil {
		out = append(out, CreateRoot)
	}
	if v.labelled() != nil {
		out = append(out, SetLabel)
	}
	return out
}

// Removals returns the actions that are left of a removal.
func Removals(s *snapshot.Snapshot, r Request) (out []Action) {
	v := r.view(s)
	if v.root != nil && v.root.DeletionTimestamp == nil {
		out = append(out, DeleteRoot)
	}
	if v.unlabelled() != nil {
		out = append(out, UnsetLabel)
	}
	return out
}

// Access returns the permissions that actions need.
func (r Request) Access(actions []Action) (out []snapshot.Access) {
	of := map[Action]snapshot.Access{
		CreateRoot: {Verb: "create", Group: v1alpha1.GroupName, Resource: "shardingconfigs"},
		DeleteRoot: {Verb: "delete", Group: v1alpha1.GroupName, Resource: "shardingconfigs"},
	}
	for _, action := range actions {
		a, found := of[action]
		if !found {
			a = snapshot.Access{Verb: "patch", Group: "apps", Resource: strings.ToLower(r.Target.Kind) + "s"}
		}
		a.Namespace = r.Namespace
		out = append(out, a)
	}
	return out
}
