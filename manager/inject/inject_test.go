package inject

import (
	"context"
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
)

func shard(name string, labels map[string]string) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec:       v1alpha1.ShardingConfigSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}},
	}
}

func newWebhook(t *testing.T, existing ...client.Object) *Webhook {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(existing...).Build()
	return &Webhook{Reader: c, Namespace: "mesh", Permits: func(context.Context, netip.Addr) bool { return true }, Hosts: func() []string { return nil }, Bundles: &Bundles{
		Client:  c,
		Mesh:    func() []byte { return []byte("mesh\n") },
		Cluster: func() []byte { return []byte("cluster\n") },
		Egress:  func() []byte { return egressCA },
	}}
}

// pod is as the ServiceAccount admission leaves it, with a field we do not know.
const pod = `{
  "metadata": {"name": "p", "namespace": "ns", "labels": {"ctrlmesh.kusionstack.io/enable-proxy": "true", "shard": "0"}},
  "spec": {"fieldOfTheFuture": {"a": 1}, "volumes": [
    {"name": "own", "configMap": {"name": "kube-root-ca.crt"}},
    {"name": "api", "projected": {"defaultMode": 420, "sources": [
      {"serviceAccountToken": {"path": "token"}},
      {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
      {"configMap": {"name": "users"}}]}},
    {"name": "second", "projected": {"sources": [{"configMap": {"name": "ctrlmesh-cluster-ca.crt"}}]}}]}
}`

func create(t *testing.T, w *Webhook, raw string, dryRun bool) (admission.Response, map[string]any) {
	t.Helper()
	req := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		Operation: admissionv1.Create, Namespace: "ns", DryRun: &dryRun, Object: runtime.RawExtension{Raw: []byte(raw)},
	}}
	r := w.Handle(t.Context(), req)
	if !r.Allowed {
		return r, nil
	}
	ops, err := json.Marshal(r.Patches)
	require.NoError(t, err)
	p, err := jsonpatch.DecodePatch(ops)
	require.NoError(t, err)
	out, err := p.Apply([]byte(raw))
	require.NoError(t, err)
	var m map[string]any
	require.NoError(t, json.Unmarshal(out, &m))
	return r, m
}

func sources(m map[string]any) (names []string, trust any) {
	for _, v := range m["spec"].(map[string]any)["volumes"].([]any) {
		v := v.(map[string]any)
		if p, ok := v["projected"].(map[string]any); ok {
			for _, s := range p["sources"].([]any) {
				if cm, ok := s.(map[string]any)["configMap"].(map[string]any); ok {
					names = append(names, cm["name"].(string))
				}
			}
		} else {
			names = append(names, v["configMap"].(map[string]any)["name"].(string))
		}
	}
	return names, m["metadata"].(map[string]any)["annotations"].(map[string]any)[v1alpha1.TrustAnnotation]
}

func TestMemberTrustsTheMeshAlone(t *testing.T) {
	w := newWebhook(t, shard("zero", map[string]string{"shard": "0"}))
	_, m := create(t, w, pod, false)
	names, trust := sources(m)
	require.Equal(t, []string{MeshBundle, MeshBundle, "users", MeshBundle}, names)
	require.Equal(t, v1alpha1.TrustMesh, trust)
	require.Contains(t, m["spec"], "fieldOfTheFuture")
	require.Equal(t, "mesh\n", ensured(t, w, MeshBundle).Data["ca.crt"])

	// Once more, as the apiserver does when another webhook changed the pod.
	again, err := json.Marshal(m)
	require.NoError(t, err)
	r, m2 := create(t, w, string(again), false)
	require.Empty(t, r.Patches)
	require.Equal(t, m, m2)
}

// A pod of a root's workload is a member too, whether it is in a shard yet or not.
func TestPodsOfARootTrustTheMeshAlone(t *testing.T) {
	root := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "root"}}
	root.Spec.Root = &v1alpha1.RootConfig{Prefix: "op", TargetStatefulSet: "op"}
	owned := strings.Replace(pod, `"labels"`, `"ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "op", "controller": true}], "labels"`, 1)

	r, _ := create(t, newWebhook(t, root), owned, true)
	require.True(t, r.Allowed)
	patches, err := json.Marshal(r.Patches)
	require.NoError(t, err)
	require.Contains(t, string(patches), `"ctrlmesh.kusionstack.io/trust":"mesh"`)

	r, _ = create(t, newWebhook(t, root, shard("by-hand", map[string]string{"shard": "0"})), owned, true)
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "ShardingConfigs by-hand, root")
}

func TestOthersTrustBoth(t *testing.T) {
	root := shard("root", map[string]string{"shard": "0"})
	root.Spec.Root = &v1alpha1.RootConfig{}
	w := newWebhook(t, shard("one", map[string]string{"shard": "1"}), root)
	_, m := create(t, w, pod, false)
	names, trust := sources(m)
	require.Equal(t, []string{BothBundle, BothBundle, "users", BothBundle}, names)
	require.Equal(t, v1alpha1.TrustBoth, trust)
	require.Equal(t, "mesh\ncluster\n", ensured(t, w, BothBundle).Data["ca.crt"])
}

// Who may be let go past the proxy must be able to verify the apiserver.
func TestOpenAndPassthroughTrustBoth(t *testing.T) {
	for _, change := range []func(*v1alpha1.ShardingConfigSpec){
		func(s *v1alpha1.ShardingConfigSpec) { s.FailurePolicy = v1alpha1.FailOpen },
		func(s *v1alpha1.ShardingConfigSpec) { s.ClientCertificates = v1alpha1.ClientCertificatesPassthrough },
	} {
		c := shard("zero", map[string]string{"shard": "0"})
		change(&c.Spec)
		_, m := create(t, newWebhook(t, c), pod, false)
		names, trust := sources(m)
		require.Equal(t, []string{BothBundle, BothBundle, "users", BothBundle}, names)
		require.Equal(t, v1alpha1.TrustBoth, trust)
	}
}

func TestForgedAnnotationIsOverwritten(t *testing.T) {
	w := newWebhook(t, shard("zero", map[string]string{"shard": "0"}))
	forged := `{"metadata":{"namespace":"ns","annotations":{"ctrlmesh.kusionstack.io/trust":"mesh-and-cluster","x":"y"},"labels":{"ctrlmesh.kusionstack.io/enable-proxy":"true","shard":"0"}},"spec":{"volumes":[]}}`
	_, m := create(t, w, forged, false)
	_, trust := sources(m)
	require.Equal(t, v1alpha1.TrustMesh, trust)
	require.Equal(t, "y", m["metadata"].(map[string]any)["annotations"].(map[string]any)["x"])
}

// Anybody who reaches the port can send a review, of a pod that never was.
func TestAdmissionWritesNothing(t *testing.T) {
	for _, dryRun := range []bool{false, true} {
		w := newWebhook(t, shard("zero", map[string]string{"shard": "0"}))
		_, m := create(t, w, pod, dryRun)
		_, trust := sources(m)
		require.Equal(t, v1alpha1.TrustMesh, trust)
		var all corev1.ConfigMapList
		require.NoError(t, w.Bundles.Client.List(t.Context(), &all))
		require.Empty(t, all.Items)
	}
}

func TestRefusals(t *testing.T) {
	w := newWebhook(t, shard("zero", map[string]string{"shard": "0"}), shard("also", map[string]string{"shard": "0"}))
	r, _ := create(t, w, pod, false)
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "also, zero")
	require.Contains(t, r.Result.Message, "change")

	r, _ = create(t, newWebhook(t), `{"metadata":{"labels":{"ctrlmesh.kusionstack.io/enable-proxy":"true"}},"spec":{"hostNetwork":true}}`, false)
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "hostNetwork")

	invalid := shard("broken", nil)
	invalid.Spec.Selector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Within"}}}
	r, _ = create(t, newWebhook(t, invalid), pod, false)
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "broken")

	// No CA yet: not let in, rather than let in to trust nobody.
	w = newWebhook(t)
	w.Bundles.Mesh = func() []byte { return nil }
	r, _ = create(t, w, pod, false)
	require.False(t, r.Allowed)
}

// ensured is a bundle as the leader writes it.
func ensured(t *testing.T, w *Webhook, name string) *corev1.ConfigMap {
	t.Helper()
	require.NoError(t, w.Bundles.Ensure(t.Context(), "ns", name))
	return bundle(t, w, name)
}

func bundle(t *testing.T, w *Webhook, name string) *corev1.ConfigMap {
	t.Helper()
	cm := &corev1.ConfigMap{}
	require.NoError(t, w.Bundles.Client.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: name}, cm))
	return cm
}

func TestBundlesAreRepaired(t *testing.T) {
	yes := true
	w := newWebhook(t, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: MeshBundle, Labels: map[string]string{"keep": "me"}},
		Data:       map[string]string{"ca.crt": "evil", "more": "x"},
	}, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: BothBundle},
		Immutable:  &yes,
		Data:       map[string]string{"ca.crt": "evil"},
	})
	for _, name := range []string{MeshBundle, BothBundle} {
		require.False(t, w.Bundles.Right(bundle(t, w, name)))
		require.NoError(t, w.Bundles.Ensure(t.Context(), "ns", name))
		require.True(t, w.Bundles.Right(bundle(t, w, name)))
	}
	require.Equal(t, "me", bundle(t, w, MeshBundle).Labels["keep"])
}

// A replica that has not heard of a rotation does not undo it.
func TestABundleAheadOfUsStays(t *testing.T) {
	w := newWebhook(t, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: MeshBundle, Labels: map[string]string{BundleLabel: "true"}},
		Data:       map[string]string{"ca.crt": "mesh\nnext\n"},
	})
	mesh, reloads := "mesh\n", 0
	w.Bundles.Mesh = func() []byte { return []byte(mesh) }
	w.Bundles.Reload = func(context.Context) error { mesh, reloads = "mesh\nnext\n", reloads+1; return nil }
	require.NoError(t, w.Bundles.Ensure(t.Context(), "ns", MeshBundle))
	require.Equal(t, "mesh\nnext\n", bundle(t, w, MeshBundle).Data["ca.crt"])
	require.NoError(t, w.Bundles.Ensure(t.Context(), "ns", MeshBundle))
	require.Equal(t, 1, reloads)
}

// Agents and caches know the mesh's label only.
func TestPodsOfKridgeGetTheLabelOfTheMesh(t *testing.T) {
	w := newWebhook(t, shard("zero", map[string]string{"shard": "0"}))
	_, m := create(t, w, strings.Replace(pod, "ctrlmesh.kusionstack.io/enable-proxy", "kridge.kusionstack.io/enable-proxy", 1), false)
	labels := m["metadata"].(map[string]any)["labels"].(map[string]any)
	require.Equal(t, map[string]any{"kridge.kusionstack.io/enable-proxy": "true", v1alpha1.EnableProxyLabel: "true", "shard": "0"}, labels)
	_, trust := sources(m)
	require.Equal(t, v1alpha1.TrustMesh, trust)
}

// The selector alone puts pods on the mesh.
func TestPodsOfVirtualAppsGetTheLabelOfTheMesh(t *testing.T) {
	app := &kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "app"}, Spec: kruise.VirtualAppSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"shard": "0"}},
	}}
	scheme := runtime.NewScheme()
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	require.NoError(t, serve.AddToScheme(scheme))
	read := func(objects ...client.Object) client.Reader {
		return serve.Reader{Reader: fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build()}
	}
	w := newWebhook(t)
	for _, label := range []string{`"shard": "0"`, `"ctrlmesh.kusionstack.io/enable-proxy": "false", "shard": "0"`} {
		raw := strings.Replace(pod, `"ctrlmesh.kusionstack.io/enable-proxy": "true", "shard": "0"`, label, 1)
		w.Reader = read(app)
		_, m := create(t, w, raw, false)
		require.Equal(t, map[string]any{v1alpha1.EnableProxyLabel: "true", "shard": "0"}, m["metadata"].(map[string]any)["labels"])
		_, trust := sources(m)
		require.Equal(t, v1alpha1.TrustMesh, trust)

		w.Reader = read(shard("native", map[string]string{"shard": "0"}))
		r, _ := create(t, w, raw, false)
		require.Empty(t, r.Patches, "a native object needs the label")
		w.Reader = read()
		r, _ = create(t, w, raw, false)
		require.Empty(t, r.Patches, "the VirtualApp was deleted")
	}
}
