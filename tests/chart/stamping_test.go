package chart

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
)

// stamps lists resources as the manager does, and waits until the apiserver knows them.
func (s *apiserver) stamps(t *testing.T, resources string) {
	t.Helper()
	configurations := s.AdmissionregistrationV1().MutatingWebhookConfigurations()
	c, err := configurations.Get(t.Context(), label.Configuration, metav1.GetOptions{})
	require.NoError(t, err)
	c.Annotations = map[string]string{meshv1alpha1.StampedAnnotation: resources}
	_, err = configurations.Update(t.Context(), c, metav1.UpdateOptions{})
	require.NoError(t, err)
}

// namespaceOf returns a Namespace with the labels that the manager writes, or without them.
func namespaceOf(name string, labelled bool) *corev1.Namespace {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelMetadataName: name}}}
	if labelled {
		ns.Labels[meshv1alpha1.ShardingHashLabel] = label.Of(name)[meshv1alpha1.ShardingHashLabel]
	}
	return ns
}

func configMaps(namespace string, labels map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "x", Labels: labels}, Data: map[string]string{"a": "b"}}
}

var configMapResource = corev1.SchemeGroupVersion.WithResource("configmaps")

func TestPolicyStampsListedResources(t *testing.T) {
	s := newAPIServer(t, since136, namespaceOf("ns", true), namespaceOf("late", false), namespaceOf(meshSpace, true))
	stamped := func(object runtime.Object, resource schema.GroupVersionResource) map[string]string {
		out, err := s.admit(t, request{by: "someone", resource: resource, object: object})
		require.NoError(t, err)
		return out.GetLabels()
	}
	require.Empty(t, stamped(configMaps("ns", nil), configMapResource), "nothing is listed")

	s.stamps(t, "configmaps,deployments.apps,foos.example.com,pods,shardingconfigs.ctrlmesh.kusionstack.io")
	require.Eventually(t, func() bool { return len(stamped(configMaps("ns", nil), configMapResource)) > 0 }, 10*time.Second, 10*time.Millisecond)
	foo := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Foo", "metadata": map[string]any{"namespace": "ns", "name": "x"}}}
	config := &unstructured.Unstructured{Object: map[string]any{"apiVersion": meshv1alpha1.GroupVersion.String(), "kind": "ShardingConfig", "metadata": map[string]any{"namespace": "ns", "name": "x"}}}
	for name, tt := range map[string]struct {
		object   runtime.Object
		resource schema.GroupVersionResource
		want     map[string]string
	}{
		"no labels":          {configMaps("ns", nil), configMapResource, label.Of("ns")},
		"wrong labels":       {configMaps("ns", map[string]string{meshv1alpha1.NamespaceLabel: "other", meshv1alpha1.ShardingHashLabel: "99"}), configMapResource, label.Of("ns")},
		"a custom resource":  {foo, foos, label.Of("ns")},
		"a workload":         {&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "x"}}, appsv1.SchemeGroupVersion.WithResource("deployments"), label.Of("ns")},
		"a pod":              {&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "x"}}, corev1.SchemeGroupVersion.WithResource("pods"), label.Of("ns")},
		"not listed":         {&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "x"}}, corev1.SchemeGroupVersion.WithResource("secrets"), nil},
		"unlabelled":         {configMaps("late", nil), configMapResource, nil},
		"the mesh's":         {configMaps(meshSpace, nil), configMapResource, nil},
		"a kind of the mesh": {config, meshv1alpha1.GroupVersion.WithResource("shardingconfigs"), nil},
		"of the same resource": {&unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Pod", "metadata": map[string]any{"namespace": "ns", "name": "x"}}},
			foos.GroupVersion().WithResource("pods"), nil},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tt.want, stamped(tt.object, tt.resource)) })
	}

	t.Run("only its labels change", func(t *testing.T) {
		before := configMaps("ns", map[string]string{"app": "x"})
		out, err := s.admit(t, request{by: "someone", resource: configMapResource, object: before})
		require.NoError(t, err)
		want := label.Of("ns")
		want["app"] = "x"
		require.Equal(t, want, out.GetLabels())
		out.SetLabels(before.Labels)
		require.Equal(t, untyped(t, before).Object, out.Object)
	})
	t.Run("at an update", func(t *testing.T) {
		out, err := s.admit(t, request{by: "someone", resource: configMapResource, old: configMaps("ns", label.Of("ns")), object: configMaps("ns", nil)})
		require.NoError(t, err)
		require.Equal(t, label.Of("ns"), out.GetLabels())
	})
	t.Run("once the namespace is labelled", func(t *testing.T) {
		_, err := s.CoreV1().Namespaces().Update(t.Context(), namespaceOf("late", true), metav1.UpdateOptions{})
		require.NoError(t, err)
		require.Eventually(t, func() bool { return len(stamped(configMaps("late", nil), configMapResource)) > 0 }, 10*time.Second, 10*time.Millisecond)
		require.Equal(t, label.Of("late"), stamped(configMaps("late", nil), configMapResource))
	})
}
