package label

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/patch"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Service is where the webhook is served.
type Service struct {
	Namespace, Name string
	CA              []byte
}

// unmatched are the resources that the webhook never matches, by group; none stands for all of
// the group. A webhook may change all of an object: these have pod templates, grant rights, or are
// the mesh's own. Policy ctrlmesh-manager-webhooks refuses the same ones.
var unmatched = map[string][]string{
	"":                          {"pods", "podtemplates", "replicationcontrollers", "secrets", "serviceaccounts"},
	"apps":                      nil,
	"authentication.k8s.io":     nil,
	"authorization.k8s.io":      nil,
	"batch":                     nil,
	"certificates.k8s.io":       nil,
	"ctrlmesh.kruise.io":        nil,
	"kridge.kusionstack.io":     nil,
	"rbac.authorization.k8s.io": nil,
	v1alpha1.GroupName:          nil,
}

// matched reports whether the webhook may match a resource.
func matched(gr schema.GroupResource) bool {
	never, listed := unmatched[gr.Group]
	return !listed || never != nil && !slices.Contains(never, gr.Resource)
}

// Webhooks returns the entries of the MutatingWebhookConfiguration that stamp the given
// resources, except for those that a webhook must not match: the sweep labels their objects. It
// returns none if none is left.
func Webhooks(stamped []schema.GroupResource, s Service, settings *platform.Settings) []admissionv1.MutatingWebhook {
	rules := rulesOf(stamped)
	if len(rules) == 0 {
		return nil
	}
	return []admissionv1.MutatingWebhook{{
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
			{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpNotIn, Values: skipped(s.Namespace, settings)},
		}},
		SideEffects:             new(admissionv1.SideEffectClassNone),
		TimeoutSeconds:          new(int32(2)),
		AdmissionReviewVersions: []string{"v1"},
		MatchConditions: []admissionv1.MatchCondition{
			{Name: "not-excluded", Expression: permitted(settings)},
			{Name: "labels-missing-or-wrong", Expression: needed},
		},
		Rules: rules,
	}}
}

// rulesOf returns a rule for each group.
func rulesOf(stamped []schema.GroupResource) (out []admissionv1.RuleWithOperations) {
	groups := map[string][]string{}
	for _, gr := range stamped {
		if matched(gr) {
			groups[gr.Group] = append(groups[gr.Group], gr.Resource)
		}
	}
	for _, group := range slices.Sorted(maps.Keys(groups)) {
		out = append(out, admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update},
			Rule: admissionv1.Rule{
				APIGroups: []string{group}, APIVersions: []string{"*"}, Resources: groups[group], Scope: new(admissionv1.NamespacedScope),
			},
		})
	}
	return out
}

// skipped are the namespaces whose objects the webhook does not see.
func skipped(mesh string, settings *platform.Settings) []string {
	out := []string{mesh, metav1.NamespaceSystem}
	for _, n := range settings.Stamping.ExcludedNamespaces {
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

// permitted returns the CEL expression for resources that the administrator does not exclude: a
// rule also matches equivalent resources of other groups.
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
