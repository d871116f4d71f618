package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridgev1alpha1 "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruisev1alpha1 "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// seed reads a manifest as its author wrote it.
func seed(t *testing.T, name string) *unstructured.Unstructured {
	t.Helper()
	text, err := os.ReadFile("../../manager/dialect/testdata/" + name + ".in.yaml")
	require.NoError(t, err)
	o := &unstructured.Unstructured{}
	require.NoError(t, yaml.Unmarshal(text, &o.Object))
	return o
}

// exactNamespace creates a namespace of a fixed name, and deletes it when the test ends. It
// deletes one that another test has left.
func exactNamespace(t *testing.T, name string) {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: ours}}
	until(t, "namespace "+name, func(ctx context.Context) error {
		ns.ResourceVersion = ""
		err := cluster.Create(ctx, ns)
		if apierrors.IsAlreadyExists(err) {
			left := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
			return errors.Join(err, client.IgnoreNotFound(cluster.Delete(ctx, left)))
		}
		return err
	})
	t.Cleanup(func() { // and waits: other tests apply objects to a namespace of this name
		ctx := context.Background()
		require.NoError(t, client.IgnoreNotFound(cluster.Delete(ctx, ns)))
		require.NoError(t, kube.UntilWithin(ctx, patience, "namespace "+name+" to be removed", func(ctx context.Context) error {
			err := cluster.Get(ctx, client.ObjectKeyFromObject(ns), ns)
			if err == nil {
				return errors.New("it still exists")
			}
			return client.IgnoreNotFound(err)
		}))
	})
}

// gone deletes an object, and waits until its finalizers are removed.
func gone(t *testing.T, o client.Object) {
	t.Helper()
	require.NoError(t, client.IgnoreNotFound(cluster.Delete(t.Context(), o)))
	until(t, "the deletion of "+o.GetName(), func(ctx context.Context) error {
		err := cluster.Get(ctx, client.ObjectKeyFromObject(o), o)
		if err == nil {
			return errors.New("it still exists")
		}
		return client.IgnoreNotFound(err)
	})
}

// TestSeedsOfShardingConfigs applies the manifests word for word. They have one name and one
// lock, so that they follow each other.
func TestSeedsOfShardingConfigs(t *testing.T) {
	t.Parallel()
	t.Run("ctrlmesh-shardingconfig", func(t *testing.T) {
		newSeedShard(t).acts(t, seed(t, "ctrlmesh-shardingconfig"), meshv1alpha1.EnableProxyLabel)
	})
	t.Run("kridge-shardingconfig", func(t *testing.T) {
		shard, config := newSeedShard(t), seed(t, "kridge-shardingconfig")
		native := shard.acts(t, config, kridgev1alpha1.EnableProxyLabel)
		require.Equal(t, meshv1alpha1.GroupVersion.WithKind("ShardingConfig"), native.GroupVersionKind())
		shard.acts(t, native, meshv1alpha1.EnableProxyLabel)
	})
}

// seedShard is what the shard of the seeds works on.
type seedShard struct{ home string }

func newSeedShard(t *testing.T) seedShard {
	t.Helper()
	s := seedShard{"operator-demo"}
	for _, name := range []string{s.home, "ns-a", "ns-b", "ns-c"} {
		exactNamespace(t, name)
	}
	for _, ns := range []string{"ns-a", "ns-b", "ns-c"} {
		create(t, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "web", Labels: map[string]string{"app": "foo"}},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
		})
	}
	probeRights(t, s.home)
	return s
}

// acts applies a configuration to a new pod with a label, and removes both. It returns the native
// form of the configuration as the plugin prints it; nil if it is native.
func (s seedShard) acts(t *testing.T, config *unstructured.Unstructured, label string) (native *unstructured.Unstructured) {
	t.Helper()
	create(t, config)
	pod := probe(s.home, "operator-demo-0", false)
	pod.Labels[label] = "true"
	create(t, pod)
	pod = ready(t, s.home, "operator-demo-0")
	require.Equal(t, "true", pod.Labels[meshv1alpha1.EnableProxyLabel])

	until(t, "the status", func(ctx context.Context) error {
		o := config.DeepCopy()
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
			return err
		}
		var is meshv1alpha1.ShardingConfig // the kinds have the same status
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &is); err != nil {
			return err
		}
		if is.Status.ReadyMembers != 1 || !meta.IsStatusConditionTrue(is.Status.Conditions, meshv1alpha1.ConditionReady) {
			return fmt.Errorf("it is not ready: %+v", is.Status)
		}
		return nil
	})
	until(t, "the list of the shard", func(context.Context) error {
		got := strings.Fields(in(t, pod, "kubectl", "get", "services", "-A", "-l", "app=foo", "-o", `jsonpath={range .items[*]}{.metadata.namespace} {end}`))
		if !slices.Equal(got, []string{"ns-a", "ns-b"}) {
			return fmt.Errorf("it has services of %v", got)
		}
		return nil
	})
	_, stderr, err := cluster.Exec(t.Context(), pod.Namespace, pod.Name, pod.Spec.Containers[0].Name, "kubectl", "-n", "ns-c", "annotate", "service", "web", "by=shard")
	require.Error(t, err)
	require.Contains(t, stderr, "Forbidden")
	in(t, pod, "kubectl", "-n", "ns-a", "annotate", "--overwrite", "service", "web", "by=shard")
	if config.GroupVersionKind().Group != meshv1alpha1.GroupName {
		native = s.migrated(t)
	}
	gone(t, pod)
	gone(t, config)
	return native
}

// migrated returns the native object for the one of a dialect, as the plugin prints it.
func (s seedShard) migrated(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	text, err := cluster.Plugin(t.Context(), "migrate", "-n", s.home).Output()
	require.NoError(t, err)
	o := &unstructured.Unstructured{}
	require.NoError(t, yaml.Unmarshal(text, &o.Object))
	return o
}

// TestSeedsOfVirtualApps applies the manifests of VirtualApps word for word.
func TestSeedsOfVirtualApps(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"controllermesh-virtualapp", "controllermesh-virtualapp-leaderElectionName"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testSeedOfVirtualApp(t, name)
		})
	}
}

// seedApp is a VirtualApp of the seeds, and the workloads of its two subsets.
type seedApp struct {
	home string
	*kruisev1alpha1.VirtualApp
}

// workload creates a StatefulSet of one pod, without the label of the mesh.
func (a *seedApp) workload(t *testing.T, name string, more map[string]string) *appsv1.StatefulSet {
	t.Helper()
	labels := map[string]string{"component": "test-operator", "app": name}
	maps.Copy(labels, more)
	set := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: a.home, Name: name},
		Spec: appsv1.StatefulSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: probeSpec()},
		},
	}
	create(t, set)
	return set
}

// says waits until the condition Ready has a status, and contains a text.
func (a *seedApp) says(t *testing.T, status metav1.ConditionStatus, text string) {
	t.Helper()
	until(t, "VirtualApp "+a.home+"/"+a.Name, func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(a.VirtualApp), a.VirtualApp); err != nil {
			return err
		}
		c := meta.FindStatusCondition(a.Status.Conditions, meshv1alpha1.ConditionReady)
		if c == nil || c.Status != status || !strings.Contains(c.Message, text) {
			return fmt.Errorf("its condition Ready is %+v", c)
		}
		return nil
	})
}

// works waits until all members act. They are probes, which contend for no lock, so that after
// a while the shards lack a leader.
func (a *seedApp) works(t *testing.T) {
	t.Helper()
	until(t, "VirtualApp "+a.home+"/"+a.Name, func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(a.VirtualApp), a.VirtualApp); err != nil {
			return err
		}
		c := meta.FindStatusCondition(a.Status.Conditions, meshv1alpha1.ConditionReady)
		if c == nil || c.Status != metav1.ConditionTrue && c.Reason != string(meshv1alpha1.ReasonNoLeader) {
			return fmt.Errorf("its condition Ready is %+v", c)
		}
		return nil
	})
}

// owns waits until the pod of a workload lists the objects of some namespaces alone. The pod may
// be restarted meanwhile.
func (a *seedApp) owns(t *testing.T, all tenants, workload string, namespaces ...string) {
	t.Helper()
	slices.Sort(namespaces)
	until(t, "the list of "+workload, func(ctx context.Context) error {
		pod := ready(t, a.home, workload+"-0")
		out, stderr, err := cluster.Exec(ctx, pod.Namespace, pod.Name, pod.Spec.Containers[0].Name, "kubectl", "get", "configmaps", "-A",
			"-l", all.selector(), "-o", `jsonpath={range .items[*]}{.metadata.namespace} {end}`)
		if err != nil {
			return fmt.Errorf("%w: %s", err, stderr)
		}
		got := strings.Fields(out)
		if slices.Sort(got); !slices.Equal(got, namespaces) {
			return fmt.Errorf("it has objects of %v, not %v; root: %+v", got, namespaces, a.Status.Root)
		}
		return nil
	})
}

// entry reports whether new pods of the VirtualApp are put on the mesh, by a policy or a webhook.
func (a *seedApp) entry(ctx context.Context) (bool, error) {
	ns, c := &corev1.Namespace{}, &admissionv1.MutatingWebhookConfiguration{}
	err := errors.Join(cluster.Get(ctx, client.ObjectKey{Name: a.home}, ns), cluster.Get(ctx, client.ObjectKey{Name: "ctrlmesh-virtualapps"}, c))
	return ns.Labels[meshv1alpha1.VirtualAppsLabel] != "" ||
		slices.ContainsFunc(c.Webhooks, func(w admissionv1.MutatingWebhook) bool { return strings.Contains(w.Name, "."+a.home+".") }), err
}

func testSeedOfVirtualApp(t *testing.T, name string) {
	a := &seedApp{namespace(t, "seed"), &kruisev1alpha1.VirtualApp{}}
	probeRights(t, a.home)
	all := append(newTenants(t, 3), namespace(t, "canary"))
	labelled, plain, system, canary := all[0], all[1], all[2], all[3]
	all.fill(t, "cm")
	labelNamespace(t, labelled, "ns-type", "canary-1")
	labelNamespace(t, system, "ns-type", "system")

	v1 := a.workload(t, "v1", nil)
	old := ready(t, a.home, "v1-0")
	manifest := seed(t, name)
	manifest.SetNamespace(a.home)
	create(t, manifest)
	a.SetNamespace(a.home)
	a.SetName(manifest.GetName())
	a.says(t, metav1.ConditionFalse, "v1-0; they were created before the VirtualApp: restart them")
	in(t, old, "kubectl", "-n", plain, "annotate", "configmap", "cm", "by=old") // it runs outside the mesh

	v2 := a.workload(t, "v2", map[string]string{"version": "v2"})
	require.NoError(t, cluster.Delete(t.Context(), old))
	a.works(t)
	for _, workload := range []string{"v1", "v2"} {
		require.Equal(t, "true", ready(t, a.home, workload+"-0").Labels[meshv1alpha1.EnableProxyLabel])
	}
	a.owns(t, all, "v1", plain)
	a.owns(t, all, "v2", labelled, canary)

	fenced := func(workload, ns string) {
		t.Helper()
		pod := ready(t, a.home, workload+"-0")
		until(t, "the refusal", func(ctx context.Context) error { // on a busy machine the exec itself may fail
			_, stderr, err := cluster.Exec(ctx, pod.Namespace, pod.Name, pod.Spec.Containers[0].Name, "kubectl", "-n", ns, "annotate", "--overwrite", "configmap", "cm", "by="+workload)
			require.Error(t, err)
			return orElse(strings.Contains(stderr, "Forbidden"), "it says "+stderr)
		})
	}
	fenced("v1", labelled)
	fenced("v2", plain)
	fenced("v1", system)

	labelNamespace(t, plain, "ns-type", "canary-1")
	a.owns(t, all, "v2", labelled, canary, plain)
	a.owns(t, all, "v1")
	a.works(t)

	for _, set := range []*appsv1.StatefulSet{v1, v2} { // its pods cannot run unsharded
		require.NoError(t, cluster.Delete(t.Context(), set))
	}
	gone(t, a.VirtualApp)
	until(t, "the removal of its entry", func(ctx context.Context) error {
		if there, err := a.entry(ctx); err != nil || there {
			return errors.Join(err, errors.New("it is still there"))
		}
		return nil
	})
	unlabelled := a.workload(t, "after", nil)
	require.Empty(t, ready(t, a.home, unlabelled.Name+"-0").Labels[meshv1alpha1.EnableProxyLabel])
}
