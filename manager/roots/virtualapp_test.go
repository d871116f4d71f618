package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/crdtest"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// appMesh is a mesh with a VirtualApp, of which subset v2 owns namespace blue.
func appMesh(t *testing.T) (m *mesh, app *kruise.VirtualApp) {
	m = newMesh(t)
	m.Client = serve.Client{Client: m.Client}
	m.lead()
	m.labels = map[string]labels.Set{}
	for _, n := range namespaces {
		m.labels[n] = labels.Set{}
	}
	app = &kruise.VirtualApp{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "app", UID: "app", Generation: 1},
		Spec: kruise.VirtualAppSpec{
			Selector:      &metav1.LabelSelector{MatchLabels: map[string]string{"component": "op"}},
			Configuration: &kruise.VirtualAppConfiguration{Controller: &kruise.ControllerConfiguration{LeaderElectionName: "lock"}},
			Route:         &kruise.VirtualAppRoute{SubRules: []kruise.SubRule{{Name: "r", Match: []kruise.MatchLimitSelector{{NamespaceRegex: new("^blue$")}}}}},
			Subsets:       []kruise.VirtualAppSubset{{Name: "v2", Labels: map[string]string{"version": "v2"}, RouteRules: []string{"r"}}},
		},
	}
	require.NoError(t, m.Create(t.Context(), app))
	return m, app
}

// selected adds labels to a pod.
func (m *mesh) selected(p *corev1.Pod, version string) {
	for key, value := range map[string]string{"component": "op", "version": version} {
		metav1.SetMetaDataLabel(&p.ObjectMeta, key, value)
	}
	require.NoError(m, m.Update(m.Context(), p))
}

func (m *mesh) appReady(app *kruise.VirtualApp) metav1.Condition {
	m.Helper()
	require.NoError(m, m.Get(m.Context(), client.ObjectKeyFromObject(app), app))
	return *apimeta.FindStatusCondition(app.Status.Conditions, v1alpha1.ConditionReady)
}

func (m *mesh) appOwnsNothing(app *kruise.VirtualApp) {
	m.Helper()
	require.NoError(m, m.Get(m.Context(), client.ObjectKeyFromObject(app), app))
	state, err := decide.Load(app.Status.Root)
	require.NoError(m, err)
	require.False(m, state.Holds())
}

func TestVirtualAppNamesOldPodsIfItHasNoOthers(t *testing.T) {
	t.Parallel()
	m, app := appMesh(t)
	m.Others.Entry = func(*v1alpha1.ShardingConfig) decide.Entry {
		return decide.Entry{Since: m.now.Add(-time.Hour)}
	}
	m.selected(m.outside(0), "v1")
	m.goOn(30*time.Second, nil)
	require.EqualValues(t, v1alpha1.ReasonOutsidePods, m.appReady(app).Reason)
	require.Contains(t, m.appReady(app).Message, "op-0; they were created before the VirtualApp: restart them")
}

func TestVirtualAppWaitsForPodsOlderThanItsEntry(t *testing.T) {
	t.Parallel()
	m, app := appMesh(t)
	var since time.Time
	m.Others.Entry = func(*v1alpha1.ShardingConfig) decide.Entry { return decide.Entry{Since: since} }
	old := m.outside(0)
	m.selected(old, "v1")
	m.selected(m.pod(1), "v1")
	m.selected(m.pod(2), "v2")

	m.goOn(10*time.Second, nil)
	m.appOwnsNothing(app)
	require.Contains(t, m.appReady(app).Message, "the admission of new pods to the mesh is being set up")

	m.Others.Entry = func(*v1alpha1.ShardingConfig) decide.Entry { return decide.Entry{Full: true} }
	m.goOn(10*time.Second, nil)
	m.appOwnsNothing(app)
	require.Contains(t, m.appReady(app).Message, "leave no room")
	m.Others.Entry = func(*v1alpha1.ShardingConfig) decide.Entry { return decide.Entry{Since: since} }

	since = m.now
	m.goOn(30*time.Second, nil)
	m.appOwnsNothing(app)
	require.EqualValues(t, v1alpha1.ReasonOutsidePods, m.appReady(app).Reason)
	require.Contains(t, m.appReady(app).Message, "op-0; they were created before the VirtualApp: restart them")

	require.NoError(t, m.Delete(t.Context(), old))
	m.goOn(time.Minute, nil)
	require.Equal(t, metav1.ConditionTrue, m.appReady(app).Status, m.appReady(app).Message)
	require.Equal(t, "ctrlmesh:ns/app", m.holder("lock"))
	state, err := decide.Load(app.Status.Root)
	require.NoError(t, err)
	require.True(t, state.Shards["app-v2"].Owned.OwnsHash(sharding.Hash("blue")))
	require.False(t, state.Shards["app-v2"].Owned.OwnsHash(sharding.Hash("red")))
	require.True(t, state.Shards["app-default"].Owned.OwnsHash(sharding.Hash("red")))
	require.Contains(t, app.Finalizers, v1alpha1.HandoverFinalizer)
	child := m.children()["app-v2"]
	require.Equal(t, "VirtualApp", child.OwnerReferences[0].Kind)
	require.Equal(t, app.UID, child.OwnerReferences[0].UID)

	// The webhook is removed, and a pod is created meanwhile.
	m.selected(m.outside(0), "v1")
	m.goOn(outsideRarely+time.Second, nil)
	require.EqualValues(t, v1alpha1.ReasonOutsidePods, m.appReady(app).Reason)
}

// The schema of the native kind must accept the objects of its shards.
func TestShardsOfVirtualAppsFitTheSchema(t *testing.T) {
	t.Parallel()
	_, app := appMesh(t)
	app.Spec.Route.GlobalLimits = []kruise.MatchLimitSelector{{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}}
	config, _, errs := serve.Translate(origin.VirtualApp, app)
	require.Empty(t, errs)
	require.NoError(t, layout.Resolve(&config.Spec, nil))
	of := decide.Child(config, "app-v2")
	of.SetGroupVersionKind(origin.Native)
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(of)
	require.NoError(t, err)
	require.Empty(t, crdtest.Load(t, "ctrlmesh.kusionstack.io_shardingconfigs").Validate(object))
}

// Authors of ShardingConfigs in another namespace must not change this VirtualApp.
func TestForgedOwnersHaveNoEffect(t *testing.T) {
	t.Parallel()
	m, app := appMesh(t)
	m.Others.Entry = func(*v1alpha1.ShardingConfig) decide.Entry { return decide.Entry{Since: time.Unix(1, 0)} }
	m.selected(m.pod(1), "v1")
	m.selected(m.pod(2), "v2")
	m.goOn(time.Minute, nil)
	before := m.appReady(app)
	require.Equal(t, metav1.ConditionTrue, before.Status, before.Message)
	version := app.ResourceVersion
	forged := &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "elsewhere", Name: "app-v2", UID: "forged", Labels: map[string]string{v1alpha1.RootLabel: "app"},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(app, kruise.GroupVersion.WithKind("VirtualApp"))},
		},
		Spec: v1alpha1.ShardingConfigSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}},
	}
	require.NoError(t, m.Create(t.Context(), forged))
	m.goOn(30*time.Second, nil)
	m.appReady(app)
	require.Equal(t, version, app.ResourceVersion, "the VirtualApp has another status")
	require.NoError(t, m.Get(t.Context(), client.ObjectKeyFromObject(forged), forged))
}
