package serve

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

func newClient(t *testing.T, objects ...client.Object) Client {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	require.NoError(t, AddToScheme(scheme))
	return Client{fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithStatusSubresource(append(Objects(), &v1alpha1.ShardingConfig{})...).Build()}
}

func meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name), Generation: 3}
}

func ofKridge(name string) *kridge.ShardingConfig {
	return &kridge.ShardingConfig{ObjectMeta: meta(name), Spec: kridge.ShardingConfigSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"shard": name}},
		Limits: []kridge.ObjectLimiter{{
			RelateResources: []kridge.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"pods"}}},
			Selector:        &metav1.LabelSelector{MatchLabels: map[string]string{"kridge.kusionstack.io/namespace": "a"}},
		}},
	}}
}

func get(t *testing.T, c client.Reader, kind metav1.TypeMeta, name string) *v1alpha1.ShardingConfig {
	t.Helper()
	out := &v1alpha1.ShardingConfig{TypeMeta: kind}
	require.NoError(t, c.Get(context.Background(), types.NamespacedName{Namespace: "ns", Name: name}, out))
	return out
}

var kridgeType = metav1.TypeMeta{APIVersion: "kridge.kusionstack.io/v1alpha1", Kind: "ShardingConfig"}

func TestListHasObjectsOfAllKinds(t *testing.T) {
	derived := ofKridge("root-1-normal")
	derived.Labels = map[string]string{kridge.RootLabel: "root"}
	c := newClient(t, &v1alpha1.ShardingConfig{ObjectMeta: meta("native")}, ofKridge("kridge"), derived)
	var list v1alpha1.ShardingConfigList
	require.NoError(t, c.List(t.Context(), &list, client.InNamespace("ns")))
	require.Len(t, list.Items, 2)
	require.True(t, origin.IsNative(&list.Items[0]))
	require.Equal(t, "ShardingConfig.kridge.kusionstack.io ns/kridge", origin.Of(&list.Items[1]).String())
	require.Equal(t, map[string]string{v1alpha1.NamespaceLabel: "a"}, list.Items[1].Spec.Limits[0].Selector.MatchLabels)
	require.NoError(t, c.List(t.Context(), &list, client.InNamespace("elsewhere")))
	require.Empty(t, list.Items)
}

// A native object of the same name is another object.
func TestStatusGoesToTheObjectOfTheKind(t *testing.T) {
	c := newClient(t, &v1alpha1.ShardingConfig{ObjectMeta: meta("same")}, ofKridge("same"))
	one := get(t, c, kridgeType, "same")
	stale := one.DeepCopy()
	one.Status.Members, one.Status.Lock = 2, "lock"
	require.NoError(t, c.Status().Update(t.Context(), one))
	require.Zero(t, get(t, c, metav1.TypeMeta{}, "same").Status.Members)
	require.EqualValues(t, 2, get(t, c, kridgeType, "same").Status.Members)
	require.Equal(t, origin.Kridge, one.GroupVersionKind())
	require.Equal(t, get(t, c, kridgeType, "same").ResourceVersion, one.ResourceVersion)

	stale.Status.Members = 7
	require.True(t, apierrors.IsConflict(c.Status().Update(t.Context(), stale)))
	one.Status.Lock = ""
	require.NoError(t, c.Status().Update(t.Context(), one))
	require.Empty(t, get(t, c, kridgeType, "same").Status.Lock, "a field that the new status omits")

	object := &kridge.ShardingConfig{}
	require.NoError(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(one), object))
	require.Equal(t, ofKridge("same").Spec, object.Spec)
}

func TestFinalizersArePatched(t *testing.T) {
	c := newClient(t, ofKridge("a"))
	one := get(t, c, kridgeType, "a")
	require.NoError(t, c.Patch(t.Context(), one, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["a/b"]}}`))))
	require.Equal(t, []string{"a/b"}, one.Finalizers)
	require.Error(t, c.Update(t.Context(), one))
}

func TestInvalidObjects(t *testing.T) {
	t.Run("without selector", func(t *testing.T) {
		o := ofKridge("a")
		o.Spec.Selector = nil
		c, _, errs := Translate(origin.Kridge, o)
		require.NotEmpty(t, errs)
		require.Contains(t, origin.Problem(c), "spec.selector")
	})
	t.Run("which claims to be derived", func(t *testing.T) {
		o := ofKridge("a")
		o.Labels = map[string]string{v1alpha1.RootLabel: "other", "mine": "x"}
		o.Annotations = map[string]string{v1alpha1.GroupName + "/problem": "forged"}
		c, _, errs := Translate(origin.Kridge, o)
		require.Empty(t, errs)
		require.Equal(t, map[string]string{"mine": "x"}, c.Labels)
		require.Empty(t, origin.Problem(c))
		require.Len(t, o.Labels, 2, "it is changed in place")
	})
}
