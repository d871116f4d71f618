package label

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Configuration is the name of the MutatingWebhookConfiguration for stamping.
const Configuration = "ctrlmesh-stamp"

// Of returns the labels of the objects of a namespace.
func Of(namespace string) map[string]string {
	return map[string]string{
		v1alpha1.NamespaceLabel:    namespace,
		v1alpha1.ShardingHashLabel: sharding.BucketLabel(namespace),
		v1alpha1.ControlLabel:      "true",
	}
}

// Listed returns the resources whose objects must be labelled, each group once: those of
// configurations that divide them by labels.
func Listed(configs ...*v1alpha1.ShardingConfig) []v1alpha1.ResourceGroup {
	seen := map[string]v1alpha1.ResourceGroup{}
	for _, c := range configs {
		if !byLabels(c) {
			continue
		}
		for _, g := range Divided(c) {
			g = v1alpha1.ResourceGroup{APIGroups: canonical(g.APIGroups), Resources: canonical(g.Resources)}
			seen[fmt.Sprint(g)] = g
		}
	}
	out := make([]v1alpha1.ResourceGroup, 0, len(seen))
	for _, k := range slices.Sorted(maps.Keys(seen)) {
		out = append(out, seen[k])
	}
	return out
}

func byLabels(c *v1alpha1.ShardingConfig) bool {
	if c.Labels[v1alpha1.RootLabel] != "" {
		return false // its root counts
	}
	return c.Spec.Root == nil || c.Spec.Root.Method == v1alpha1.MethodLabels
}

// Needed reports whether a limit of a configuration works only on objects that are
// stamped: those of a root that divides by labels do, and others if their selector has a
// label of the mesh.
func Needed(c *v1alpha1.ShardingConfig, l v1alpha1.ObjectLimiter) bool {
	if c.Spec.Root != nil {
		return byLabels(c)
	}
	if l.Selector == nil {
		return false
	}
	for key := range Of("") {
		if _, ok := l.Selector.MatchLabels[key]; ok {
			return true
		}
		if slices.ContainsFunc(l.Selector.MatchExpressions, func(r metav1.LabelSelectorRequirement) bool { return r.Key == key }) {
			return true
		}
	}
	return false
}

// Permitted omits the resources that the administrator excludes from stamping. It keeps the
// group "*" for resources that are excluded in some groups; Webhooks and Resolve omit those.
func Permitted(groups []v1alpha1.ResourceGroup, s *platform.Settings) (out []v1alpha1.ResourceGroup) {
	for _, g := range groups {
		for _, group := range g.APIGroups {
			resources := slices.DeleteFunc(slices.Clone(g.Resources), func(r string) bool {
				return !s.Stamps(schema.GroupResource{Group: group, Resource: r})
			})
			if len(resources) > 0 {
				out = append(out, v1alpha1.ResourceGroup{APIGroups: []string{group}, Resources: resources})
			}
		}
	}
	return out
}

// Divided returns the resources that a configuration divides.
func Divided(c *v1alpha1.ShardingConfig) (out []v1alpha1.ResourceGroup) {
	for _, l := range Limits(c) {
		out = append(out, l.RelateResources...)
	}
	return out
}

// Limits returns the limits of a configuration, or of the shards that it derives.
func Limits(c *v1alpha1.ShardingConfig) []v1alpha1.ObjectLimiter {
	if c.Spec.Root == nil {
		return c.Spec.Limits
	}
	return slices.Concat(c.Spec.Root.ResourceSelector, c.Spec.Limits)
}

// Resources returns the resources that groups name.
func Resources(groups []v1alpha1.ResourceGroup) (out []schema.GroupResource) {
	for _, g := range groups {
		for _, group := range g.APIGroups {
			for _, r := range g.Resources {
				out = append(out, schema.GroupResource{Group: group, Resource: r})
			}
		}
	}
	return out
}

func canonical(names []string) []string {
	if slices.Contains(names, "*") {
		return []string{"*"}
	}
	return slices.Compact(slices.Sorted(slices.Values(names)))
}

// Service is where the webhook is served.
type Service struct {
	Namespace, Name string
	CA              []byte
}

// Webhooks returns the entries of the MutatingWebhookConfiguration that stamp the given
// resources, without those that the administrator excludes. It returns none if none is left.
func Webhooks(groups []v1alpha1.ResourceGroup, s Service, settings *platform.Settings) []admissionv1.MutatingWebhook {
	groups = Permitted(groups, settings)
	if len(groups) == 0 {
		return nil
	}
	ops := []admissionv1.OperationType{admissionv1.Create, admissionv1.Update}
	w := admissionv1.MutatingWebhook{
		Name: "stamp." + v1alpha1.GroupName,
		ClientConfig: admissionv1.WebhookClientConfig{
			Service:  &admissionv1.ServiceReference{Namespace: s.Namespace, Name: s.Name, Path: new(Path), Port: new(int32(443))},
			CABundle: s.CA,
		},
		// The manager is not on the request path: the sweep finds the objects that it missed.
		FailurePolicy: new(admissionv1.Ignore),
		// Set explicitly, because a defaulted field would look like a change.
		MatchPolicy:        new(admissionv1.Equivalent),
		ReinvocationPolicy: new(admissionv1.NeverReinvocationPolicy),
		ObjectSelector:     &metav1.LabelSelector{},
		NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "kubernetes.io/metadata.name", Operator: metav1.LabelSelectorOpNotIn, Values: append([]string{s.Namespace}, settings.Stamping.ExcludedNamespaces...)},
		}},
		SideEffects:             new(admissionv1.SideEffectClassNone),
		TimeoutSeconds:          new(int32(2)),
		AdmissionReviewVersions: []string{"v1"},
		MatchConditions: []admissionv1.MatchCondition{
			{Name: "not-excluded", Expression: permitted(settings)},
			{Name: "labels-missing-or-wrong", Expression: needed},
		},
	}
	for _, g := range groups {
		w.Rules = append(w.Rules, admissionv1.RuleWithOperations{
			Operations: ops,
			Rule: admissionv1.Rule{
				APIGroups: g.APIGroups, APIVersions: []string{"*"}, Resources: g.Resources, Scope: new(admissionv1.NamespacedScope),
			},
		})
	}
	return []admissionv1.MutatingWebhook{w}
}

// permitted returns the CEL expression for resources that the administrator does not exclude.
// Rules for all groups match more resources than their authors may know.
func permitted(s *platform.Settings) string {
	var excluded []string
	for _, gr := range s.NeverStamped() {
		is := fmt.Sprintf("request.resource.group == %q", gr.Group)
		if gr.Resource != "*" {
			is += fmt.Sprintf(" && request.resource.resource == %q", gr.Resource)
		}
		excluded = append(excluded, "("+is+")")
	}
	return "!(" + strings.Join(excluded, " || ") + ")"
}

// needed is the CEL expression for objects with a wrong label, as far as CEL can decide. CEL
// cannot compute a hash, so it matches every new object, and later every change of the hash.
var needed = fmt.Sprintf(`oldObject == null || !has(object.metadata.labels)`+
	` || !(%[1]q in object.metadata.labels) || object.metadata.labels[%[1]q] != request.namespace`+
	` || !(%[2]q in object.metadata.labels) || !(%[3]q in object.metadata.labels)`+
	` || (has(oldObject.metadata.labels) && %[2]q in oldObject.metadata.labels && object.metadata.labels[%[2]q] != oldObject.metadata.labels[%[2]q])`,
	v1alpha1.NamespaceLabel, v1alpha1.ShardingHashLabel, v1alpha1.ControlLabel)

func byString[T fmt.Stringer](a, b T) int { return cmp.Compare(a.String(), b.String()) }
