package layout

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func TestExclude(t *testing.T) {
	excluded := []schema.GroupResource{{Group: "mesh.io", Resource: "*"}, {Resource: "secrets"}}
	dividing := func(group, resource string) *v1alpha1.ShardingConfigSpec {
		return &v1alpha1.ShardingConfigSpec{Root: &v1alpha1.RootConfig{
			TargetSelector:   &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}},
			ResourceSelector: []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{group}, Resources: []string{resource}}}}},
		}}
	}
	for name, c := range map[string]struct {
		group, resource string
		shared          []schema.GroupResource
	}{
		"everything":                {"*", "*", excluded},
		"one name in all groups":    {"*", "secrets", excluded[1:]},
		"all of the core group":     {"", "*", excluded[1:]},
		"all of the mesh's group":   {"mesh.io", "*", excluded[:1]},
		"another name":              {"*", "pods", nil},
		"all of another group":      {"apps", "*", nil},
		"an excluded resource only": {"", "secrets", nil}, // admission refuses it
	} {
		t.Run(name, func(t *testing.T) {
			spec := dividing(c.group, c.resource)
			before := spec.Root
			require.Equal(t, c.shared, Exclude(spec, excluded))
			require.Len(t, spec.Root.Shared, len(c.shared))
			require.Empty(t, before.Shared, "changed in place")
			for i, x := range c.shared {
				require.Equal(t, v1alpha1.SharedObjects{APIGroups: []string{x.Group}, Resources: []string{x.Resource}, Writes: v1alpha1.SharedWritesEveryone}, spec.Root.Shared[i])
			}
		})
	}

	t.Run("a root without subsets", func(t *testing.T) {
		spec := dividing("apps", "*")
		spec.Root.TargetSelector = nil
		require.Empty(t, Exclude(spec, []schema.GroupResource{{Group: "apps", Resource: "deployments"}}))
	})
}
