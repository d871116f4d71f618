package e2e

import (
	"cmp"
	"context"
	"fmt"
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

// root is a configuration with spec.root, in a namespace of its own with the workload that
// it shards.
type root struct{ home string }

// newRoot creates a root, by default of ConfigMaps, and its workload of the given number of
// probes.
func newRoot(t *testing.T, name string, replicas int32, spec meshv1alpha1.ShardingConfigSpec) root {
	t.Helper()
	r := root{namespace(t, name)}
	probeRights(t, r.home)
	spec.Root.Prefix = cmp.Or(spec.Root.Prefix, "part")
	if spec.Root.ResourceSelector == nil {
		spec.Root.ResourceSelector = listing("configmaps")
	}
	create(t, &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: r.home, Name: "root"}, Spec: spec})
	ref := spec.Root.TargetRef
	r.probes(t, workload, replicas, ref != nil && ref.Kind == "Deployment")
	return r
}

// probes creates a workload of the given number of probes: a StatefulSet, or a Deployment.
func (r root) probes(t *testing.T, name string, replicas int32, deployment bool) {
	t.Helper()
	meta := metav1.ObjectMeta{Namespace: r.home, Name: name}
	selector := &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}
	template := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": name, meshv1alpha1.EnableProxyLabel: "true"}},
		Spec:       probeSpec(),
	}
	if deployment {
		create(t, &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Replicas: &replicas, Selector: selector, Template: template}})
		return
	}
	create(t, &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{
		Replicas: &replicas, Selector: selector, Template: template, PodManagementPolicy: appsv1.ParallelPodManagement,
	}})
}

// listing returns a scope of whole resources (plural.group or plural).
func listing(resources ...string) []meshv1alpha1.ObjectLimiter {
	return []meshv1alpha1.ObjectLimiter{{RelateResources: shard("", "", nil, nil, resources...).Spec.Limits[0].RelateResources}}
}

func (r root) config(t *testing.T) *meshv1alpha1.ShardingConfig {
	t.Helper()
	c := &meshv1alpha1.ShardingConfig{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: r.home, Name: "root"}, c))
	return c
}

// change edits the configuration, and waits until its members have applied it.
func (r root) change(t *testing.T, members int32, edit func(*meshv1alpha1.ShardingConfigSpec)) {
	t.Helper()
	c := r.config(t)
	before := c.DeepCopy()
	edit(&c.Spec)
	require.NoError(t, cluster.Patch(t.Context(), c, client.MergeFrom(before)))
	r.settles(t, members)
}

// settles waits until the given number of members have applied their policies.
func (r root) settles(t *testing.T, members int32) {
	t.Helper()
	until(t, "the root's shards", func(context.Context) error {
		c := r.config(t)
		s := c.Status
		if s.ObservedGeneration < c.Generation || s.ReadyMembers != members || s.Root == nil || s.Root.Handover != "Settled" ||
			s.Stamping != nil && !s.Stamping.Done {
			return fmt.Errorf("they are not settled: generation %d, %+v, root %+v", c.Generation, s, s.Root)
		}
		return nil
	})
}

// pods returns the first n pods of a StatefulSet.
func (r root) pods(t *testing.T, n int) (pods []*corev1.Pod) {
	t.Helper()
	for i := range n {
		pods = append(pods, ready(t, r.home, fmt.Sprintf("%s-%d", workload, i)))
	}
	return pods
}

// tenants are namespaces that shards divide among them.
type tenants []string

func newTenants(t *testing.T, n int) (names tenants) {
	t.Helper()
	for range n {
		names = append(names, namespace(t, "e2e-tenant"))
	}
	return names
}

// selector selects the objects of fill.
func (names tenants) selector() string { return "tenants=" + names[0] }

// fill creates a ConfigMap of the given name for each tenant.
func (names tenants) fill(t *testing.T, name string) {
	t.Helper()
	for _, ns := range names {
		create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"tenants": names[0]}}})
	}
}

// listed returns the objects of fill that kubectl lists in a pod, as namespace/name.
func (names tenants) listed(t *testing.T, pod *corev1.Pod) []string {
	t.Helper()
	return strings.Fields(in(t, pod, "kubectl", "get", "configmaps", "-A", "-l", names.selector(), "-o",
		`jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name} {end}`))
}

// divided asks each member for its objects (as namespace/name), and returns the owner of
// each namespace. It requires that each namespace has one owner, which has n objects of it.
func (names tenants) divided(t *testing.T, n int, pods []*corev1.Pod, ask func(*corev1.Pod) []string) map[string]string {
	t.Helper()
	seen, owner := map[string]int{}, map[string]string{}
	for _, pod := range pods {
		for _, key := range ask(pod) {
			ns, _, _ := strings.Cut(key, "/")
			if !slices.Contains(names, ns) {
				continue
			}
			seen[ns]++
			if owner[ns] == "" {
				owner[ns] = pod.Name
			}
			assert.Equal(t, owner[ns], pod.Name, never+": two owners of %s", key)
		}
	}
	for _, ns := range names {
		assert.Equal(t, n, seen[ns], "objects of %s", ns)
	}
	return owner
}
