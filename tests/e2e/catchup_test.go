package e2e

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// TestCatchUp moves a namespace between two running operators while owners in it are deleted.
// The operator lets an owner go if its cache has no dependents of it. None may be left behind.
func TestCatchUp(t *testing.T) {
	t.Parallel()
	const rounds, owners, dependents, ownerLabel, tier = 5, 4, 3, "keeper-owner", "e2e-catch-up"
	tenants := newTenants(t, 2)
	stays, moves := tenants[0], tenants[1]
	matching := func(value string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{tier: stays + value}}
	}
	label := func(ns, value string) { labelNamespace(t, ns, tier, stays+value) }
	label(stays, "-a")
	label(moves, "-a")

	home := namespace(t, "e2e-catch-up")
	probeRights(t, home)
	limits := listing("configmaps", "secrets")
	limits[0].Namespaces = []meshv1alpha1.NamespaceMatch{{Selector: matching("-a")}, {Selector: matching("-b")}}
	create(t, &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "root"}, Spec: meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		Prefix: "part", TargetSelector: oneOf("app", "a", "b"), OnChange: meshv1alpha1.OnChangeRelist, ResourceSelector: limits,
		Subsets: []meshv1alpha1.Subset{{Name: "b", PodLabels: map[string]string{"app": "b"}, Namespaces: limits[0].Namespaces[1:]}},
	}}})
	for _, name := range []string{"a", "b"} {
		spec := probeSpec()
		spec.Containers[0].Name, spec.Containers[0].Image = "keeper", "localhost/ctrlmesh/keeper:dev"
		create(t, &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: name}, Spec: appsv1.StatefulSetSpec{
			Replicas: new(int32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": name, meshv1alpha1.EnableProxyLabel: "true"}}, Spec: spec},
		}})
	}
	root{home}.settles(t, 2)

	count := func(what string, list client.ObjectList, len func() int, want int) {
		t.Helper()
		until(t, what, func(ctx context.Context) error {
			if err := cluster.List(ctx, list, client.InNamespace(moves), client.HasLabels{ownerLabel}); err != nil {
				return err
			}
			return orElse(len() == want, fmt.Sprintf("%d, not %d", len(), want))
		})
	}
	var kept corev1.ConfigMapList
	var secrets corev1.SecretList
	for round := range rounds {
		for i := range owners {
			create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: moves, Name: fmt.Sprintf("owner-%d-%d", round, i), Labels: map[string]string{ownerLabel: ""}}})
		}
		count("the dependents", &secrets, func() int { return len(secrets.Items) }, owners*dependents)
		label(moves, []string{"-b", "-a"}[round%2])
		require.NoError(t, cluster.DeleteAllOf(t.Context(), &corev1.ConfigMap{}, client.InNamespace(moves), client.HasLabels{ownerLabel}))
		count("the owners to go", &kept, func() int { return len(kept.Items) }, 0)
		require.NoError(t, cluster.List(t.Context(), &secrets, client.InNamespace(moves), client.HasLabels{ownerLabel}))
		require.Empty(t, secrets.Items, never+": round %d: an operator let owners go whose dependents it did not see", round)
	}
}
