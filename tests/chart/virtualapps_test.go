package chart

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

func TestPolicyPutsPodsOfVirtualAppsOnTheMesh(t *testing.T) {
	requirement := func(key string, operator metav1.LabelSelectorOperator, values ...string) metav1.LabelSelectorRequirement {
		return metav1.LabelSelectorRequirement{Key: key, Operator: operator, Values: values}
	}
	selectors := []metav1.LabelSelector{
		{},
		{MatchLabels: map[string]string{"app": "x"}},
		{MatchLabels: map[string]string{"app": "x", "tier": ""}},
		{MatchExpressions: []metav1.LabelSelectorRequirement{requirement("app", metav1.LabelSelectorOpIn, "x", "y")}},
		{MatchExpressions: []metav1.LabelSelectorRequirement{requirement("app", metav1.LabelSelectorOpNotIn, "x", "y")}},
		{MatchExpressions: []metav1.LabelSelectorRequirement{requirement("tier", metav1.LabelSelectorOpExists)}},
		{MatchExpressions: []metav1.LabelSelectorRequirement{requirement("tier", metav1.LabelSelectorOpDoesNotExist)}},
		{MatchLabels: map[string]string{"app": "x"}, MatchExpressions: []metav1.LabelSelectorRequirement{requirement("tier", metav1.LabelSelectorOpIn, "a")}},
	}
	pods := []map[string]string{nil, {"app": "x"}, {"app": "y"}, {"app": "z", "tier": "a"}, {"app": "x", "tier": "a"}, {"app": "x", "tier": ""}, {meshv1alpha1.EnableProxyLabel: "false", "app": "x"}}

	var objects []runtime.Object
	add := func(namespace string, selector *metav1.LabelSelector, labelled bool) {
		ns := namespaceOf(namespace, false)
		if labelled {
			ns.Labels[meshv1alpha1.VirtualAppsLabel] = "true"
		}
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(selector)
		require.NoError(t, err)
		app := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"selector": content}}}
		app.SetGroupVersionKind(origin.VirtualApp)
		app.SetNamespace(namespace)
		app.SetName("app")
		objects = append(objects, ns, app)
	}
	for i := range selectors {
		add(fmt.Sprint("ns-", i), &selectors[i], true)
	}
	for _, namespace := range []string{meshSpace, "kube-system"} {
		add(namespace, &selectors[1], true)
	}
	add("unlabelled", &selectors[1], false)
	s := newAPIServer(t, since136, objects...)
	onMesh := func(namespace string, of map[string]string) bool {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p", Labels: of}}
		out, err := s.admit(t, request{by: "someone", resource: corev1.SchemeGroupVersion.WithResource("pods"), object: pod})
		require.NoError(t, err)
		for k, v := range of {
			require.True(t, k == meshv1alpha1.EnableProxyLabel || out.GetLabels()[k] == v, "%v", out.GetLabels())
		}
		return out.GetLabels()[meshv1alpha1.EnableProxyLabel] == "true"
	}
	for i := range selectors {
		selector, err := metav1.LabelSelectorAsSelector(&selectors[i])
		require.NoError(t, err)
		for _, of := range pods {
			want := !selector.Empty() && selector.Matches(labels.Set(of))
			require.Equal(t, want, onMesh(fmt.Sprint("ns-", i), of), "%v selects %v", selector, of)
		}
	}
	for _, namespace := range []string{meshSpace, "kube-system", "unlabelled"} {
		require.False(t, onMesh(namespace, pods[1]), namespace)
	}
}
