package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/grant"
)

// isolation is a root whose canary owns one namespace. The other shard owns all others.
type isolation struct {
	root
	own, foreign string
	pod          *corev1.Pod // the canary
	client       kubernetes.Interface
}

func newIsolation(t *testing.T) isolation {
	t.Helper()
	i := isolation{own: namespace(t, "e2e-own"), foreign: namespace(t, "e2e-foreign")}
	i.root = newRoot(t, "e2e-isolation", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		OnChange:          meshv1alpha1.OnChangeRelist,
		Canary:            &meshv1alpha1.CanaryConfig{Replicas: new(int32(1)), InNamespaces: []string{i.own}},
	}})
	for _, ns := range []string{i.own, i.foreign, i.home} {
		for _, name := range []string{"one", "two"} {
			create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"isolation": i.home}}})
		}
	}
	i.settles(t, 2)
	i.pod = i.pods(t, 2)[0]
	var err error
	i.client, err = kubernetes.NewForConfig(from(t, i.pod))
	require.NoError(t, err)
	return i
}

// listed returns the ConfigMaps that the canary lists, as namespace/name.
func (i isolation) listed(t *testing.T, namespace string, o metav1.ListOptions) (names []string) {
	t.Helper()
	list, err := i.client.CoreV1().ConfigMaps(namespace).List(t.Context(), o)
	require.NoError(t, err)
	for _, cm := range list.Items {
		names = append(names, cm.Namespace+"/"+cm.Name)
	}
	slices.Sort(names)
	return names
}

func (i isolation) label() metav1.ListOptions {
	return metav1.ListOptions{LabelSelector: "isolation=" + i.home}
}

func (i isolation) write(ctx context.Context, namespace, name string) error {
	_, err := i.client.CoreV1().ConfigMaps(namespace).Patch(ctx, name, types.MergePatchType, []byte(`{"data":{"by":"canary"}}`), metav1.PatchOptions{})
	return err
}

// objectNames returns the ConfigMaps of a namespace, as namespace/name.
func objectNames(namespace string, of ...string) (out []string) {
	for _, name := range of {
		out = append(out, namespace+"/"+name)
	}
	return out
}

// A member reads objects of another shard and cannot write them.
func TestMemberCannotWriteForeignObjects(t *testing.T) {
	i := newIsolation(t)
	t.Run("singletons are read", i.testSingletons)
	t.Run("a refusal names the owner", func(t *testing.T) {
		err := i.write(t.Context(), i.foreign, "one")
		require.True(t, apierrors.IsForbidden(err), "%v", err)
		require.ErrorContains(t, err, "shard part-1-normal owns it")
	})
	t.Run("the operator's namespace is read", func(t *testing.T) {
		require.Equal(t, objectNames(i.home, "one", "two"), i.listed(t, i.home, i.label()))
		require.True(t, apierrors.IsForbidden(i.write(t.Context(), i.home, "one")))
	})
	t.Run("shared objects are read", i.testShared)
	t.Run("reads of the own shard alone", i.testReadsOwn)
	t.Run("a dry run", i.testDryRun)
}

// testSingletons reads an object that every apiserver has, and that a real operator
// cannot start without.
func (i isolation) testSingletons(t *testing.T) {
	const singleton = "extension-apiserver-authentication"
	maps := i.client.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	_, err := maps.Get(t.Context(), singleton, metav1.GetOptions{})
	require.NoError(t, err)
	o := metav1.ListOptions{FieldSelector: "metadata.name=" + singleton}
	require.Equal(t, objectNames(metav1.NamespaceSystem, singleton), i.listed(t, metav1.NamespaceSystem, o))
	w, err := maps.Watch(t.Context(), o)
	require.NoError(t, err)
	defer w.Stop()
	select {
	case event := <-w.ResultChan():
		cm, ok := event.Object.(*corev1.ConfigMap)
		require.True(t, ok, "%+v", event)
		require.Equal(t, singleton, cm.Name)
	case <-time.After(patience):
		t.Fatal("the watch is quiet")
	}
	require.Empty(t, i.listed(t, metav1.NamespaceSystem, metav1.ListOptions{}), "a list of several is narrowed")
}

func (i isolation) testShared(t *testing.T) {
	share := func(o ...meshv1alpha1.SharedObjects) {
		i.change(t, 2, func(s *meshv1alpha1.ShardingConfigSpec) { s.Root.Shared = o })
	}
	defer share()
	one := meshv1alpha1.SharedObjects{APIGroups: []string{""}, Resources: []string{"configmaps"}, Namespaces: []string{i.foreign}, Names: []string{"one"}}
	share(one)
	require.Equal(t, objectNames(i.foreign, "one"), i.listed(t, i.foreign, metav1.ListOptions{}))
	want := slices.Concat(objectNames(i.own, "one", "two"), objectNames(i.foreign, "one"), objectNames(i.home, "one", "two"))
	slices.Sort(want)
	require.Equal(t, want, i.listed(t, "", i.label()))
	require.True(t, apierrors.IsForbidden(i.write(t.Context(), i.foreign, "one")), "its owner writes it")

	one.Names, one.Writes = nil, meshv1alpha1.SharedWritesEveryone
	share(one)
	require.Equal(t, objectNames(i.foreign, "one", "two"), i.listed(t, i.foreign, i.label()))
	require.NoError(t, i.write(t.Context(), i.foreign, "two"))
}

func (i isolation) testReadsOwn(t *testing.T) {
	reads := func(r meshv1alpha1.Reads) {
		i.change(t, 2, func(s *meshv1alpha1.ShardingConfigSpec) { s.Reads = r })
	}
	reads(meshv1alpha1.ReadsOwn)
	defer reads(meshv1alpha1.ReadsAll)
	_, err := i.client.CoreV1().ConfigMaps(i.foreign).Get(t.Context(), "one", metav1.GetOptions{})
	require.True(t, apierrors.IsForbidden(err), "%v", err)
	require.Empty(t, i.listed(t, i.foreign, metav1.ListOptions{FieldSelector: "metadata.name=one"}))
	_, err = i.client.CoreV1().ConfigMaps(i.home).Get(t.Context(), "one", metav1.GetOptions{})
	require.NoError(t, err, "the operator's namespace is shared")
}

// testDryRun turns enforcement off and on again.
func (i isolation) testDryRun(t *testing.T) {
	dryRun := func(on bool) {
		c := i.config(t)
		before := c.DeepCopy()
		c.Spec.DryRun = on
		require.NoError(t, cluster.Patch(t.Context(), c, client.MergeFrom(before)))
	}
	dryRun(true)
	until(t, "writes to pass", func(ctx context.Context) error { return i.write(ctx, i.foreign, "one") })
	require.NotEmpty(t, i.listed(t, metav1.NamespaceSystem, metav1.ListOptions{}))
	for _, action := range []string{"refused", "narrowed"} {
		counted(t, i.pod.Spec.NodeName, "ctrlmesh_dry_run_requests_total", map[string]string{"namespace": i.home, "action": action}, 1)
	}
	dryRun(false)
	i.settles(t, 2)
	require.True(t, apierrors.IsForbidden(i.write(t.Context(), i.foreign, "one")))
	require.NoError(t, i.write(t.Context(), i.own, "one"))
}

// TestLockInAnotherNamespace has an operator whose Lease is in kube-system and named in its
// Role, which is common: each shard has a leader.
func TestLockInAnotherNamespace(t *testing.T) {
	t.Parallel()
	lock := types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: fmt.Sprintf("tally-%d", time.Now().UnixNano())}
	t.Cleanup(func() {
		for _, name := range []string{lock.Name, lock.Name + "---tally-1-normal", lock.Name + "---tally-2-normal"} {
			lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: lock.Namespace, Name: name}}
			if err := client.IgnoreNotFound(cluster.Delete(context.Background(), lease)); err != nil {
				t.Errorf("deleting lease %s: %v", name, err)
			}
		}
	})
	op := newRunning(t, "StatefulSet", lock)
	op.adopt(t, meshv1alpha1.LockReference{Namespace: lock.Namespace, Name: lock.Name})
	op.label(t, true, 0)
	op.rolledOut(t)
	op.sharded(t)
	for _, shard := range []string{"tally-1-normal", "tally-2-normal"} {
		until(t, "a leader of "+shard, func(ctx context.Context) error {
			lease := &coordinationv1.Lease{}
			err := cluster.Get(ctx, client.ObjectKey{Namespace: lock.Namespace, Name: lock.Name + "---" + shard}, lease)
			return errors.Join(err, orElse(holder(lease) != "", "it has none"))
		})
	}
	access := &rbacv1.Role{}
	name := client.ObjectKey{Namespace: lock.Namespace, Name: grant.Prefix + op.home + ".tally"}
	require.NoError(t, cluster.Get(t.Context(), name, access), "the operator's own Role names its lock alone")
	require.Equal(t, []string{lock.Name + "---tally-1-normal", lock.Name + "---tally-2-normal"}, access.Rules[0].ResourceNames)
	op.removed(t)
	until(t, "its Role to go", func(ctx context.Context) error {
		err := cluster.Get(ctx, name, access)
		return orElse(apierrors.IsNotFound(err), fmt.Sprintf("it is there: %v", err))
	})
}
