package inject

import (
	"cmp"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// EntriesConfiguration is the name of the MutatingWebhookConfiguration with Entries, and of the
// MutatingAdmissionPolicy and its binding that replace them.
const EntriesConfiguration = "ctrlmesh-virtualapps"

// EntryOf returns the name of the webhook of a VirtualApp.
func EntryOf(app *v1alpha1.ShardingConfig) string {
	return app.Name + "." + app.Namespace + ".virtualapps." + kruise.GroupName
}

// EntriesIn reports whether pods of a namespace may have an entry. The webhook may change all of
// them, so it never sees those of the system and of the mesh.
func EntriesIn(namespace, mesh string) bool {
	return namespace != mesh && namespace != metav1.NamespaceSystem
}

// Apps returns the VirtualApps among configurations that select pods.
func Apps(configs []*v1alpha1.ShardingConfig, mesh string) []*v1alpha1.ShardingConfig {
	return collect.Filter(configs, func(c *v1alpha1.ShardingConfig) bool {
		return origin.KindOf(c) == origin.VirtualApp && EntriesIn(c.Namespace, mesh) && selective(c.Spec.Root)
	})
}

// maxEntries is the maximum size of all entries in bytes: the apiserver stores objects of 1.5 MB.
const maxEntries = 1 << 20

// Entries returns a webhook for each VirtualApp among configurations: for the pods that it
// selects. service, in the namespace of the mesh, serves them, and ca verifies it. full are the
// youngest VirtualApps if there is no room for all.
func Entries(configs []*v1alpha1.ShardingConfig, service types.NamespacedName, ca []byte) (out []admissionv1.MutatingWebhook, full []*v1alpha1.ShardingConfig) {
	// One that the apiserver would reject must not keep it from taking the others.
	apps := collect.Filter(Apps(configs, service.Namespace), func(c *v1alpha1.ShardingConfig) bool {
		return len(EntryOf(c)) <= validation.DNS1123SubdomainMaxLength
	})
	slices.SortFunc(apps, func(a, b *v1alpha1.ShardingConfig) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(EntryOf(a), EntryOf(b)))
	})
	room := maxEntries
	for _, app := range apps {
		e := entry(app, service, ca)
		if e.Size() > room {
			full = append(full, app)
			continue
		}
		room -= e.Size()
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b admissionv1.MutatingWebhook) int { return strings.Compare(a.Name, b.Name) })
	return out, full
}

// selective reports whether a root has a valid selector that does not select all pods.
func selective(root *v1alpha1.RootConfig) bool {
	if root == nil || root.TargetSelector == nil {
		return false
	}
	selector, err := metav1.LabelSelectorAsSelector(root.TargetSelector)
	return err == nil && !selector.Empty()
}

func entry(app *v1alpha1.ShardingConfig, service types.NamespacedName, ca []byte) admissionv1.MutatingWebhook {
	return admissionv1.MutatingWebhook{
		Name: EntryOf(app),
		ClientConfig: admissionv1.WebhookClientConfig{
			Service:  &admissionv1.ServiceReference{Namespace: service.Namespace, Name: service.Name, Path: new(Path), Port: new(int32(443))},
			CABundle: ca,
		},
		NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: app.Namespace}},
		ObjectSelector:    app.Spec.Root.TargetSelector.DeepCopy(),
		Rules: []admissionv1.RuleWithOperations{{
			Operations: []admissionv1.OperationType{admissionv1.Create},
			Rule: admissionv1.Rule{
				APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}, Scope: new(admissionv1.NamespacedScope),
			},
		}},
		// A pod that was not admitted here would run unsharded.
		FailurePolicy: new(admissionv1.Fail),
		// Set explicitly, because a defaulted field would look like a change.
		MatchPolicy:             new(admissionv1.Equivalent),
		ReinvocationPolicy:      new(admissionv1.IfNeededReinvocationPolicy),
		SideEffects:             new(admissionv1.SideEffectClassNoneOnDryRun),
		TimeoutSeconds:          new(int32(10)),
		AdmissionReviewVersions: []string{"v1"},
	}
}
