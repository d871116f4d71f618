package compile_test

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// Each labelled pod gets one policy, by the ShardingConfig that selects it. A pod that two select
// is refused, and requests of a pod that none selects pass unchanged.
func ExampleCompile() {
	shard := func(name string) *v1alpha1.ShardingConfig {
		return &v1alpha1.ShardingConfig{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
			Spec: v1alpha1.ShardingConfigSpec{
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{name: "yes"}},
				Limits: []v1alpha1.ObjectLimiter{{
					RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}},
					Selector:        &metav1.LabelSelector{MatchLabels: map[string]string{"team": name}},
				}},
			},
		}
	}
	pod := func(name string, shards ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"}}}
		for _, shard := range shards {
			p.Labels[shard] = "yes"
		}
		return p
	}
	result := compile.Compile(
		[]*v1alpha1.ShardingConfig{shard("red"), shard("blue")},
		[]*corev1.Pod{pod("one", "red"), pod("both", "red", "blue"), pod("none")},
		nil, compile.Rules{})
	for _, name := range []types.UID{"one", "both", "none"} {
		policy := result.Policies[name]
		fmt.Printf("pod %s: shard %q, refused: %t\n", name, policy.GetSharding().GetShard(), policy.GetRefuse() != "")
		for _, limit := range policy.GetSharding().GetLimits() {
			fmt.Println("  only", limit.GetResources()[0].GetResources(), "with", limit.GetSelector())
		}
	}
	// Output:
	// pod one: shard "red", refused: false
	//   only [configmaps] with team=red
	// pod both: shard "", refused: true
	// pod none: shard "", refused: false
}
