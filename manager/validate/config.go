package validate

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// maxSpec bounds the spec of a configuration, in bytes of JSON. A policy of a pod is a
// small multiple of it, within what an agent receives.
const maxSpec = 768 << 10

// Config returns the errors of a configuration by itself that its schema does not find.
func Config(c *v1alpha1.ShardingConfig) field.ErrorList {
	spec := field.NewPath("spec")
	if text, err := json.Marshal(c.Spec); err != nil || len(text) > maxSpec {
		return field.ErrorList{field.TooLong(spec, "", maxSpec)}
	}
	if n := layout.Pairs(label.Divided(c)); n > layout.MaxPairs {
		return field.ErrorList{field.Forbidden(spec, layout.ManyPairs(n))}
	}
	var errs field.ErrorList
	if c.Spec.Root == nil {
		errs = append(handWritten(c, spec), lockNames(c, c.Name)...)
	} else {
		errs = root(c, spec.Child("root"))
	}
	errs = append(errs, limits(c, c.Spec.Limits, spec.Child("limits"))...)
	errs = append(errs, clusters(c, spec.Child("clusters"))...)
	return append(errs, excludedLocks(c)...)
}

// clusters returns the errors of paths that lead to member clusters.
func clusters(c *v1alpha1.ShardingConfig, path *field.Path) (errs field.ErrorList) {
	for i, p := range c.Spec.Clusters {
		if problem := meshv1.ClusterPathProblem(p.PathPrefix); problem != "" {
			errs = append(errs, field.Invalid(path.Index(i).Child("pathPrefix"), p.PathPrefix, problem))
		}
	}
	return errs
}

// handWritten returns the errors of a configuration that names its shard's pods itself. The schema
// cannot require selectors of limits, because derived shards have none.
func handWritten(c *v1alpha1.ShardingConfig, spec *field.Path) field.ErrorList {
	errs := podSelector(c.Spec.Selector, spec.Child("selector"))
	for i, l := range c.Spec.Limits {
		// An agent would not take it: to narrow nothing is to be unsharded.
		if l.Selector == nil || len(l.Selector.MatchLabels)+len(l.Selector.MatchExpressions) == 0 {
			errs = append(errs, field.Required(spec.Child("limits").Index(i).Child("selector"), "say which objects are this shard's: an empty selector would give it all of them"))
		}
	}
	return errs
}

func selector(s *metav1.LabelSelector, path *field.Path) field.ErrorList {
	if s == nil {
		return nil
	}
	return metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{}, path)
}

// maxPodValues is how many labels and values a selector of pods may have: all are compared with
// each pod of the namespace whenever policies are compiled.
const maxPodValues = 1024

// podSelector returns the errors of a selector of pods.
func podSelector(s *metav1.LabelSelector, path *field.Path) field.ErrorList {
	errs := selector(s, path)
	if s == nil {
		return errs
	}
	n := len(s.MatchLabels) + len(s.MatchExpressions)
	for _, e := range s.MatchExpressions {
		n += len(e.Values)
	}
	if n > maxPodValues {
		errs = append(errs, field.Invalid(path, fmt.Sprintf("(%d labels and values)", n), fmt.Sprintf("more than %d: give the pods a label of their own", maxPodValues)))
	}
	return errs
}

func limits(c *v1alpha1.ShardingConfig, in []v1alpha1.ObjectLimiter, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, l := range in {
		path := path.Index(i)
		errs = append(errs, selector(l.Selector, path.Child("selector"))...)
		errs = append(errs, layout.ValidateMatches(l.Namespaces, path.Child("namespaces"))...)
		if len(l.Namespaces) > 0 && c.Spec.Root == nil {
			errs = append(errs, field.Forbidden(path.Child("namespaces"), "only shards of a root can be limited by namespace: name the namespaces in selector by label "+v1alpha1.NamespaceLabel))
		}
		if len(l.Namespaces) > 0 && c.Spec.Root != nil && !layout.ByNamespace(c.Spec.Root) {
			errs = append(errs, field.Forbidden(path.Child("namespaces"), fmt.Sprintf("objects are not assigned by namespace (key: %s): choose key: Namespace", c.Spec.Root.Key)))
		}
		if len(l.RelateResources) == 0 {
			errs = append(errs, field.Required(path.Child("relateResources"), "name the resources"))
		}
		for j, r := range l.RelateResources {
			path := path.Child("relateResources").Index(j)
			errs = append(errs, names(r.APIGroups, path.Child("apiGroups"), apiGroup)...)
			errs = append(errs, names(r.Resources, path.Child("resources"), func(v string) string {
				if v == "*" {
					return notAll(c, l, r)
				}
				return resourceName(v)
			})...)
		}
	}
	return errs
}

// notAll returns why a limit must not name all resources of its groups; empty if it may. Subsets
// may divide all resources: they separate versions of an operator, by whole namespaces.
func notAll(c *v1alpha1.ShardingConfig, l v1alpha1.ObjectLimiter, g v1alpha1.ResourceGroup) string {
	byLabels := c.Spec.Root == nil || c.Spec.Root.Method == v1alpha1.MethodLabels ||
		l.Selector != nil && len(l.Selector.MatchLabels)+len(l.Selector.MatchExpressions) > 0
	switch {
	case byLabels:
		return "name the resources: all would hide from the shard what cannot carry its labels, such as namespaces, nodes and events"
	case len(c.Spec.Root.Subsets) > 0 || c.Spec.Root.TargetSelector != nil:
		return ""
	case slices.Contains(g.APIGroups, "*"):
		return "name the groups or the resources: all would divide what each shard needs, such as events and access reviews"
	case slices.Contains(g.APIGroups, ""):
		return "name the resources of the core group: all would divide what each shard needs, such as events and service accounts"
	}
	return ""
}

func names(values []string, path *field.Path, check func(string) string) field.ErrorList {
	var errs field.ErrorList
	for i, v := range values {
		if v == "*" && len(values) > 1 {
			errs = append(errs, field.Invalid(path.Index(i), v, `"*" must be alone in its list`))
		}
		if msg := check(v); msg != "" {
			errs = append(errs, field.Invalid(path.Index(i), v, msg))
		}
	}
	return errs
}

// lockNames returns errors for locks whose names under a shard the apiserver rejects.
func lockNames(c *v1alpha1.ShardingConfig, shard string) field.ErrorList {
	ctl := c.Spec.Controller
	if ctl == nil {
		return nil
	}
	var errs field.ErrorList
	path := field.NewPath("spec", "controller")
	if ctl.LeaderElectionName != "" {
		errs = append(errs, lock(ctl.LeaderElectionName, shard, path.Child("leaderElectionName"))...)
	}
	for i, l := range ctl.Locks {
		at := path.Child("locks").Index(i)
		errs = append(errs, lock(l.Name, shard, at.Child("name"))...)
		if problems := validation.IsDNS1123Label(l.Namespace); len(problems) > 0 {
			errs = append(errs, field.Invalid(at.Child("namespace"), l.Namespace, strings.Join(problems, "; ")))
		}
	}
	return errs
}

// excludedLocks returns the errors of the objects that are not locks of the operator.
func excludedLocks(c *v1alpha1.ShardingConfig) field.ErrorList {
	if c.Spec.Controller == nil {
		return nil
	}
	var errs field.ErrorList
	for i, e := range c.Spec.Controller.ExcludedLocks {
		at := field.NewPath("spec", "controller", "excludedLocks").Index(i)
		if problems := validation.IsDNS1123Label(e.Namespace); len(problems) > 0 {
			errs = append(errs, field.Invalid(at.Child("namespace"), e.Namespace, strings.Join(problems, "; ")))
		}
		name, isPrefix := strings.CutSuffix(e.Name, "*")
		switch {
		case name == "":
			errs = append(errs, field.Invalid(at.Child("name"), e.Name, "name the objects, or a prefix of their names: the operator's own locks must be discovered or named"))
			continue
		case isPrefix:
			name += "x" // a prefix may end with a dash or a dot
		}
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			errs = append(errs, field.Invalid(at.Child("name"), e.Name, strings.Join(problems, "; ")))
		}
	}
	for _, name := range compile.NamedLocks(c) {
		if compile.ExcludesLock(c, name) {
			errs = append(errs, field.Invalid(field.NewPath("spec", "controller", "excludedLocks"), name.String(), "spec.controller names this lock, and cannot exclude it"))
		}
	}
	return errs
}

func lock(name, shard string, path *field.Path) field.ErrorList {
	upstream := compile.UpstreamLock(name, shard)
	problems := validation.IsDNS1123Subdomain(upstream)
	if len(problems) == 0 {
		return nil
	}
	problems = slices.Compact(problems)
	return field.ErrorList{field.Invalid(path, name,
		"the shard lock would be "+upstream+", which is not a valid name: "+strings.Join(problems, "; "))}
}

// sharedObjects returns the errors of the objects that every shard reads.
func sharedObjects(in []v1alpha1.SharedObjects, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, o := range in {
		at := at.Index(i)
		errs = append(errs, names(o.APIGroups, at.Child("apiGroups"), apiGroup)...)
		errs = append(errs, names(o.Resources, at.Child("resources"), func(v string) string {
			if v == "*" {
				return ""
			}
			return resourceName(v)
		})...)
		errs = append(errs, objectNames(o.Namespaces, at.Child("namespaces"), validation.IsDNS1123Label)...)
		errs = append(errs, objectNames(o.Names, at.Child("names"), content.IsPathSegmentName)...)
	}
	return errs
}

// objectNames returns errors for texts that cannot be names of objects.
func objectNames(values []string, at *field.Path, check func(string) []string) field.ErrorList {
	var errs field.ErrorList
	for i, v := range values {
		problems := check(v)
		switch {
		case v == "*":
			problems = []string{"leave the list empty for all"}
		case v == "" || len(v) > validation.DNS1123SubdomainMaxLength:
			problems = []string{"not the name of an object"}
		}
		if len(problems) > 0 {
			errs = append(errs, field.Invalid(at.Index(i), v, strings.Join(problems, "; ")))
		}
	}
	return errs
}

// apiGroup returns the error of the name of an API group; empty if it is valid.
func apiGroup(v string) string {
	if v == "" || v == "*" { // the core group, or all
		return ""
	}
	return strings.Join(validation.IsDNS1123Subdomain(v), "; ")
}

// resourceName returns the error of the plural name of a resource; empty if it is valid.
func resourceName(v string) string {
	if base, _, sub := strings.Cut(v, "/"); sub {
		return "subresources follow their resource: write " + base
	}
	return strings.Join(validation.IsDNS1035Label(v), "; ")
}
