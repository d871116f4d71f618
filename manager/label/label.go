// Package label gives the objects that configurations divide the labels that
// they are divided by.
//
// New and changed objects are stamped at admission, by a webhook whose rules
// follow the configurations. It may be skipped: the manager is not on the path.
// What slipped by, and what existed before, is found by the Sweeper, which lists
// metadata of objects without the labels. Nothing is watched.
package label

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/patch"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
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
// configurations that divide them by labels, or select them by labels of the mesh.
func Listed(configs ...*v1alpha1.ShardingConfig) []v1alpha1.ResourceGroup {
	seen := map[string]v1alpha1.ResourceGroup{}
	for _, c := range configs {
		for _, l := range Limits(c) {
			if !byLabels(c) && !Needed(c, l) {
				continue
			}
			for _, g := range l.RelateResources {
				g = v1alpha1.ResourceGroup{APIGroups: canonical(g.APIGroups), Resources: canonical(g.Resources)}
				seen[fmt.Sprint(g)] = g
			}
		}
	}
	return collect.Map(slices.Sorted(maps.Keys(seen)), func(k string) v1alpha1.ResourceGroup { return seen[k] })
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
	switch {
	case c.Labels[v1alpha1.RootLabel] != "":
		return false // its root counts
	case c.Spec.Root != nil && byLabels(c):
		return true
	case l.Selector == nil:
		return false
	}
	return collect.Any(Of(""), func(key, _ string) bool {
		_, ok := l.Selector.MatchLabels[key]
		return ok || slices.ContainsFunc(l.Selector.MatchExpressions, func(r metav1.LabelSelectorRequirement) bool { return r.Key == key })
	})
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

// Resolve returns the resources that groups list, as far as the apiserver serves them: namespaced
// ones that can be listed and patched, in their preferred versions. missing are those listed by
// full name that are not served so.
func Resolve(groups []v1alpha1.ResourceGroup, served []*metav1.APIResourceList) (found []schema.GroupVersionResource, missing []string) {
	available := labelled(served)
	wanted := map[schema.GroupVersionResource]bool{}
	for _, g := range groups {
		for gr, gvr := range available {
			if names(g.APIGroups, gr.Group) && names(g.Resources, gr.Resource) {
				wanted[gvr] = true
			}
		}
	}
	for _, gr := range Resources(groups) {
		if _, ok := available[gr]; !ok && gr.Group != "*" && gr.Resource != "*" {
			missing = append(missing, gr.String())
		}
	}
	// Events are served in two groups, and stored once.
	if legacy, ok := available[schema.GroupResource{Resource: "events"}]; ok && wanted[legacy] {
		delete(wanted, available[schema.GroupResource{Group: "events.k8s.io", Resource: "events"}])
	}
	found = slices.SortedFunc(maps.Keys(wanted), func(a, b schema.GroupVersionResource) int {
		return cmp.Compare(a.GroupResource().String(), b.GroupResource().String())
	})
	slices.Sort(missing)
	return found, slices.Compact(missing)
}

func names(list []string, one string) bool {
	return slices.Contains(list, "*") || slices.Contains(list, one)
}

// labelled returns the served resources whose objects can be labelled.
func labelled(served []*metav1.APIResourceList) map[schema.GroupResource]schema.GroupVersionResource {
	out := map[schema.GroupResource]schema.GroupVersionResource{}
	for _, list := range served {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			continue
		}
		for _, r := range list.APIResources {
			if !r.Namespaced || !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "patch") {
				continue
			}
			gvr := schema.GroupVersionResource{Group: cmp.Or(r.Group, gv.Group), Version: cmp.Or(r.Version, gv.Version), Resource: r.Name}
			if _, ok := out[gvr.GroupResource()]; !ok {
				out[gvr.GroupResource()] = gvr
			}
		}
	}
	return out
}

// Path at which Stamp is served.
const Path = "/stamp"

// Stamp is the admission handler that labels objects. It refuses nothing.
func Stamp(_ context.Context, req admission.Request) admission.Response {
	if req.Namespace == "" {
		return admission.Allowed("")
	}
	var object metav1.PartialObjectMetadata
	if err := json.Unmarshal(req.Object.Raw, &object); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	ops := patch.Strings("/metadata/labels", object.Labels, Of(req.Namespace))
	if len(ops) > 0 {
		metrics.StampedObjects.WithLabelValues("admission").Inc()
	}
	return admission.Patched("", ops...)
}
