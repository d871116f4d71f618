package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionreviewv1 "k8s.io/api/admission/v1"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/grant"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// asManager returns a client with the permissions of the manager, like an attacker who has its token.
func asManager(t *testing.T) client.Client {
	t.Helper()
	config := rest.CopyConfig(cluster.Config)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + kube.SystemNamespace + ":" + kube.ManagerName,
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + kube.SystemNamespace, "system:authenticated"},
	}
	c, err := client.New(config, client.Options{Scheme: cluster.Scheme()})
	require.NoError(t, err)
	return c
}

func mergePatch(text string) client.Patch { return client.RawPatch(types.MergePatchType, []byte(text)) }

// requireConfined requires that a policy, or RBAC, refused the request.
func requireConfined(t *testing.T, err error, says string) {
	t.Helper()
	require.Error(t, err)
	require.True(t, apierrors.IsForbidden(err) || apierrors.IsInvalid(err), "%v", err)
	require.ErrorContains(t, err, says)
}

func TestManagerWritesOnlyItsObjects(t *testing.T) {
	ns := namespace(t, "rights")
	m, ctx := asManager(t), t.Context()
	object := func() *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "users", Labels: map[string]string{"app": "x"}}}
	}
	held := object()
	held.Name, held.Annotations = "lock", map[string]string{resourcelock.LeaderElectionRecordAnnotationKey: `{"holderIdentity":"p_1"}`}
	record := func(holder string) client.Patch {
		return mergePatch(fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, resourcelock.LeaderElectionRecordAnnotationKey, `{"holderIdentity":"`+holder+`"}`))
	}
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "users"}, Spec: appsv1.DeploymentSpec{
		Replicas: new(int32(0)),
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "x"}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: probeImage}}},
		},
	}}
	shardOfUsers := shard(ns, "users", []string{"p"}, []string{ns}, "configmaps")
	create(t, object(), held, deployment, shardOfUsers)

	t.Run("a lock", func(t *testing.T) {
		requireConfined(t, m.Patch(ctx, held.DeepCopy(), record("another_1")), "annotations of the mesh alone")
		requireConfined(t, m.Patch(ctx, object(), record("")), "annotations of the mesh alone")
		require.NoError(t, m.Patch(ctx, held.DeepCopy(), record("")))
	})
	t.Run("labels of the mesh", func(t *testing.T) {
		require.NoError(t, m.Patch(ctx, object(), mergePatch(`{"metadata":{"labels":{"`+meshv1alpha1.NamespaceLabel+`":"x"}}}`)))
		require.NoError(t, m.Patch(ctx, deployment.DeepCopy(), mergePatch(`{"metadata":{"labels":{"`+meshv1alpha1.ControlLabel+`":"true"}}}`)))
	})
	for name, c := range map[string]struct {
		object client.Object
		patch  string
		says   string
	}{
		"data":                        {object(), `{"data":{"a":"b"}}`, "labels and annotations alone"},
		"another's label":             {object(), `{"metadata":{"labels":{"app":"y"}}}`, "labels of the mesh alone"},
		"another's label, removed":    {object(), `{"metadata":{"labels":{"app":null}}}`, "labels of the mesh alone"},
		"another's annotation":        {object(), `{"metadata":{"annotations":{"a":"b"}}}`, "annotations of the mesh alone"},
		"a finalizer":                 {object(), `{"metadata":{"finalizers":["example.com/a"]}}`, "labels and annotations alone"},
		"a template":                  {deployment, `{"spec":{"template":{"spec":{"hostPID":true}}}}`, "labels and annotations alone"},
		"the agents":                  {agent(), `{"spec":{"template":{"spec":{"serviceAccountName":"x"}}}}`, "labels and annotations alone"},
		"the administrator's":         {&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-root-ca.crt"}}, `{"data":{"ca.crt":"` + ns + `"}}`, "labels and annotations alone"},
		"a configuration of a user's": {shardOfUsers, `{"spec":{"isolation":"Off"}}`, "derived ShardingConfigs alone"},
	} {
		t.Run(name, func(t *testing.T) {
			err := m.Patch(ctx, c.object.DeepCopyObject().(client.Object), mergePatch(c.patch), client.DryRunAll)
			requireConfined(t, err, c.says)
		})
	}
	t.Run("a scale", func(t *testing.T) {
		err := m.SubResource("scale").Patch(ctx, deployment.DeepCopy(), mergePatch(`{"spec":{"replicas":5}}`))
		requireConfined(t, err, "cannot patch resource")
	})
}

func TestManagerRollsBackOnlyWhereItMay(t *testing.T) {
	ns := namespace(t, "rights")
	m := asManager(t)
	set := func(name string) *appsv1.StatefulSet {
		labels := map[string]string{"app": name}
		return &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: appsv1.StatefulSetSpec{
			Replicas: new(int32(0)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: probeImage}}}},
		}}
	}
	allows, other := set("allows"), set("other")
	allows.Annotations = map[string]string{meshv1alpha1.AllowRollbackAnnotation: "true"}
	create(t, allows, other)
	patch := func(o *appsv1.StatefulSet, text string) error {
		return m.Patch(t.Context(), o.DeepCopy(), mergePatch(text), client.DryRunAll)
	}
	const template = `{"spec":{"template":{"spec":{"terminationGracePeriodSeconds":7}}}}`
	requireConfined(t, patch(allows, template), "labels and annotations alone")
	create(t, kube.AllowRollback(ns))
	until(t, "the RoleBinding to be in force", func(context.Context) error { return patch(allows, template) })
	requireConfined(t, patch(allows, `{"spec":{"replicas":1}}`), "the template of a StatefulSet alone")
	requireConfined(t, patch(other, template), "labels and annotations alone")
	requireConfined(t, patch(other, `{"metadata":{"annotations":{"`+meshv1alpha1.AllowRollbackAnnotation+`":"true"}}}`), "not allow-rollback")
}

func TestManagerCreatesOnlyItsObjects(t *testing.T) {
	ns := namespace(t, "rights")
	m, ctx := asManager(t), t.Context()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "lock"}}
	shardOfUsers := shard(ns, "users", []string{"p"}, []string{ns}, "configmaps")
	create(t, lease, shardOfUsers)

	t.Run("ConfigMaps that it creates", func(t *testing.T) {
		another := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns}, Data: map[string]string{"a": "b"}}
		another.Name = "another"
		requireConfined(t, m.Create(ctx, another), "ConfigMaps of the mesh, and empty ones, alone")
		another.Namespace = kube.SystemNamespace
		another.Name = "ctrlmesh-platform"
		requireConfined(t, m.Create(ctx, another), "ConfigMaps of the mesh, and empty ones, alone")
	})
	t.Run("Endpoints that it creates", func(t *testing.T) {
		//nolint:staticcheck // old clients lock with Endpoints
		addresses := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "addresses"}, Subsets: []corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{{IP: "10.0.0.1"}}}}}
		requireConfined(t, m.Create(ctx, addresses), "Endpoints without addresses alone")
	})
	t.Run("Secrets that it creates", func(t *testing.T) {
		token := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: "token", Annotations: map[string]string{corev1.ServiceAccountNameKey: kube.AgentName}}, Type: corev1.SecretTypeServiceAccountToken}
		requireConfined(t, m.Create(ctx, token), "Secrets of the mesh alone")
	})
	t.Run("configurations that it creates", func(t *testing.T) {
		requireConfined(t, m.Create(ctx, shard(ns, "more", []string{"q"}, []string{ns}, "configmaps")), "derived ShardingConfigs alone")
		requireConfined(t, m.Delete(ctx, shardOfUsers.DeepCopy()), "derived ShardingConfigs alone")
	})
	t.Run("heartbeats", func(t *testing.T) {
		var beats coordinationv1.LeaseList
		require.NoError(t, cluster.List(ctx, &beats, client.InNamespace("kube-node-lease")))
		require.NotEmpty(t, beats.Items)
		requireConfined(t, m.Update(ctx, &beats.Items[0]), "heartbeats")
		require.NoError(t, cluster.Get(ctx, client.ObjectKeyFromObject(lease), lease))
		require.NoError(t, m.Update(ctx, lease), "a lock")
	})
}

func TestManagerPermitsOnlyLocksOfShards(t *testing.T) {
	ns := namespace(t, "rights")
	m := asManager(t)
	role := func(change func(*rbacv1.Role)) error {
		r := &rbacv1.Role{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: grant.Prefix + "a.b", Labels: map[string]string{meshv1alpha1.LockAccessLabel: "true"}},
			Rules: []rbacv1.PolicyRule{{
				APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{"lock---a"}, Verbs: []string{"get", "update", "patch"},
			}},
		}
		change(r)
		return m.Create(t.Context(), r, client.DryRunAll)
	}
	require.NoError(t, role(func(*rbacv1.Role) {}))
	for name, tt := range map[string]struct {
		change func(*rbacv1.Role)
		says   string
	}{
		"name":       {func(r *rbacv1.Role) { r.Name = "another" }, "its own Roles"},
		"label":      {func(r *rbacv1.Role) { r.Labels = nil }, "its own Roles"},
		"all leases": {func(r *rbacv1.Role) { r.Rules[0].ResourceNames = nil }, "locks of shards alone"},
		"own lock":   {func(r *rbacv1.Role) { r.Rules[0].ResourceNames = []string{"ctrlmesh-manager"} }, "locks of shards alone"},
		"verb":       {func(r *rbacv1.Role) { r.Rules[0].Verbs = []string{"create"} }, "locks of shards alone"},
		"resource": {func(r *rbacv1.Role) {
			r.Rules[0].APIGroups, r.Rules[0].Resources, r.Rules[0].Verbs = []string{""}, []string{"pods"}, []string{"get"}
		}, "locks of shards alone"},
	} {
		t.Run(name, func(t *testing.T) { requireConfined(t, role(tt.change), tt.says) })
	}
	t.Run("binding", func(t *testing.T) {
		b := &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: grant.Prefix + "a.b", Labels: map[string]string{meshv1alpha1.LockAccessLabel: "true"}},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
		}
		err := m.Create(t.Context(), b, client.DryRunAll)
		require.True(t, apierrors.IsForbidden(err) || apierrors.IsInvalid(err), "%v", err)
	})
	t.Run("Roles of users", func(t *testing.T) {
		theirs := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: grant.Prefix + "theirs"}}
		create(t, theirs)
		requireConfined(t, m.Delete(t.Context(), theirs, client.DryRunAll), "its own Roles")
	})
}

// updateWebhooks tries to update a webhook configuration, which the manager updates
// concurrently.
func updateWebhooks(t *testing.T, as client.Client, name string, change func(*admissionv1.MutatingWebhookConfiguration)) error {
	t.Helper()
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		c := &admissionv1.MutatingWebhookConfiguration{}
		require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Name: name}, c))
		change(c)
		return as.Update(t.Context(), c, client.DryRunAll)
	})
}

func TestManagerWritesOnlyItsWebhooks(t *testing.T) {
	m := asManager(t)
	requireConfined(t, m.Create(t.Context(), &admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "another"}}, client.DryRunAll), "cannot create resource")
	require.NoError(t, updateWebhooks(t, m, "ctrlmesh", func(c *admissionv1.MutatingWebhookConfiguration) {
		c.Webhooks[0].ClientConfig.CABundle = nil
	}))
	for name, change := range map[string]func(*admissionv1.MutatingWebhook){
		"rules":    func(w *admissionv1.MutatingWebhook) { w.Rules[0].Resources = []string{"*"} },
		"selector": func(w *admissionv1.MutatingWebhook) { w.ObjectSelector = nil },
		"service":  func(w *admissionv1.MutatingWebhook) { w.ClientConfig.Service.Name = "another" },
		"operation": func(w *admissionv1.MutatingWebhook) {
			w.Rules[0].Operations = []admissionv1.OperationType{admissionv1.OperationAll}
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := updateWebhooks(t, m, "ctrlmesh", func(c *admissionv1.MutatingWebhookConfiguration) { change(&c.Webhooks[0]) })
			requireConfined(t, err, "the CA of the mesh's webhooks alone")
		})
	}
}

// stamps returns a change that has a resource stamped, as the manager writes it.
func stamps(group, resource string) func(*admissionv1.MutatingWebhookConfiguration) {
	return func(c *admissionv1.MutatingWebhookConfiguration) {
		c.Webhooks = []admissionv1.MutatingWebhook{{
			Name:         "stamp.ctrlmesh.kusionstack.io",
			ClientConfig: admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: kube.SystemNamespace, Name: "ctrlmesh-webhook", Path: new("/stamp")}},
			Rules: []admissionv1.RuleWithOperations{{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{group}, APIVersions: []string{"*"}, Resources: []string{resource}, Scope: new(admissionv1.NamespacedScope)},
			}},
			FailurePolicy: new(admissionv1.Ignore), SideEffects: new(admissionv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
			NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
				{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpNotIn, Values: []string{kube.SystemNamespace, metav1.NamespaceSystem}},
			}},
		}}
	}
}

func TestManagerStampsOnlyPermittedResources(t *testing.T) {
	m := asManager(t)
	if mutatedByPolicies(t) {
		requireConfined(t, updateWebhooks(t, m, "ctrlmesh-stamp", stamps("", "configmaps")), "may only remove the webhooks")
		return
	}
	require.NoError(t, updateWebhooks(t, m, "ctrlmesh-stamp", stamps("", "configmaps")))
	for name, of := range map[string][2]string{
		"all": {"", "*"}, "roles": {"rbac.authorization.k8s.io", "roles"}, "the mesh's": {"ctrlmesh.kusionstack.io", "shardingconfigs"}, "subresources": {"", "services/status"}, "pods": {"", "pods"}, "secrets": {"", "secrets"}, "workloads": {"apps", "deployments"},
	} {
		t.Run(name, func(t *testing.T) {
			requireConfined(t, updateWebhooks(t, m, "ctrlmesh-stamp", stamps(of[0], of[1])), "may not have objects stamped")
		})
	}
	t.Run("elsewhere", func(t *testing.T) {
		err := updateWebhooks(t, m, "ctrlmesh-stamp", func(c *admissionv1.MutatingWebhookConfiguration) {
			stamps("", "configmaps")(c)
			c.Webhooks[0].ClientConfig = admissionv1.WebhookClientConfig{URL: new("https://example.com/stamp")}
		})
		requireConfined(t, err, "the mesh's own webhook")
	})
}

// mutatedByPolicies reports whether the cluster has the mesh's MutatingAdmissionPolicies.
func mutatedByPolicies(t *testing.T) bool {
	t.Helper()
	err := cluster.Get(t.Context(), client.ObjectKey{Name: "ctrlmesh-stamp"}, &admissionv1.MutatingAdmissionPolicyBinding{})
	if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
		return false
	}
	require.NoError(t, err)
	return true
}

// admits returns a change that has the pods of a namespace admitted which a selector matches, as
// the manager writes it for a VirtualApp.
func admits(namespace string, selector *metav1.LabelSelector) func(*admissionv1.MutatingWebhookConfiguration) {
	return func(c *admissionv1.MutatingWebhookConfiguration) {
		c.Webhooks = append(c.Webhooks, admissionv1.MutatingWebhook{
			Name:         "app.rights.virtualapps.ctrlmesh.kruise.io",
			ClientConfig: admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: kube.SystemNamespace, Name: "ctrlmesh-webhook", Path: new("/mutate-pod")}},
			Rules: []admissionv1.RuleWithOperations{{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}, Scope: new(admissionv1.NamespacedScope)},
			}},
			FailurePolicy: new(admissionv1.Fail), SideEffects: new(admissionv1.SideEffectClassNoneOnDryRun), AdmissionReviewVersions: []string{"v1"},
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: namespace}},
			ObjectSelector:    selector,
		})
	}
}

func TestManagerAdmitsOnlySelectedPods(t *testing.T) {
	m := asManager(t)
	const entries = "ctrlmesh-virtualapps"
	some := &metav1.LabelSelector{MatchLabels: map[string]string{"component": "op"}}
	if mutatedByPolicies(t) {
		requireConfined(t, updateWebhooks(t, m, entries, admits("default", some)), "may only remove the webhooks")
		return
	}
	require.NoError(t, updateWebhooks(t, m, entries, admits("default", some)))
	t.Run("all pods", func(t *testing.T) {
		requireConfined(t, updateWebhooks(t, m, entries, admits("default", nil)), "the pods that a VirtualApp selects")
	})
	t.Run("the mesh's", func(t *testing.T) {
		requireConfined(t, updateWebhooks(t, m, entries, admits(kube.SystemNamespace, some)), "or of the mesh itself")
	})
	t.Run("the system's", func(t *testing.T) {
		requireConfined(t, updateWebhooks(t, m, entries, admits(metav1.NamespaceSystem, some)), "none of kube-system")
	})
	t.Run("other resources", func(t *testing.T) {
		requireConfined(t, updateWebhooks(t, m, entries, func(c *admissionv1.MutatingWebhookConfiguration) {
			admits("default", some)(c)
			c.Webhooks[len(c.Webhooks)-1].Rules[0].Resources = []string{"secrets"}
		}), "new pods admitted by the mesh's own webhook alone")
	})
}

func TestStampingSkipsExcludedNamespaces(t *testing.T) {
	ns := namespace(t, "platform")
	for name, c := range map[string]struct {
		resource, owned, setting string
	}{
		"Secrets":         {"secrets", ns, "stamping.excludedResources"},
		"Leases":          {"leases.coordination.k8s.io", ns, "stamping.excludedResources"},
		"the mesh's own":  {"shardingconfigs.ctrlmesh.kusionstack.io", ns, "sharding.excludedResources"},
		"kube-system":     {"configmaps", "kube-system", "stamping.excludedNamespaces"},
		"kube-node-lease": {"configmaps", "kube-node-lease", "stamping.excludedNamespaces"},
		"the mesh's":      {"configmaps", kube.SystemNamespace, "stamping.excludedNamespaces"},
	} {
		t.Run(name, func(t *testing.T) {
			err := cluster.Create(t.Context(), shard(ns, "excluded", []string{"p"}, []string{c.owned}, c.resource), client.DryRunAll)
			requireConfined(t, err, c.setting+" of ConfigMap "+kube.SystemNamespace+"/ctrlmesh-platform")
		})
	}

	create(t, shard(ns, "allowed", []string{"p"}, []string{ns}, "configmaps"))
	settled(t, ns, "allowed", 0)
	for _, excluded := range []string{"kube-system", "kube-node-lease", kube.SystemNamespace} {
		stamped := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: excluded, GenerateName: ns + "-"}}
		require.NoError(t, cluster.Create(t.Context(), stamped, client.DryRunAll))
		require.NotContains(t, stamped.Labels, meshv1alpha1.NamespaceLabel)
	}
}

// Any client that reaches the webhook can send a review of a pod that does not exist.
func TestAnonymousReviewHasNoEffect(t *testing.T) {
	ns := namespace(t, "anonymous")
	probeRights(t, ns)
	stranger := outsider(t, ns, "stranger")
	pod := probe(ns, "ghost", true)
	raw, err := json.Marshal(pod)
	require.NoError(t, err)
	review, err := json.Marshal(admissionreviewv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionreviewv1.AdmissionRequest{
			UID: "x", Operation: admissionreviewv1.Create, Namespace: ns, Object: runtime.RawExtension{Raw: raw},
		},
	})
	require.NoError(t, err)
	service := &corev1.Service{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: kube.SystemNamespace, Name: "ctrlmesh-webhook"}, service))
	caller := &http.Client{Timeout: patience, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // a foreign client does not have the CA
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return cluster.DialFrom(ctx, stranger, net.JoinHostPort(service.Spec.ClusterIP, "443"))
		},
	}}
	response, err := caller.Post("https://webhook/mutate-pod", "application/json", bytes.NewReader(review))
	require.NoError(t, err)
	answer, err := io.ReadAll(response.Body)
	require.NoError(t, errors.Join(err, response.Body.Close()))
	require.Contains(t, string(answer), `"allowed":true`)

	var all corev1.ConfigMapList
	require.NoError(t, cluster.List(t.Context(), &all, client.InNamespace(ns)))
	for _, cm := range all.Items {
		require.False(t, strings.HasPrefix(cm.Name, "ctrlmesh"), cm.Name)
	}
}

func TestLabelsOfTerminatingPodsAreFixed(t *testing.T) {
	ns := namespace(t, "terminating")
	pod := probe(ns, "leaves", true)
	pod.Spec.ServiceAccountName = ""
	pod.Spec.SchedulerName = "nobody"
	pod.Finalizers = []string{"example.com/test"}
	create(t, pod)
	t.Cleanup(func() { _ = cluster.Patch(context.Background(), pod, mergePatch(`{"metadata":{"finalizers":null}}`)) })

	t.Run("nor written by a binding", func(t *testing.T) {
		binding := &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: pod.Name, Annotations: map[string]string{meshv1alpha1.TrustAnnotation: meshv1alpha1.TrustBoth}},
			Target:     corev1.ObjectReference{Kind: "Node", Name: nodes(t)[0]},
		}
		requireConfined(t, cluster.SubResource("binding").Create(t.Context(), pod.DeepCopy(), binding), "not when it is bound to a node")
	})
	require.NoError(t, cluster.Delete(t.Context(), pod.DeepCopy()))
	err := cluster.Patch(t.Context(), pod.DeepCopy(), mergePatch(`{"metadata":{"labels":{"`+meshv1alpha1.EnableProxyLabel+`":null}}}`))
	requireConfined(t, err, "set it on the pod template")
	require.NoError(t, cluster.Patch(t.Context(), pod, mergePatch(`{"metadata":{"finalizers":null}}`)))
}
