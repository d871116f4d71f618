package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// TestBalance shards all kinds of a group, some created later, in namespaces created later
// that are neighbours in the key space.
func TestBalance(t *testing.T) {
	t.Parallel()
	apple, pear := newKind(t, "Apple"), newKind(t, "Pear")
	r := newRoot(t, "e2e-balance", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		OnChange:          meshv1alpha1.OnChangeRelist,
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
		ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{
			{APIGroups: []string{"balance.example.com"}, Resources: []string{"*"}},
		}}},
	}})
	require.Equal(t, meshv1alpha1.RebalanceAutomatic, r.config(t).Spec.Root.Auto.Rebalance, "the default")
	r.settles(t, 2)
	pods := r.pods(t, 2)

	t.Cleanup(func() {
		assert.NoError(t, exec.Command("kubectl", "delete", "clusterrole", "ctrlmesh-stamp-apples.balance.example.com").Run())
	})
	t.Run("a missing permission is a note", r.testMayNotWeigh)
	// Of six equal namespaces, four in a shard are over the threshold: only three are at rest.
	names := neighbours(t, r.home, 6)
	start := time.Now()
	for _, ns := range names {
		for i := range 3 {
			create(t, object(apple, ns, i), object(pear, ns, i))
		}
	}
	until(t, "the namespaces to be divided", func(context.Context) error {
		root := r.config(t).Status.Root
		skew, err := strconv.ParseFloat(root.Skew, 64)
		weight := int64(0)
		for _, s := range root.Shards {
			weight += s.Weight
		}
		if err != nil || skew > 1 || weight != int64(len(names))*6 || root.Handover != "Settled" {
			return fmt.Errorf("after %s the skew is %q: %+v", time.Since(start), root.Skew, root.Shards)
		}
		return nil
	})
	t.Logf("even after %s", time.Since(start).Round(time.Second))

	t.Run("all kinds of the group are divided", func(t *testing.T) { testAllKinds(t, names, pods, apple, pear) })
}

// testMayNotWeigh runs the command that the status names.
func (r root) testMayNotWeigh(t *testing.T) {
	note := r.weighing(t, func(note string) bool {
		return strings.Contains(note, "apples.balance.example.com,pears.balance.example.com")
	})
	degraded := apimeta.FindStatusCondition(r.config(t).Status.Conditions, meshv1alpha1.ConditionDegraded)
	require.Equal(t, metav1.ConditionFalse, degraded.Status, degraded.Message)
	_, command, ok := strings.Cut(note, "pears.balance.example.com: ")
	require.True(t, ok, note)
	out, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput()
	require.NoError(t, err, "%s\n%s", command, out)
	r.weighing(t, func(note string) bool { return note == "" })
}

// neighbours creates namespaces whose names differ in the last character.
func neighbours(t *testing.T, prefix string, n int) (names tenants) {
	t.Helper()
	for i := range n {
		name := fmt.Sprintf("%s-s%d", prefix, i)
		create(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: ours}})
		t.Cleanup(func() {
			assert.NoError(t, cluster.Delete(context.Background(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
		})
		names = append(names, name)
	}
	return names
}

// testAllKinds creates another kind, and requires that each namespace has one owner for all.
func testAllKinds(t *testing.T, names tenants, pods []*corev1.Pod, apple, pear schema.GroupVersionKind) {
	quince := newKind(t, "Quince")
	for _, ns := range names {
		create(t, object(quince, ns, 0))
	}
	var owners []map[string]string
	for kind, n := range map[schema.GroupVersionKind]int{apple: 3, pear: 3, quince: 1} {
		plural := strings.ToLower(kind.Kind) + "s." + kind.Group
		owners = append(owners, names.divided(t, n, pods, func(pod *corev1.Pod) []string {
			return strings.Fields(in(t, pod, "kubectl", "get", plural, "-A", "-o",
				`jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name} {end}`))
		}))
	}
	require.Equal(t, owners[0], owners[1])
	require.Equal(t, owners[0], owners[2])
	perPod := map[string]int{}
	for _, pod := range owners[0] {
		perPod[pod]++
	}
	for _, pod := range pods[:2] {
		require.Equal(t, 3, perPod[pod.Name], "%v", perPod)
	}

	foreign := names[slices.IndexFunc(names, func(ns string) bool { return owners[0][ns] == pods[1].Name })]
	_, stderr, err := cluster.Exec(t.Context(), pods[0].Namespace, pods[0].Name, "probe", "kubectl", "-n", foreign, "delete", "quince", "o-0")
	require.Error(t, err)
	require.Contains(t, stderr, " owns it")
}

// weighing waits until the status reports on counting, and returns that message.
func (r root) weighing(t *testing.T, holds func(note string) bool) (note string) {
	t.Helper()
	until(t, "the note on weighing", func(context.Context) error {
		if root := r.config(t).Status.Root; root != nil {
			note = root.Weighing
		}
		if !holds(note) {
			return fmt.Errorf("it is %q", note)
		}
		return nil
	})
	return note
}

// newKind creates a namespaced kind of the group that TestBalance shards.
func newKind(t *testing.T, kind string) schema.GroupVersionKind {
	t.Helper()
	gvk := schema.GroupVersionKind{Group: "balance.example.com", Version: "v1", Kind: kind}
	singular := strings.ToLower(kind)
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: singular + "s." + gvk.Group},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: gvk.Group,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Kind: kind, Plural: singular + "s", Singular: singular},
			Scope: apiextensionsv1.NamespaceScoped,
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: gvk.Version, Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object"}},
			}},
		},
	}
	create(t, crd)
	t.Cleanup(func() { assert.NoError(t, cluster.Delete(context.Background(), crd)) })
	until(t, "kind "+kind+" to be served", func(ctx context.Context) error {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(gvk)
		return cluster.List(ctx, list, client.Limit(1))
	})
	return gvk
}

func object(kind schema.GroupVersionKind, namespace string, i int) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	o.SetNamespace(namespace)
	o.SetName(fmt.Sprintf("o-%d", i))
	return o
}
