package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// TestScopes is about two members of a root's shards, whose objects bear no label of
// ctrlmesh's: whatever client asks, each namespace is one member's, and all are seen.
func TestScopes(t *testing.T) {
	const perTenant = 3
	home := namespace(t, "e2e-scope")
	probeRights(t, home)
	var tenants []string
	for range 8 {
		tenants = append(tenants, namespace(t, "e2e-scope-tenant"))
	}
	fill := func(name string) {
		for _, ns := range tenants {
			create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"scope": home}}})
		}
	}
	for i := range perTenant {
		fill(fmt.Sprintf("cm-%d", i))
	}
	create(t, &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "root"},
		Spec: meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
			Prefix:            "part",
			TargetStatefulSet: workload,
			Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
			ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{
				{APIGroups: []string{""}, Resources: []string{"configmaps"}},
			}}},
		}},
	}, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: workload},
		Spec: appsv1.StatefulSetSpec{
			Replicas: new(int32(2)), PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": workload}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": workload, meshv1alpha1.EnableProxyLabel: "true"}},
				Spec:       probeSpec(),
			},
		},
	})
	until(t, "the root's shards", func(ctx context.Context) error {
		var root meshv1alpha1.ShardingConfig
		if err := cluster.Get(ctx, client.ObjectKey{Namespace: home, Name: "root"}, &root); err != nil {
			return err
		}
		if s := root.Status; s.ReadyMembers != 2 || s.Root == nil || s.Root.Handover != "Settled" {
			return fmt.Errorf("they are not settled: %+v", s)
		}
		return nil
	})
	pods := []*corev1.Pod{ready(t, home, workload+"-0"), ready(t, home, workload+"-1")}

	// divided asks both members, and returns what each has. Between them they have
	// n objects of each tenant, and none is in both.
	divided := func(t *testing.T, n int, ask func(*corev1.Pod) []string) {
		t.Helper()
		seen := map[string]int{}
		owner := map[string]string{}
		for _, pod := range pods {
			for _, key := range ask(pod) {
				ns, _, _ := strings.Cut(key, "/")
				if !slices.Contains(tenants, ns) {
					continue
				}
				seen[ns]++
				if owner[ns] == "" {
					owner[ns] = pod.Name
				}
				assert.Equal(t, owner[ns], pod.Name, "of %s", key)
			}
		}
		for _, ns := range tenants {
			assert.Equal(t, n, seen[ns], "objects of %s", ns)
		}
	}
	kubectl := func(command string) func(*corev1.Pod) []string {
		return func(pod *corev1.Pod) []string {
			return strings.Fields(in(t, pod, "sh", "-c", shellPrelude+command))
		}
	}
	selected := "-l scope=" + home

	t.Run("kubectl", func(t *testing.T) {
		const columns = " --no-headers | awk '{print $1\"/\"$2}'"
		divided(t, perTenant, kubectl("kubectl get configmaps -A "+selected+columns))
		divided(t, perTenant, kubectl("kubectl get configmaps -A --chunk-size=5 "+selected+columns))
		divided(t, perTenant, kubectl("kubectl get configmaps -A -o yaml "+selected+` >list; awk '/^    name:/ {name=$2} /^    namespace:/ {print $2"/"name}' list`))
	})
	t.Run("informers", func(t *testing.T) {
		for _, accept := range []string{typeJSON, typeProtobuf} {
			for _, watchList := range []bool{true, false} {
				divided(t, perTenant, func(pod *corev1.Pod) []string {
					var held struct{ Objects map[string]string }
					out := in(t, pod, "probe", "informer", "-accept", accept, fmt.Sprintf("-watchlist=%t", watchList), "-selector", "scope="+home, "configmaps")
					require.NoError(t, json.Unmarshal([]byte(out), &held))
					return slices.Collect(maps.Keys(held.Objects))
				})
			}
		}
	})
	t.Run("each has something", func(t *testing.T) {
		for _, pod := range pods {
			require.NotEmpty(t, kubectl("kubectl get configmaps -A -o name")(pod))
			require.NotEmpty(t, kubectl("kubectl get nodes -o name")(pod))
		}
	})
	// A watch has what a list has, sooner or later.
	t.Run("watch", func(t *testing.T) {
		fill("late")
		divided(t, perTenant+1, kubectl(fmt.Sprintf(`
kubectl get configmaps -A -w --no-headers %s >seen &
await sh -c 'n=$(wc -l <seen); m=$(kubectl get configmaps -A --no-headers %s | wc -l); [ $n -ge $m ]'
awk '{print $1"/"$2}' seen`, selected, selected)))
	})
}
