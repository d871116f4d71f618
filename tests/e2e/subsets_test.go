package e2e

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// TestSubsets runs two workloads under one root. Namespaces are relabelled from one to the
// other: the informers of both follow, and the pods keep running. A limit excludes a namespace
// from both.
func TestSubsets(t *testing.T) {
	t.Parallel()
	tenants := newTenants(t, 4)
	tenants.fill(t, "cm")
	excluded := tenants[3]
	const version, tier = "next", "e2e-subsets"
	matching := func(value string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{tier: value}}
	}
	label := func(ns, value string) { labelNamespace(t, ns, tier, value) }
	mark := tenants[0]
	for _, ns := range tenants[:3] {
		label(ns, mark+"-old")
	}
	label(tenants[0], mark)
	limits := listing("configmaps")
	limits[0].Namespaces = []meshv1alpha1.NamespaceMatch{{Selector: matching(mark)}, {Selector: matching(mark + "-old")}}
	r := newRoot(t, "e2e-subsets", 1, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetSelector:   oneOf("app", workload, version),
		OnChange:         meshv1alpha1.OnChangeRelist,
		ResourceSelector: limits,
		Subsets: []meshv1alpha1.Subset{{Name: "next", PodLabels: map[string]string{"app": version},
			Namespaces: []meshv1alpha1.NamespaceMatch{{Selector: matching(mark)}}}},
	}})
	r.probes(t, version, 1, false)
	r.settles(t, 2)
	pods := []*corev1.Pod{ready(t, r.home, version+"-0"), ready(t, r.home, workload+"-0")}
	stores := []cache.Store{storeIn(t, pods[0], tenants.selector()), storeIn(t, pods[1], tenants.selector())}
	owned := func(namespaces ...[]string) {
		t.Helper()
		for i, store := range stores {
			until(t, "the informer of "+pods[i].Name, func(context.Context) error {
				var want []string
				for _, ns := range namespaces[i] {
					want = append(want, ns+"/cm")
				}
				got := store.ListKeys()
				slices.Sort(got)
				slices.Sort(want)
				if !slices.Equal(got, want) {
					return fmt.Errorf("it contains %v, not %v; root: %+v", got, want, r.config(t).Status.Root)
				}
				return nil
			})
		}
	}
	owned(tenants[:1], tenants[1:3])
	label(tenants[1], mark)
	owned(tenants[:2], tenants[2:3])
	label(tenants[0], mark+"-old")
	owned(tenants[1:2], []string{tenants[0], tenants[2]})

	for i, pod := range pods {
		clientset, err := kubernetes.NewForConfig(from(t, pod))
		require.NoError(t, err)
		write := func(ns string) error {
			_, err := clientset.CoreV1().ConfigMaps(ns).Patch(t.Context(), "cm", types.MergePatchType, []byte(`{"data":{"by":"`+pod.Name+`"}}`), metav1.PatchOptions{})
			return err
		}
		until(t, "the caches of "+pod.Name, func(context.Context) error { return write([]string{tenants[1], tenants[0]}[i]) })
		err = write([]string{tenants[0], tenants[1]}[i])
		require.True(t, apierrors.IsForbidden(err), "%v", err)
		require.ErrorContains(t, err, []string{"shard part-default owns it", "shard part-next owns it"}[i])
		require.True(t, apierrors.IsForbidden(write(excluded)), "no shard may write there")
		require.Equal(t, pod.UID, ready(t, r.home, pod.Name).UID, "it was restarted")
	}
}
