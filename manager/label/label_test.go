package label

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
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
	require.Empty(t, Webhooks(nil, Service{}, platform.Default()))
}

func TestStampedResources(t *testing.T) {
	stamped := func(groups ...v1alpha1.ResourceGroup) []string {
		return collect.Map(Stamped(Listed(config("a", groups...)), served, platform.Default()), schema.GroupResource.String)
	}
	require.Equal(t, []string{"foos.example.com", "pods"}, stamped(group([]string{"example.com"}, []string{"foos"}), group([]string{""}, []string{"secrets", "pods"})), "served or not")
	require.Equal(t, []string{"events", "events.events.k8s.io", "pods"}, stamped(group([]string{"*"}, []string{"events", "pods", "leases"})))
	require.Equal(t, []string{"deployments.apps"}, stamped(group([]string{"apps"}, []string{"*"})))
	require.True(t, Wild([]v1alpha1.ResourceGroup{group([]string{"", "*"}, []string{"pods"})}))
	require.False(t, Wild([]v1alpha1.ResourceGroup{group([]string{""}, []string{"pods"})}))
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
