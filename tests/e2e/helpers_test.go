package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/results"
)

const (
	probeImage   = "localhost/ctrlmesh/probe:dev"
	probeAccount = "probe"
	podNameLabel = "statefulset.kubernetes.io/pod-name" // by which shards select their pods
)

// never begins the message of an assertion about what may not happen even once, so that a
// failure is not run again.
const never = results.Invariant

// until polls cond for up to patience, and fails with its last error.
func until(t *testing.T, what string, cond func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, kube.Until(ctx, what, cond))
}

// namespace creates a namespace that is deleted when the test ends. Its name begins with the
// given one and is new in every run: the last run's may still be terminating.
func namespace(t *testing.T, name string) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-", Labels: ours}}
	require.NoError(t, cluster.Create(t.Context(), ns))
	t.Cleanup(func() {
		if err := cluster.Delete(context.Background(), ns); client.IgnoreNotFound(err) != nil {
			t.Errorf("deleting namespace %s: %v", ns.Name, err)
		}
	})
	return ns.Name
}

// labelNamespace sets a label of a namespace.
func labelNamespace(t *testing.T, name, key, value string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, key, value)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	require.NoError(t, cluster.Patch(t.Context(), ns, client.RawPatch(types.MergePatchType, patch)))
}

// create creates objects, which are deleted with their namespace.
func create(t *testing.T, objects ...client.Object) {
	t.Helper()
	for _, obj := range objects {
		require.NoError(t, cluster.Create(t.Context(), obj), "%T %s/%s", obj, obj.GetNamespace(), obj.GetName())
	}
}

// probeRights creates the service account that probes use. It may do everything, so only the
// mesh can refuse a probe's request.
func probeRights(t *testing.T, namespace string) {
	t.Helper()
	owners, err := cluster.OwnedBy(t.Context(), namespace)
	require.NoError(t, err)
	create(t,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: probeAccount}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: namespace, OwnerReferences: owners},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: probeAccount}},
		})
}

// probe returns a pod of the probe's image, on the mesh or outside of it. It can be
// selected by its name, like a pod of a StatefulSet.
func probe(namespace, name string, onMesh bool) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{podNameLabel: name}},
		Spec:       probeSpec(),
	}
	if onMesh {
		pod.Labels[meshv1alpha1.EnableProxyLabel] = "true"
	}
	return pod
}

func probeSpec() corev1.PodSpec {
	return corev1.PodSpec{
		ServiceAccountName:            probeAccount,
		TerminationGracePeriodSeconds: new(int64(5)),
		Containers: []corev1.Container{{
			Name: "probe", Image: probeImage, ImagePullPolicy: corev1.PullIfNotPresent,
			VolumeMounts: []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}},
		}},
		Volumes: []corev1.Volume{{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
	}
}

// ready waits until a pod is ready and returns it.
func ready(t *testing.T, namespace, name string) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	until(t, "pod "+namespace+"/"+name, func(ctx context.Context) error { return cluster.Ready(ctx, pod) })
	return pod
}

// in runs a command in a pod's first container and returns what it printed.
func in(t *testing.T, pod *corev1.Pod, command ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stdout, stderr, err := cluster.Exec(ctx, pod.Namespace, pod.Name, pod.Spec.Containers[0].Name, command...)
	require.NoError(t, err, "stdout: %s\nstderr: %s", stdout, stderr)
	return stdout
}

// shard returns the ShardingConfig of the named pods, in their namespace. They see the
// resources (plural.group or plural) of the owned namespaces.
func shard(namespace, name string, pods, owned []string, resources ...string) *meshv1alpha1.ShardingConfig {
	groups := make([]meshv1alpha1.ResourceGroup, len(resources))
	for i, r := range resources {
		plural, group, _ := strings.Cut(r, ".")
		groups[i] = meshv1alpha1.ResourceGroup{APIGroups: []string{group}, Resources: []string{plural}}
	}
	return &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector: oneOf(podNameLabel, pods...),
			Limits: []meshv1alpha1.ObjectLimiter{{
				RelateResources: groups,
				Selector:        oneOf(meshv1alpha1.NamespaceLabel, owned...),
			}},
		},
	}
}

func oneOf(key string, values ...string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
		{Key: key, Operator: metav1.LabelSelectorOpIn, Values: values},
	}}
}

// mark returns a mark of the current time.
func mark(t *testing.T) kube.Mark {
	t.Helper()
	m, err := cluster.Mark()
	require.NoError(t, err)
	return m
}

// settled waits until the given number of members have their policy and are captured, and
// existing objects are stamped. It returns the current object.
func settled(t *testing.T, namespace, name string, members int32) *meshv1alpha1.ShardingConfig {
	t.Helper()
	c := &meshv1alpha1.ShardingConfig{}
	until(t, "ShardingConfig "+namespace+"/"+name, func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, c); err != nil {
			return err
		}
		s := c.Status
		switch {
		case s.ObservedGeneration < c.Generation:
			return fmt.Errorf("the manager has not seen it yet")
		case s.Members != members || s.ReadyMembers != members:
			return fmt.Errorf("%d members, %d of them ready, not %d: %+v", s.Members, s.ReadyMembers, members, s.Pods)
		case s.Stamping == nil || !s.Stamping.Done:
			return fmt.Errorf("still stamping: %+v", s.Stamping)
		}
		return nil
	})
	return c
}

// agents returns the ready agents by the name of their node.
func agents(t *testing.T) map[string]*corev1.Pod {
	t.Helper()
	var pods corev1.PodList
	require.NoError(t, cluster.List(t.Context(), &pods, client.InNamespace(kube.SystemNamespace),
		client.MatchingLabels{"app.kubernetes.io/name": kube.AgentName}))
	out := map[string]*corev1.Pod{}
	for i := range pods.Items {
		if pod := &pods.Items[i]; kube.PodReady(pod) {
			out[pod.Spec.NodeName] = pod
		}
	}
	return out
}
