package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applyv1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// singles are requests for one object of a divided resource.
var singles = []struct {
	name string
	do   func(context.Context, kubernetes.Interface, string) error
}{
	{"get", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		_, err := c.CoreV1().ConfigMaps(ns).Get(ctx, "seed", metav1.GetOptions{})
		return err
	}},
	{"create", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		_, err := c.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "new"}}, metav1.CreateOptions{})
		return err
	}},
	{"create, name generated", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		_, err := c.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "new-"}}, metav1.CreateOptions{})
		return err
	}},
	{"update", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		_, err := c.CoreV1().ConfigMaps(ns).Update(ctx, verbsSeed(ns), metav1.UpdateOptions{})
		return err
	}},
	{"merge patch", patches(types.MergePatchType, `{"data":{"by":"merge"}}`)},
	{"JSON patch", patches(types.JSONPatchType, `[{"op":"add","path":"/data","value":{"by":"json"}}]`)},
	{"strategic patch", patches(types.StrategicMergePatchType, `{"data":{"by":"strategy"}}`)},
	{"server-side apply", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		_, err := c.CoreV1().ConfigMaps(ns).Apply(ctx, applyv1.ConfigMap("applied", ns).WithData(map[string]string{"by": "apply"}), metav1.ApplyOptions{FieldManager: "e2e", Force: true})
		return err
	}},
	{"delete", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		return c.CoreV1().ConfigMaps(ns).Delete(ctx, "doomed", metav1.DeleteOptions{})
	}},
	{"scale", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		_, err := c.AppsV1().Deployments(ns).UpdateScale(ctx, "web", &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "web"}}, metav1.UpdateOptions{})
		return err
	}},
	{"status patch", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		_, err := c.AppsV1().Deployments(ns).Patch(ctx, "web", types.MergePatchType, []byte(`{"status":{"replicas":0}}`), metav1.PatchOptions{}, "status")
		return err
	}},
	{"evict", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		return c.PolicyV1().Evictions(ns).Evict(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "idle"},
			DeleteOptions: &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}})
	}},
	{"bind", func(ctx context.Context, c kubernetes.Interface, ns string) error {
		return c.CoreV1().Pods(ns).Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "idle"},
			Target: corev1.ObjectReference{Kind: "Node", Name: "node1"}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	}},
}

func patches(kind types.PatchType, patch string) func(context.Context, kubernetes.Interface, string) error {
	return func(ctx context.Context, c kubernetes.Interface, ns string) error {
		_, err := c.CoreV1().ConfigMaps(ns).Patch(ctx, "seed", kind, []byte(patch), metav1.PatchOptions{})
		return err
	}
}

func verbsSeed(ns string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "seed", Labels: map[string]string{"sweep": "yes"}}}
}

// TestVerbs has a canary, which owns one namespace, use every verb there and in a namespace
// of another shard.
func TestVerbs(t *testing.T) {
	t.Parallel()
	own, foreign := namespace(t, "e2e-own"), namespace(t, "e2e-foreign")
	r := newRoot(t, "e2e-verbs", 2, meshv1alpha1.ShardingConfigSpec{Reads: meshv1alpha1.ReadsOwn, Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		Canary:            &meshv1alpha1.CanaryConfig{Replicas: new(int32(1)), InNamespaces: []string{own}},
		ResourceSelector:  listing("configmaps", "pods", "deployments.apps"),
	}})
	for _, ns := range []string{own, foreign} {
		idle := netPod(ns, "idle", "")
		idle.Labels = map[string]string{"app": "idle"}
		idle.Spec.SchedulerName, idle.Spec.ServiceAccountName = "nobody", ""
		create(t, idle, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "seed"}}, verbsSeed(ns), &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "web"},
			Spec: appsv1.DeploymentSpec{
				Replicas: new(int32), Selector: &metav1.LabelSelector{MatchLabels: idle.Labels},
				Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: idle.Labels}, Spec: idle.Spec},
			},
		})
	}
	r.settles(t, 2)
	pod := r.pods(t, 2)[0]
	c, err := kubernetes.NewForConfig(from(t, pod))
	require.NoError(t, err)
	v := verbs{root: r, pod: pod, own: own, foreign: foreign, client: c}

	for _, isolation := range []meshv1alpha1.Isolation{meshv1alpha1.IsolationObserve, meshv1alpha1.IsolationOff, meshv1alpha1.IsolationEnforce} {
		r.change(t, 2, func(s *meshv1alpha1.ShardingConfigSpec) { s.Isolation = isolation })
		t.Run(string(isolation), func(t *testing.T) {
			v.testSingles(t, isolation)
			v.testMany(t)
		})
	}
	t.Run("kubectl", v.testKubectl)
	t.Run("curl", v.testCurl)
	t.Run("owner of another shard", v.testOwner)
	t.Run("fenced namespaces", v.testFence)
	require.NoError(t, c.CoreV1().ConfigMaps(own).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "sweep"}))
	_, err = cluster.Clientset.CoreV1().ConfigMaps(own).Get(t.Context(), "seed", metav1.GetOptions{})
	require.True(t, apierrors.IsNotFound(err), "%v", err)
}

type verbs struct {
	root
	pod          *corev1.Pod
	own, foreign string
	client       kubernetes.Interface
}

// met waits until at least want requests of the member were for objects of another shard, by
// outcome, and returns their number.
func (v verbs) met(t *testing.T, action string, want float64) float64 {
	t.Helper()
	return counted(t, v.pod.Spec.NodeName, "ctrlmesh_foreign_requests_total", map[string]string{"namespace": v.home, "action": action}, want)
}

func (v verbs) testSingles(t *testing.T, isolation meshv1alpha1.Isolation) {
	want := map[string]float64{"refused": v.met(t, "refused", 0), "observed": v.met(t, "observed", 0)}
	for _, ns := range []string{v.own, v.foreign} {
		admin := cluster.Clientset.CoreV1().ConfigMaps(ns)
		create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "doomed"}})
		for _, single := range singles {
			err := single.do(t.Context(), v.client, ns)
			switch {
			case ns == v.own || isolation != meshv1alpha1.IsolationEnforce:
				assert.NoError(t, err, "%s in %s", single.name, ns)
			default:
				assert.True(t, apierrors.IsForbidden(err), "%s: %v", single.name, err)
				assert.ErrorContains(t, err, "shard part-1-normal owns it", single.name)
			}
		}
		for _, name := range []string{"doomed", "new"} {
			require.NoError(t, client.IgnoreNotFound(admin.Delete(t.Context(), name, metav1.DeleteOptions{})))
		}
	}
	switch n := float64(len(singles)); isolation {
	case meshv1alpha1.IsolationEnforce:
		want["refused"] += n
	case meshv1alpha1.IsolationObserve:
		want["observed"] += n
	}
	for action, n := range want {
		assert.InDelta(t, n, v.met(t, action, n), 0, action)
	}
}

// testMany sends requests for many objects: a foreign namespace has none.
func (v verbs) testMany(t *testing.T) {
	for ns, want := range map[string][]string{v.own: {"seed"}, v.foreign: nil} {
		maps := v.client.CoreV1().ConfigMaps(ns)
		for _, o := range []metav1.ListOptions{{LabelSelector: "sweep"}, {FieldSelector: "metadata.name=seed"}} {
			list, err := maps.List(t.Context(), o)
			require.NoError(t, err)
			var listed []string
			for _, cm := range list.Items {
				listed = append(listed, cm.Name)
			}
			assert.Equal(t, want, listed, "%s of %s", o, ns)
			o.TimeoutSeconds = new(int64(1))
			until(t, fmt.Sprintf("a watch of %s%s in %s", o.LabelSelector, o.FieldSelector, ns), func(ctx context.Context) error { // a second may be too short
				w, err := maps.Watch(ctx, o)
				if err != nil {
					return err
				}
				var watched []string
				for event := range w.ResultChan() {
					cm, ok := event.Object.(*corev1.ConfigMap)
					require.True(t, ok, "%+v", event)
					watched = append(watched, cm.Name)
				}
				require.Subset(t, want, watched)
				return orElse(len(slices.Compact(watched)) == len(want), fmt.Sprintf("it has %v", watched)) // it may be modified meanwhile
			})
		}
	}
	require.NoError(t, v.client.CoreV1().ConfigMaps(v.foreign).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))
	_, err := cluster.Clientset.CoreV1().ConfigMaps(v.foreign).Get(t.Context(), "seed", metav1.GetOptions{})
	require.NoError(t, err)
}

// requireFenced runs commands in which $ns is the own namespace, and then a foreign one,
// where each is refused.
func (v verbs) requireFenced(t *testing.T, prelude string, commands ...string) {
	t.Helper()
	script := prelude + `
try() { if "$@" >out 2>&1; then echo done; elif grep -q 'shard part-1-normal owns it' out; then echo refused; else cat out; fi; }
`
	var want []string
	for ns, result := range map[string]string{v.own: "done", v.foreign: "refused"} {
		script += "ns=" + ns + "\n"
		for _, command := range commands {
			script += "try " + command + "\n"
			want = append(want, result)
		}
	}
	require.Equal(t, want, strings.Split(strings.TrimSpace(in(t, v.pod, "sh", "-c", script)), "\n"), "%s", script)
}

func (v verbs) testKubectl(t *testing.T) {
	v.requireFenced(t, shellPrelude+`
echo '{apiVersion: v1, kind: ConfigMap, metadata: {name: applied}, data: {by: kubectl}}' >applied.yaml
echo '{apiVersion: v1, kind: ConfigMap, metadata: {generateName: by-kubectl-}}' >generated.yaml`,
		"kubectl -n $ns get configmap seed",
		"kubectl -n $ns create configmap by-kubectl",
		"kubectl -n $ns create -f generated.yaml",
		"kubectl -n $ns apply -f applied.yaml",
		"kubectl -n $ns apply --server-side --force-conflicts -f applied.yaml",
		"kubectl -n $ns replace -f applied.yaml",
		"kubectl -n $ns label --overwrite configmap seed by=kubectl",
		`kubectl -n $ns patch configmap seed --type=json -p '[{"op":"add","path":"/data","value":{}}]'`,
		"kubectl -n $ns delete configmap applied",
		"kubectl -n $ns scale deployment web --replicas=0",
		"kubectl -n $ns rollout restart deployment web",
		`kubectl -n $ns patch deployment web --subresource=status --type=merge -p '{"status":{"replicas":0}}'`,
	)
}

func (v verbs) testCurl(t *testing.T) {
	const maps = " $api/api/v1/namespaces/$ns/configmaps"
	const json = " -H Content-Type:application/json"
	v.requireFenced(t, clientPrelude,
		"curl $curl"+maps+"/seed",
		`curl $curl -d '{"metadata":{"name":"by-curl"}}'`+json+maps,
		`curl $curl -d '{"metadata":{"generateName":"by-curl-"}}'`+json+maps,
		`curl $curl -X PUT -d '{"metadata":{"name":"by-curl"}}'`+json+maps+"/by-curl",
		`curl $curl -X PATCH -d '{"data":{"by":"curl"}}' -H Content-Type:application/merge-patch+json`+maps+"/by-curl",
		"curl $curl -X DELETE"+maps+"/by-curl",
	)
}

// An object may have an owner without a namespace, which no shard owns.
func (v verbs) testOwner(t *testing.T) {
	owner := &rbacv1.ClusterRoleBinding{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Name: v.home}, owner))
	owned := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owned", OwnerReferences: []metav1.OwnerReference{{
		APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRoleBinding", Name: owner.Name, UID: owner.UID, BlockOwnerDeletion: new(true),
	}}}}
	owned, err := v.client.CoreV1().ConfigMaps(v.own).Create(t.Context(), owned, metav1.CreateOptions{})
	require.NoError(t, err)
	require.Equal(t, owner.UID, owned.OwnerReferences[0].UID)
	_, err = v.client.RbacV1().ClusterRoleBindings().Patch(t.Context(), owner.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"owns":"one"}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
}

// With fence: Namespace, a member can write only in the shard's namespaces and the
// operator's own.
func (v verbs) testFence(t *testing.T) {
	v.change(t, 2, func(s *meshv1alpha1.ShardingConfigSpec) { s.Fence = meshv1alpha1.FenceNamespace })
	for ns, allowed := range map[string]bool{v.own: true, v.foreign: false, v.home: true} {
		secrets := v.client.CoreV1().Secrets(ns)
		_, err := secrets.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "fenced"}}, metav1.CreateOptions{})
		if allowed {
			require.NoError(t, err, ns)
		} else {
			require.True(t, apierrors.IsForbidden(err), "%v", err)
			require.ErrorContains(t, err, fmt.Sprintf("create secrets: namespace %s does not belong", ns))
		}
		require.NoError(t, secrets.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))
		left, err := secrets.List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
		require.Equal(t, allowed, len(left.Items) == 0, "%s has %d secrets", ns, len(left.Items))
	}
}
