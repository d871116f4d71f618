package label

import (
	"encoding/json"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

func group(groups, resources []string) v1alpha1.ResourceGroup {
	return v1alpha1.ResourceGroup{APIGroups: groups, Resources: resources}
}

func config(name string, groups ...v1alpha1.ResourceGroup) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
		Spec:       v1alpha1.ShardingConfigSpec{Limits: []v1alpha1.ObjectLimiter{{RelateResources: groups}}},
	}
}

func TestListed(t *testing.T) {
	pods := group([]string{""}, []string{"pods", "configmaps"})
	root := config("root", group([]string{"batch"}, []string{"jobs"}))
	root.Spec.Root = &v1alpha1.RootConfig{}
	a, b := config("a", pods), config("b", group([]string{""}, []string{"configmaps", "pods", "pods"}), group([]string{"*", "apps"}, []string{"x"}))
	want := []v1alpha1.ResourceGroup{group([]string{"*"}, []string{"x"}), group([]string{""}, []string{"configmaps", "pods"})}
	require.ElementsMatch(t, want, Listed(a, b, root))
	require.Equal(t, Listed(a, b), Listed(b, a))
	root.Spec.Root.Method = v1alpha1.MethodLabels
	root.Spec.Root.ResourceSelector = []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{pods}}}
	require.ElementsMatch(t, []v1alpha1.ResourceGroup{group([]string{""}, []string{"configmaps", "pods"}), group([]string{"batch"}, []string{"jobs"})}, Listed(root), "both lists")
	// A root that selects objects by a label of the mesh needs it, however it divides them.
	root.Spec.Root.Method = v1alpha1.MethodAuto
	require.Empty(t, Listed(root))
	root.Spec.Root.ResourceSelector[0].Selector = &metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.ControlLabel: "true"}}
	require.Equal(t, []v1alpha1.ResourceGroup{group([]string{""}, []string{"configmaps", "pods"})}, Listed(root))
	a.Labels = map[string]string{v1alpha1.RootLabel: "root"}
	require.Empty(t, Listed(a), "derived")
	require.Empty(t, Webhooks(Listed(), Service{}, platform.Default()))
}

func TestWebhooks(t *testing.T) {
	w := Webhooks(Listed(config("a", group([]string{""}, []string{"pods"}))), Service{Namespace: "mesh", Name: "svc"}, platform.Default())
	require.Len(t, w, 1)
	require.Len(t, w[0].Rules, 1)
	require.Len(t, w[0].MatchConditions, 2)
	require.Equal(t, []string{"mesh", "kube-system", "kube-node-lease"}, w[0].NamespaceSelector.MatchExpressions[0].Values)
}

func TestExcludedResourcesAreNotInTheWebhook(t *testing.T) {
	listed := Listed(config("a", group([]string{""}, []string{"secrets", "pods"}), group([]string{"*"}, []string{"leases"})))
	w := Webhooks(listed, Service{Namespace: "mesh"}, platform.Default())
	require.Len(t, w, 1)
	require.Len(t, w[0].Rules, 1)
	require.Equal(t, []string{"pods"}, w[0].Rules[0].Resources)
	require.Empty(t, Webhooks(Listed(config("b", group([]string{""}, []string{"secrets"}))), Service{}, platform.Default()))
	require.Equal(t,
		`!((request.resource.group == "ctrlmesh.kusionstack.io") || (request.resource.group == "" && request.resource.resource == "secrets") || (request.resource.group == "coordination.k8s.io" && request.resource.resource == "leases"))`,
		w[0].MatchConditions[0].Expression)
}

func TestStamp(t *testing.T) {
	right, err := json.Marshal(Of("ns-a"))
	require.NoError(t, err)
	for what, object := range map[string]string{
		"no labels":    `{"metadata":{"name":"x"},"data":{"a":"b"}}`,
		"null":         `{"metadata":{"name":"x","labels":null}}`,
		"others":       `{"metadata":{"labels":{"app":"foo"}}}`,
		"wrong":        `{"metadata":{"labels":{"app":"foo","ctrlmesh.kusionstack.io/namespace":"ns-b","ctrlmesh.kusionstack.io/sharding-hash":"99"}}}`,
		"right before": `{"metadata":{"labels":` + string(right) + `}}`,
	} {
		r := Stamp(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
			Namespace: "ns-a", Object: runtime.RawExtension{Raw: []byte(object)},
		}})
		require.True(t, r.Allowed)
		ops, err := json.Marshal(r.Patches)
		require.NoError(t, err)
		p, err := jsonpatch.DecodePatch(ops)
		require.NoError(t, err)
		out, err := p.Apply([]byte(object))
		require.NoError(t, err, what)
		var before, after metav1.PartialObjectMetadata
		require.NoError(t, json.Unmarshal([]byte(object), &before))
		require.NoError(t, json.Unmarshal(out, &after))
		require.Subset(t, after.Labels, Of("ns-a"), what)
		require.Equal(t, before.Labels["app"], after.Labels["app"], what)
		if what == "right before" {
			require.Empty(t, r.Patches)
		}
	}
	r := Stamp(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Object: runtime.RawExtension{Raw: []byte(`{"metadata":{}}`)}}})
	require.True(t, r.Allowed)
	require.Empty(t, r.Patches, "cluster-scoped")
}

var all = []string{"get", "list", "patch", "watch"}

var served = []*metav1.APIResourceList{
	{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "pods", Namespaced: true, Verbs: all},
		{Name: "configmaps", Namespaced: true, Verbs: all},
		{Name: "events", Namespaced: true, Verbs: all},
		{Name: "bindings", Namespaced: true, Verbs: []string{"create"}},
		{Name: "namespaces", Verbs: all},
	}},
	{GroupVersion: "apps/v1", APIResources: []metav1.APIResource{{Name: "deployments", Namespaced: true, Verbs: all}}},
	{GroupVersion: "events.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "events", Namespaced: true, Verbs: all}}},
	{GroupVersion: "coordination.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "leases", Namespaced: true, Verbs: all}}},
	{GroupVersion: "metrics.k8s.io/v1beta1", APIResources: []metav1.APIResource{{Name: "pods", Namespaced: true, Verbs: []string{"get", "list"}}}},
}

func TestResolve(t *testing.T) {
	names := func(groups ...v1alpha1.ResourceGroup) (found, missing []string) {
		gvrs, missing := Resolve(groups, served)
		for _, g := range gvrs {
			found = append(found, g.GroupResource().String())
		}
		return found, missing
	}
	found, _ := names(group([]string{"*"}, []string{"events"}))
	require.Equal(t, []string{"events"}, found, "stored once, walked once")
	found, _ = names(group([]string{"events.k8s.io"}, []string{"events"}))
	require.Equal(t, []string{"events.events.k8s.io"}, found)

	found, missing := names(group([]string{"apps", "metrics.k8s.io"}, []string{"*"}))
	require.Equal(t, []string{"deployments.apps"}, found, "all of a group that can be listed and patched")
	require.Empty(t, missing)

	found, missing = names(group([]string{"", "apps"}, []string{"pods", "deployments", "namespaces"}), group([]string{"example.com"}, []string{"foos"}))
	require.Equal(t, []string{"deployments.apps", "pods"}, found)
	require.Contains(t, missing, "foos.example.com")
	require.Contains(t, missing, "namespaces")
}
