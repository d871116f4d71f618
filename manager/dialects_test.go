package manager

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/testenv"
)

// kridgeShard is the shard of the pods with a label.
func kridgeShard(name, value string) *kridge.ShardingConfig {
	return &kridge.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("kridge-" + name), Generation: 1},
		Spec: kridge.ShardingConfigSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"shard": value}},
			Limits: []kridge.ObjectLimiter{{ObjectSelector: &kridge.ObjectSelector{
				RelateResources: []kridge.ResourceGroup{{APIGroups: []string{"*"}, Resources: []string{"pods"}}},
				Selector:        &metav1.LabelSelector{MatchLabels: map[string]string{"kridge.kusionstack.io/namespace": "tenant"}},
			}}},
		},
	}
}

func TestKridgeIsServed(t *testing.T) {
	w := newWorldOf(t, true, testenv.MemberPod("a", v1alpha1.TrustMesh), testenv.MemberPod("b", v1alpha1.TrustMesh), kridgeShard("one", "a"), shard("two", "b"))
	require.NoError(t, w.run("policies"))
	policies := w.replica.state.Compiled.Load().Policies
	require.Equal(t, "one", policies["a"].Sharding.Shard)
	require.Equal(t, "ctrlmesh.kusionstack.io/namespace=tenant", policies["a"].Sharding.Limits[0].Selector)
	require.Equal(t, "two", policies["b"].Sharding.Shard)
	require.NoError(t, w.run("status"))
	one := testenv.Get(t, w.Env, "ns", "one", &kridge.ShardingConfig{})
	require.EqualValues(t, 1, one.Status.Members)
	require.NotNil(t, meta.FindStatusCondition(one.Status.Conditions, v1alpha1.ConditionReady))
	require.EqualValues(t, 1, one.Status.ObservedGeneration)
	require.EqualValues(t, 1, testenv.Get(t, w.Env, "ns", "two", &v1alpha1.ShardingConfig{}).Status.Members)
	require.NoError(t, w.run("status"))
	require.Equal(t, one.ResourceVersion, testenv.Get(t, w.Env, "ns", "one", &kridge.ShardingConfig{}).ResourceVersion, "nothing to write")
}

func TestVirtualAppIsServed(t *testing.T) {
	app := &kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "app", UID: "app", Generation: 1}, Spec: kruise.VirtualAppSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"shard": "a"}},
	}}
	broken := &kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "broken", UID: "broken", Generation: 1}}
	w := newWorldOf(t, true, testenv.MemberPod("a", v1alpha1.TrustMesh), testenv.MemberPod("b", v1alpha1.TrustMesh), app, broken, shard("two", "b"))
	require.NoError(t, w.run("policies"))
	require.NoError(t, w.run("roots"))
	require.NoError(t, w.run("policies"))
	policies := w.replica.state.Compiled.Load().Policies
	require.True(t, policies["a"].Sharding.Standby)
	require.Contains(t, policies["a"].Sharding.StandbyReason, "VirtualApp app: it is in no shard yet")
	require.Equal(t, "two", policies["b"].Sharding.Shard)
	require.NoError(t, w.run("roots"))
	require.NoError(t, w.run("status"))
	ready := func(name string) string {
		one := testenv.Get(t, w.Env, "ns", name, &kruise.VirtualApp{})
		return meta.FindStatusCondition(one.Status.Conditions, v1alpha1.ConditionReady).Message
	}
	require.NotEmpty(t, ready("app"))
	require.Contains(t, ready("broken"), "spec.selector: Required")
}

// Admission refuses such objects, but may not see them.
func TestDialectObjectsThatAdmissionWouldRefuse(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*kridge.ShardingConfig)
		says   string
	}{
		"no selector":               {func(o *kridge.ShardingConfig) { o.Spec.Selector = nil }, "spec.selector"},
		"no limits":                 {func(o *kridge.ShardingConfig) { o.Spec.Limits = nil }, "spec.limits"},
		"the name of a native one":  {func(o *kridge.ShardingConfig) { o.Name = "two" }, "has the same name"},
		"the label of derived ones": {func(o *kridge.ShardingConfig) { o.Labels = map[string]string{v1alpha1.RootLabel: "two"} }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			bad := kridgeShard("one", "a")
			c.change(bad)
			w := newWorldOf(t, true, testenv.MemberPod("a", v1alpha1.TrustMesh), bad, shard("two", "b"))
			require.NoError(t, w.run("policies"))
			policy := w.replica.state.Compiled.Load().Policies["a"]
			require.Equal(t, c.says == "", policy.Refuse == "", policy.Refuse)
			require.NoError(t, w.run("status"))
			written := &kridge.ShardingConfig{}
			require.NoError(t, w.Client.Get(t.Context(), client.ObjectKeyFromObject(bad), written))
			if c.says != "" {
				require.Contains(t, meta.FindStatusCondition(written.Status.Conditions, v1alpha1.ConditionReady).Message, c.says)
			}
			require.Zero(t, testenv.Get(t, w.Env, "ns", "two", &v1alpha1.ShardingConfig{}).Status.Members)
		})
	}
}
