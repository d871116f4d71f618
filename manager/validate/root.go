package validate

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// root returns the errors of a configuration with spec.root.
func root(c *v1alpha1.ShardingConfig, path *field.Path) field.ErrorList {
	errs := layout.Validate(c.Spec.Root, path)
	divisible := len(errs) == 0
	errs = append(errs, limits(c, c.Spec.Root.ResourceSelector, path.Child("resourceSelector"))...)
	errs = append(errs, sharedObjects(c.Spec.Root.Shared, path.Child("shared"))...)
	errs = append(errs, podSelector(c.Spec.Root.TargetSelector, path.Child("targetSelector"))...)
	if !divisible {
		return errs
	}
	for _, s := range layout.Shards(c.Spec.Root) {
		if problems := lockNames(c, s.Name); len(problems) > 0 {
			errs = append(errs, problems...)
			break // the other shards have the same problem
		}
	}
	return errs
}

// rooted finds a conflict between a root and another configuration in names, workloads or pods.
func rooted(c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig, pods []corev1.Pod) string {
	if named(c, c) != "" {
		return fmt.Sprintf("metadata.name: a shard of %s would have its name: choose another name", origin.Describe(c))
	}
	mine, _ := members(c)
	chosen := chooser(c)
	for _, o := range others {
		theirs, _ := members(&o)
		chosenByOther := chooser(&o)
		if c.Spec.Root != nil && o.Spec.Root != nil {
			if msg := sameRoot(c.Spec.Root, &o, pods); msg != "" {
				return msg
			}
		}
		if msg := named(c, &o); msg != "" {
			return "spec.root.prefix: " + msg + ": choose another prefix"
		}
		if msg := named(&o, c); msg != "" {
			return "metadata.name: " + msg + ": choose another name"
		}
		for _, p := range pods {
			if !compile.Ended(&p) && (chosen(&p, theirs) || chosenByOther(&p, mine)) {
				return fmt.Sprintf("spec: pod %s is of the workload that is named in one of this and %s, and selected by the other, but a pod belongs to one shard: delete one of them", p.Name, origin.Describe(&o))
			}
		}
	}
	return ""
}

// sameRoot finds a conflict of a root with another one in names, workloads or pods.
func sameRoot(r *v1alpha1.RootConfig, o *v1alpha1.ShardingConfig, pods []corev1.Pod) string {
	target := layout.Target(r)
	if target.Name != "" && layout.Target(o.Spec.Root) == target {
		return fmt.Sprintf("spec.root: %s is divided by %s already: delete that one, or name another workload", target, origin.Describe(o))
	}
	if r.Prefix == o.Spec.Root.Prefix {
		return fmt.Sprintf("spec.root.prefix: the shards of %s are named %s-... too: choose another prefix", origin.Describe(o), r.Prefix)
	}
	mine, theirs := layout.Selects(r), layout.Selects(o.Spec.Root)
	for _, p := range pods {
		if !compile.Ended(&p) && mine(&p) && theirs(&p) {
			return fmt.Sprintf("spec.root: pod %s belongs to %s already: delete that one, or select other pods", p.Name, origin.Describe(o))
		}
	}
	return ""
}

// named returns a message if a shard of a root would have the name of another object.
func named(r, o *v1alpha1.ShardingConfig) string {
	if r.Spec.Root == nil || o.Labels[v1alpha1.RootLabel] == r.Name {
		return ""
	}
	for _, s := range layout.Shards(r.Spec.Root) {
		if s.Name == o.Name {
			return fmt.Sprintf("a shard of %s is named %s, as is another ShardingConfig", origin.Describe(r), s.Name)
		}
	}
	return ""
}

// chooser returns a function that reports whether a pod belongs to a root's workload and a
// hand-written shard selects it. Conditions that are nil select none.
func chooser(r *v1alpha1.ShardingConfig) func(p *corev1.Pod, selected conditions) bool {
	if r.Spec.Root == nil {
		return func(*corev1.Pod, conditions) bool { return false }
	}
	selects := layout.Selects(r.Spec.Root)
	return func(p *corev1.Pod, selected conditions) bool {
		return selected != nil && selects(p) && selected.matches(p.Labels)
	}
}

// meddling returns a message if a user changes a derived shard or its label, which only the
// manager may write. Users may change finalizers and other fields without a meaning to the
// mesh. old is nil for a new object.
func meddling(old, c *v1alpha1.ShardingConfig) string {
	if old == nil {
		if !compile.Derived(c) {
			return ""
		}
		return fmt.Sprintf("metadata.labels: %s marks shards that the manager derived: remove the label, or write a ShardingConfig with spec.root", v1alpha1.RootLabel)
	}
	was, is := old.Labels[v1alpha1.RootLabel], c.Labels[v1alpha1.RootLabel]
	if compile.Derived(old) == compile.Derived(c) && was == is && (!compile.Derived(c) || equality.Semantic.DeepEqual(old.Spec, c.Spec)) {
		return ""
	}
	if !compile.Derived(old) {
		was = is
	}
	return fmt.Sprintf("ShardingConfig %s is derived from %s, and only the manager writes its spec and its label %s: change spec.root of ShardingConfig %s", c.Name, was, v1alpha1.RootLabel, was)
}
