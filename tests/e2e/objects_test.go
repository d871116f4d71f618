package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// TestObjects divides what is in no namespace, ClusterRoles, by their uids.
func TestObjects(t *testing.T) {
	t.Parallel()
	r := newRoot(t, "e2e-objects", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		Key:               meshv1alpha1.KeyObject,
		OnChange:          meshv1alpha1.OnChangeRelist,
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
		ResourceSelector:  listing("clusterroles.rbac.authorization.k8s.io"),
	}})
	o := &objectTest{root: r}
	t.Cleanup(func() {
		assert.NoError(t, cluster.DeleteAllOf(context.Background(), o.role(""), client.MatchingLabels(o.role("").Labels)))
	})
	const n = 16 // a shard has none of them in one of 32768 runs
	for i := range n {
		create(t, o.role(fmt.Sprintf("%s-%d", r.home, i)))
	}
	r.settles(t, 2)
	o.pods = r.pods(t, 2)
	before := o.owners(t)
	require.Len(t, before, n)
	for _, method := range []meshv1alpha1.Method{meshv1alpha1.MethodFilter, meshv1alpha1.MethodServerSide} {
		r.change(t, 2, func(s *meshv1alpha1.ShardingConfigSpec) { s.Root.Method = method })
		require.Equal(t, before, o.owners(t), method)
	}

	var owned []int
	for i := range o.pods {
		owned = append(owned, o.writes(t, i, before))
	}
	require.NotContains(t, owned, 0, "each has some")
	after := o.owners(t)
	require.Len(t, after, n+2)
	for name, i := range after {
		c, err := kubernetes.NewForConfig(from(t, o.pods[i]))
		require.NoError(t, err)
		if strings.Contains(name, "-by-") {
			require.NoError(t, c.RbacV1().ClusterRoles().Delete(t.Context(), name, metav1.DeleteOptions{}))
		}
	}
	require.Equal(t, before, o.owners(t))
}

// objectTest is a root of two members that shards ClusterRoles.
type objectTest struct {
	root root
	pods []*corev1.Pod
}

// selector selects the test's ClusterRoles.
func (o *objectTest) selector() string { return "objects=" + o.root.home }

// role returns a ClusterRole that the selector selects.
func (o *objectTest) role(name string) *rbacv1.ClusterRole {
	return &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"objects": o.root.home}}}
}

// owners returns the index of the pod that lists each ClusterRole.
func (o *objectTest) owners(t *testing.T) map[string]int {
	t.Helper()
	out := map[string]int{}
	for i, pod := range o.pods {
		for name := range strings.FieldsSeq(in(t, pod, "kubectl", "get", "clusterroles", "-l", o.selector(), "-o", "jsonpath={.items[*].metadata.name}")) {
			assert.NotContains(t, out, name, "it has another owner")
			out[name] = i
		}
	}
	return out
}

// writes has pod i write all objects, which succeeds for those it owns alone, and create
// one. It returns how many it owns.
func (o *objectTest) writes(t *testing.T, i int, owners map[string]int) (owned int) {
	t.Helper()
	c, err := kubernetes.NewForConfig(from(t, o.pods[i]))
	require.NoError(t, err)
	roles := c.RbacV1().ClusterRoles()
	for name, owner := range owners {
		patch := func() error {
			_, err := roles.Patch(t.Context(), name, types.MergePatchType, []byte(`{"metadata":{"annotations":{"by":"e2e"}}}`), metav1.PatchOptions{})
			return err
		}
		_, err := roles.Get(t.Context(), name, metav1.GetOptions{})
		require.NoError(t, err)
		if owner == i {
			owned++
			require.NoError(t, patch())
			continue
		}
		for verb, err := range map[string]error{
			"patch": patch(), "delete": roles.Delete(t.Context(), name, metav1.DeleteOptions{}),
		} {
			require.True(t, apierrors.IsForbidden(err), "%s: %v", verb, err)
			require.ErrorContains(t, err, fmt.Sprintf("shard part-%d-normal owns it", 1+owner), verb)
		}
	}
	err = roles.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: o.selector()})
	require.True(t, apierrors.IsForbidden(err), "%v", err)
	_, err = roles.Create(t.Context(), o.role(fmt.Sprintf("%s-by-%d", o.root.home, i)), metav1.CreateOptions{})
	require.NoError(t, err, "its uid will decide its owner")
	return owned
}
