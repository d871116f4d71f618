package chart

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// mayWrite lists the rules of the manager's roles that allow it to write a resource.
func mayWrite(t *testing.T, group, resource string) (out []rbacv1.PolicyRule) {
	t.Helper()
	for _, o := range kustomized(t, filepath.Join(deployDir, "manager")) {
		var role rbacv1.ClusterRole
		if kind := o.GetKind(); kind != "ClusterRole" && kind != "Role" {
			continue
		}
		require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &role))
		for _, r := range role.Rules {
			writes := slices.ContainsFunc(r.Verbs, func(v string) bool { return !slices.Contains([]string{"get", "list", "watch"}, v) })
			names := func(list []string, one string) bool { return slices.Contains(list, one) || slices.Contains(list, "*") }
			if writes && names(r.APIGroups, group) && names(r.Resources, resource) {
				out = append(out, r)
			}
		}
	}
	return out
}

// No policy applies to writes of policies: permissions to write them would make the manager
// cluster-admin.
func TestManagerWritesNoPolicies(t *testing.T) {
	for _, resource := range []string{"mutatingadmissionpolicies", "mutatingadmissionpolicybindings", "validatingadmissionpolicies", "validatingadmissionpolicybindings"} {
		assert.Empty(t, mayWrite(t, admissionv1.GroupName, resource), resource)
	}
	for _, resource := range []string{"secrets", "configmaps", "endpoints", "pods/ephemeralcontainers", "pods/exec", "serviceaccounts", "serviceaccounts/token"} {
		for _, r := range mayWrite(t, "", resource) {
			allowed := len(r.ResourceNames) > 0 || !slices.ContainsFunc(r.Verbs, func(v string) bool { return !slices.Contains([]string{"get", "list", "create", "patch"}, v) })
			assert.True(t, allowed, "%s: %v", resource, r)
		}
	}
	for _, resource := range []string{"pods", "replicationcontrollers", "podtemplates", "namespaces"} {
		for _, r := range mayWrite(t, "", resource) {
			assert.Subset(t, []string{"get", "list", "watch", "patch"}, r.Verbs, resource)
		}
	}
}

func TestManagerChangesLabelsOfTheMeshAlone(t *testing.T) {
	s := newAPIServer(t, since136, namespaceOf("ns", true))
	named := metav1.ObjectMeta{Namespace: "ns", Name: "x"}
	for name, tt := range map[string]struct {
		resource    schema.GroupVersionResource
		old, object runtime.Object
	}{
		"a pod": {corev1.SchemeGroupVersion.WithResource("pods"), &corev1.Pod{ObjectMeta: named},
			&corev1.Pod{ObjectMeta: named, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "another"}}}}},
		"a Secret": {corev1.SchemeGroupVersion.WithResource("secrets"), &corev1.Secret{ObjectMeta: named}, &corev1.Secret{ObjectMeta: named, Data: map[string][]byte{"a": nil}}},
		"a template": {appsv1.SchemeGroupVersion.WithResource("deployments"), &appsv1.Deployment{ObjectMeta: named},
			&appsv1.Deployment{ObjectMeta: named, Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{HostPID: true}}}}},
	} {
		t.Run(name, func(t *testing.T) {
			s.requireRefused(t, request{by: managerUser, resource: tt.resource, old: tt.old, object: tt.object}, "labels and annotations alone")
			labelled := untyped(t, tt.old)
			labelled.SetLabels(label.Of("ns"))
			s.requireAllowed(t, request{by: managerUser, resource: tt.resource, old: tt.old, object: labelled})
			labelled.SetLabels(map[string]string{"app": "another"})
			s.requireRefused(t, request{by: managerUser, resource: tt.resource, old: tt.old, object: labelled}, "labels of the mesh alone")
		})
	}
}

// The ClusterRole that allows the manager to change templates is bound by users alone.
func TestManagerIsNotBoundToRollbackRole(t *testing.T) {
	const role = "ctrlmesh-rollback"
	found := false
	for _, o := range kustomized(t, filepath.Join(deployDir, "manager")) {
		found = found || o.GetKind() == "ClusterRole" && o.GetName() == role
		bound, _, _ := unstructured.NestedString(o.Object, "roleRef", "name")
		require.NotEqual(t, role, bound, o.GetName())
	}
	require.True(t, found)
	for _, r := range mayWrite(t, appsv1.GroupName, "statefulsets") {
		if !slices.Equal(r.Resources, []string{"statefulsets"}) {
			require.NotContains(t, r.Verbs, "update")
		}
	}
}

func TestManagerRollsBackOnlyWhatAllowsIt(t *testing.T) {
	s := newAPIServer(t, since136, namespaceOf("ns", true))
	bound := ""
	s.denies = func(a authorizer.Attributes) bool {
		return a.GetUser().GetName() != managerUser || a.GetVerb() != "update" || a.GetAPIGroup() != appsv1.GroupName || a.GetResource() != "statefulsets" ||
			a.GetName() != "x" || a.GetNamespace() != bound
	}
	set := func(annotation string, change func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
		out := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "x", Generation: 1}, Spec: appsv1.StatefulSetSpec{Replicas: new(int32(1))}}
		if annotation != "" {
			out.Annotations = map[string]string{meshv1alpha1.AllowRollbackAnnotation: annotation}
		}
		change(out)
		return out
	}
	same := func(*appsv1.StatefulSet) {}
	template := func(s *appsv1.StatefulSet) { s.Generation, s.Spec.Template.Spec.HostPID = 2, true }
	write := func(old, object *appsv1.StatefulSet) request {
		return request{by: managerUser, resource: appsv1.SchemeGroupVersion.WithResource("statefulsets"), old: old, object: object}
	}
	s.requireRefused(t, write(set("true", same), set("true", template)), "labels and annotations alone")
	bound = "ns"
	s.requireAllowed(t, write(set("true", same), set("true", template)))
	for name, tt := range map[string]struct {
		old, object string
		change      func(*appsv1.StatefulSet)
		says        string
	}{
		"without annotation":     {"", "", template, "labels and annotations alone"},
		"with another value":     {"false", "false", template, "labels and annotations alone"},
		"annotated by itself":    {"", "true", same, "not allow-rollback"},
		"annotated at once":      {"", "true", template, "labels and annotations alone"},
		"another annotation":     {"true", "true", func(s *appsv1.StatefulSet) { template(s); s.Annotations["a"] = "b" }, "annotations of the mesh alone"},
		"scaled, too":            {"true", "true", func(s *appsv1.StatefulSet) { template(s); s.Spec.Replicas = new(int32(2)) }, "the template of a StatefulSet alone"},
		"scaled by default":      {"true", "true", func(s *appsv1.StatefulSet) { template(s); s.Spec.Replicas = nil }, "the template of a StatefulSet alone"},
		"with another finalizer": {"true", "true", func(s *appsv1.StatefulSet) { template(s); s.Finalizers = []string{"a.b/c"} }, "labels and annotations alone"},
		"with another status":    {"true", "true", func(s *appsv1.StatefulSet) { template(s); s.Status.Replicas = 7 }, "labels and annotations alone"},
	} {
		t.Run(name, func(t *testing.T) { s.requireRefused(t, write(set(tt.old, same), set(tt.object, tt.change)), tt.says) })
	}
	deployment := func(pid bool) *appsv1.Deployment {
		return &appsv1.Deployment{ObjectMeta: set("true", same).ObjectMeta, Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{HostPID: pid}}}}
	}
	s.requireRefused(t, request{by: managerUser, resource: appsv1.SchemeGroupVersion.WithResource("deployments"), old: deployment(false), object: deployment(true)}, "labels and annotations alone")
}

func TestLabelsOfNamespacesAreTheManagers(t *testing.T) {
	s := newAPIServer(t, since136)
	namespaces := corev1.SchemeGroupVersion.WithResource("namespaces")
	plain, labelled, wrong, pinned := namespaceOf("ns", false), namespaceOf("ns", true), namespaceOf("ns", true), namespaceOf("ns", true)
	wrong.Labels[meshv1alpha1.ShardingHashLabel] = "99"
	pinned.Labels[meshv1alpha1.OwnerShardLabel] = "shard"
	for _, subresource := range []string{"", "status", "finalize"} {
		write := func(by string, old, object *corev1.Namespace) request {
			return request{by: by, resource: namespaces, subresource: subresource, old: old, object: object}
		}
		s.requireAllowed(t, write(managerUser, plain, labelled))
		s.requireAllowed(t, write(managerUser, wrong, labelled))
		s.requireAllowed(t, write(managerUser, labelled, plain))
		s.requireRefused(t, write(managerUser, labelled, pinned), "the labels of a Namespace alone")
		s.requireRefused(t, write(managerUser, pinned, labelled), "the labels of a Namespace alone")
		s.requireRefused(t, write("someone", plain, labelled), "the manager of ctrlmesh alone sets")
		s.requireRefused(t, write("someone", labelled, wrong), "the manager of ctrlmesh alone sets")
		s.requireAllowed(t, write("someone", labelled, pinned))
		s.requireAllowed(t, write("someone", labelled, plain))
	}
	s.requireAllowed(t, request{by: "someone", resource: namespaces, object: labelled})

	apps := namespaceOf("ns", false)
	apps.Labels[meshv1alpha1.VirtualAppsLabel] = "true"
	s.requireAllowed(t, request{by: managerUser, resource: namespaces, old: plain, object: apps})
	s.requireAllowed(t, request{by: managerUser, resource: namespaces, old: apps, object: plain})
	s.requireRefused(t, request{by: "someone", resource: namespaces, old: plain, object: apps}, "the manager of ctrlmesh alone sets")
	s.requireRefused(t, request{by: "someone", resource: namespaces, old: apps, object: plain}, "when the last VirtualApp is deleted")
}

var webhookResource = admissionv1.SchemeGroupVersion.WithResource("mutatingwebhookconfigurations")

// writes returns a write of a webhook configuration by the manager.
func writes(name string, old, webhooks []admissionv1.MutatingWebhook) request {
	meta := metav1.ObjectMeta{Name: name}
	return request{
		by: managerUser, resource: webhookResource,
		old: &admissionv1.MutatingWebhookConfiguration{ObjectMeta: meta, Webhooks: old}, object: &admissionv1.MutatingWebhookConfiguration{ObjectMeta: meta, Webhooks: webhooks},
	}
}

// stamping returns the webhook that the manager would write, changed.
func stamping(change func(*admissionv1.MutatingWebhook)) []admissionv1.MutatingWebhook {
	service := label.Service{Namespace: meshSpace, Name: "ctrlmesh-webhook", CA: []byte("ca")}
	out := label.Webhooks([]schema.GroupResource{{Resource: "configmaps"}, {Group: "example.com", Resource: "foos"}}, service, platform.Default())
	change(&out[0])
	return out
}

// matching returns a change of the resources that a webhook matches.
func matching(group, resource string) func(*admissionv1.MutatingWebhook) {
	return func(w *admissionv1.MutatingWebhook) {
		w.Rules[0].APIGroups, w.Rules[0].Resources = []string{group}, []string{resource}
	}
}

func TestWebhookMatchesNoPods(t *testing.T) {
	s := newAPIServer(t, before136)
	s.requireAllowed(t, writes(label.Configuration, nil, stamping(func(*admissionv1.MutatingWebhook) {})))
	skips := func(namespaces ...string) func(*admissionv1.MutatingWebhook) {
		return func(w *admissionv1.MutatingWebhook) { w.NamespaceSelector.MatchExpressions[0].Values = namespaces }
	}
	for name, tt := range map[string]struct {
		change func(*admissionv1.MutatingWebhook)
		says   string
	}{
		"all resources":  {matching("", "*"), "may not have objects stamped"},
		"all groups":     {matching("*", "configmaps"), "may not have objects stamped"},
		"a subresource":  {matching("", "configmaps/status"), "may not have objects stamped"},
		"pods":           {matching("", "pods"), "may not have objects stamped"},
		"Secrets":        {matching("", "secrets"), "may not have objects stamped"},
		"Deployments":    {matching("apps", "deployments"), "may not have objects stamped"},
		"VirtualApps":    {matching("ctrlmesh.kruise.io", "virtualapps"), "may not have objects stamped"},
		"two groups":     {func(w *admissionv1.MutatingWebhook) { w.Rules[1].APIGroups = append(w.Rules[1].APIGroups, "apps") }, "may not have objects stamped"},
		"kube-system":    {skips(meshSpace), "may not have objects stamped"},
		"the mesh":       {skips("kube-system"), "may not have objects stamped"},
		"all namespaces": {func(w *admissionv1.MutatingWebhook) { w.NamespaceSelector.MatchExpressions[0].Key = "a" }, "may not have objects stamped"},
		"cluster scope":  {func(w *admissionv1.MutatingWebhook) { w.Rules[0].Scope = new(admissionv1.AllScopes) }, "may not have objects stamped"},
		"another name":   {func(w *admissionv1.MutatingWebhook) { w.Name = "another.example.com" }, "the mesh's own webhook stamp"},
		"another server": {func(w *admissionv1.MutatingWebhook) {
			w.ClientConfig = admissionv1.WebhookClientConfig{URL: new("https://example.com/stamp")}
		}, "the mesh's own webhook stamp"},
		"another service": {func(w *admissionv1.MutatingWebhook) { w.ClientConfig.Service.Name = "another" }, "the mesh's own webhook stamp"},
		"must succeed":    {func(w *admissionv1.MutatingWebhook) { w.FailurePolicy = new(admissionv1.Fail) }, "the mesh's own webhook stamp"},
	} {
		t.Run(name, func(t *testing.T) {
			s.requireRefused(t, writes(label.Configuration, nil, stamping(tt.change)), tt.says)
		})
	}
	t.Run("creation", func(t *testing.T) {
		s.requireRefused(t, request{by: managerUser, resource: webhookResource, object: &admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: label.Configuration}}}, "may create no webhook configuration")
	})
}

// TestWebhookAndItsPolicyAgree compares the table in the code with that in the policy.
func TestWebhookAndItsPolicyAgree(t *testing.T) {
	s := newAPIServer(t, before136)
	all := []schema.GroupResource{foos.GroupResource()}
	for _, group := range []string{meshv1alpha1.GroupName, "ctrlmesh.kruise.io", "kridge.kusionstack.io"} {
		all = append(all, schema.GroupResource{Group: group, Resource: "shardingconfigs"})
	}
	for _, kind := range builtin() {
		all = append(all, resourceOf(kind).GroupResource())
	}
	refused := 0
	for _, gr := range all {
		_, err := s.admit(t, writes(label.Configuration, nil, stamping(matching(gr.Group, gr.Resource))))
		written := label.Webhooks([]schema.GroupResource{gr}, label.Service{}, platform.Default())
		assert.Equal(t, len(written) > 0, err == nil, "%s: %v", gr, err)
		if err != nil {
			refused++
		}
	}
	require.Greater(t, refused, 10)
	require.Less(t, refused, len(all))
}

func TestNoWebhookStampsWherePoliciesDo(t *testing.T) {
	s := newAPIServer(t, since136)
	was := stamping(func(*admissionv1.MutatingWebhook) {})
	listing := writes(label.Configuration, was, was)
	listing.object.(*admissionv1.MutatingWebhookConfiguration).Annotations = map[string]string{meshv1alpha1.StampedAnnotation: "configmaps"}
	s.requireAllowed(t, listing)
	s.requireAllowed(t, writes(label.Configuration, was, nil))
	s.requireRefused(t, writes(label.Configuration, nil, was), "may only remove the webhooks")
	s.requireRefused(t, writes(label.Configuration, was, stamping(matching("", "services"))), "may only remove the webhooks")
	admission := admitting("ns")
	s.requireRefused(t, admission, "may only remove the webhooks")
	admission.old = admission.object
	s.requireAllowed(t, admission)
}

// admitting returns a write of the entry of a VirtualApp by the manager.
func admitting(namespace string) request {
	app := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "app"},
		Spec:       meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{TargetSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}}},
	}
	app.SetGroupVersionKind(origin.VirtualApp)
	entries, _ := inject.Entries([]*meshv1alpha1.ShardingConfig{app}, types.NamespacedName{Namespace: meshSpace, Name: "ctrlmesh-webhook"}, nil)
	entries[0].NamespaceSelector.MatchLabels[corev1.LabelMetadataName] = namespace
	return writes(inject.EntriesConfiguration, nil, entries)
}

func TestManagerAdmitsNoPodsOfTheSystem(t *testing.T) {
	s := newAPIServer(t, before136)
	s.requireAllowed(t, admitting("ns"))
	s.requireRefused(t, admitting("kube-system"), "none of kube-system or of the mesh itself")
	s.requireRefused(t, admitting(meshSpace), "none of kube-system or of the mesh itself")
}
