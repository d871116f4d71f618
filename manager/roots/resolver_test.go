package roots

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// costly is one of the costliest patterns that are accepted: a millisecond for a long name.
const costly = "(?:.?){598}_"

func matching(name, pattern string) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
		Spec: v1alpha1.ShardingConfigSpec{Root: &v1alpha1.RootConfig{
			Prefix: name, TargetSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			Subsets: []v1alpha1.Subset{{Name: "a", PodLabels: map[string]string{"a": "b"}, Namespaces: []v1alpha1.NamespaceMatch{{Pattern: pattern}}}},
		}},
	}
}

func TestCostlyRootsDoNotDelayOthers(t *testing.T) {
	namespaces := map[string]labels.Set{}
	for i := range 200 {
		namespaces[fmt.Sprintf("tenant-%04d-%s", i, "with-a-name-that-is-as-long-as-names-can-be-at-all")] = nil
	}
	configs := func() (all []*v1alpha1.ShardingConfig) {
		for i := range 5 {
			all = append(all, matching(fmt.Sprint("a-costly-", i), costly))
		}
		return append(all, matching("plain", "^tenant-0001"))
	}
	var r Resolver
	for rounds := 1; ; rounds++ {
		all := configs()
		out := r.Resolve(all, namespaces, 50*time.Millisecond)
		require.Len(t, out.Took, len(all))
		if _, waits := out.Errors["plain"]; !waits {
			require.True(t, out.Pending, "round %d: the others need a second", rounds)
			require.Len(t, all[5].Spec.Root.Subsets[0].Namespaces, 2)
			break
		}
		require.Less(t, rounds, 100)
	}
	for r.Resolve(configs(), namespaces, 50*time.Millisecond).Pending {
		continue
	}
	require.Empty(t, r.Resolve(configs(), namespaces, 0).Errors, "all is known by now")
}
