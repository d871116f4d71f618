package e2e

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// undividedTest has the subtests of TestUndivided, which depend on one another in this order:
// both members of a root write all objects of its tenants.
type undividedTest struct {
	tenants tenants
	root    root
	pods    []*corev1.Pod
}

// TestUndivided has two shards that both write resources in the same namespaces. Those that the
// root divides are no reason for a warning, even if isolation lets the writes pass.
func TestUndivided(t *testing.T) {
	t.Parallel()
	tenants := newTenants(t, 4)
	tenants.fill(t, "divided")
	for _, ns := range tenants {
		create(t, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "undivided"}})
	}
	r := newRoot(t, "e2e-undivided", 2, meshv1alpha1.ShardingConfigSpec{Isolation: meshv1alpha1.IsolationObserve, Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		OnChange:          meshv1alpha1.OnChangeRelist,
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
	}})
	r.settles(t, 2)
	u := &undividedTest{tenants: tenants, root: r, pods: r.pods(t, 2)}
	t.Run("divided resource", u.divided)
	t.Run("undivided resource", u.undivided)
	t.Run("added to the root", u.added)
}

// write has each member change an object of each tenant. Some writes are refused while keys
// move.
func (u *undividedTest) write(t *testing.T, object string) {
	t.Helper()
	for _, pod := range u.pods {
		for _, ns := range u.tenants {
			in(t, pod, "sh", "-c", fmt.Sprintf(`kubectl -n %s annotate --overwrite %s "written=$(date +%%s) by $(hostname)" || true`, ns, object))
		}
	}
}

// undividedCondition returns the status of the root's condition, and whether it has one.
func undividedCondition(c *meshv1alpha1.ShardingConfig) string {
	if is := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionUndivided); is != nil {
		return fmt.Sprintf("%s %s", is.Status, is.Reason)
	}
	return "none"
}

func (u *undividedTest) divided(t *testing.T) {
	until(t, "the writes to objects of other shards", func(context.Context) error {
		u.write(t, "configmap/divided")
		c := u.root.config(t)
		require.Equal(t, "False Divided", undividedCondition(c))
		return orElse(len(c.Status.Root.ForeignWrites) > 0, "there are none")
	})
	foreign := u.root.config(t).Status.Root.ForeignWrites
	require.Len(t, foreign, 1)
	require.Equal(t, "configmaps", foreign[0].Resource)
	require.Positive(t, foreign[0].Writes)
	require.NotEmpty(t, foreign[0].Shards)
}

func (u *undividedTest) undivided(t *testing.T) {
	until(t, "the warning", func(context.Context) error {
		u.write(t, "secret/undivided")
		is := undividedCondition(u.root.config(t))
		return orElse(is == "True UndividedWrites", is)
	})
	c := u.root.config(t)
	require.Len(t, c.Status.Root.Undivided, 1, "configmaps are divided")
	is := c.Status.Root.Undivided[0]
	require.Equal(t, "secrets", is.Resource)
	require.Len(t, is.Shards, 2)
	require.Positive(t, is.Common)
	require.NotEmpty(t, is.Namespaces)
	require.Subset(t, u.tenants, is.Namespaces)
	require.True(t, meta.IsStatusConditionTrue(c.Status.Conditions, meshv1alpha1.ConditionReady), "the shards go on")
	u.write(t, "secret/undivided")
}

func (u *undividedTest) added(t *testing.T) {
	u.root.change(t, 2, func(spec *meshv1alpha1.ShardingConfigSpec) {
		spec.Root.ResourceSelector = listing("configmaps", "secrets")
	})
	until(t, "the warning to end", func(context.Context) error {
		is := undividedCondition(u.root.config(t))
		return orElse(is == "False Divided", is)
	})
	until(t, "the writes of the added resource to count", func(context.Context) error {
		u.write(t, "secret/undivided")
		c := u.root.config(t)
		require.Equal(t, "False Divided", undividedCondition(c))
		for _, f := range c.Status.Root.ForeignWrites {
			if f.Resource == "secrets" {
				return nil
			}
		}
		return fmt.Errorf("they do not: %+v", c.Status.Root.ForeignWrites)
	})
}
