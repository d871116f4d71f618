package e2e

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// goodConfig is a configuration that works. Each wrong one differs from it in one thing.
const goodConfig = `
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: NAME, namespace: NAMESPACE}
spec:
  selector:
    matchLabels: {app: operator}
    matchExpressions: [{key: shard, operator: In, values: ["1"]}]
  controller: {leaderElectionName: leader}
  limits:
  - relateResources: [{apiGroups: [""], resources: [secrets]}]
    selector: {matchExpressions: [{key: bucket, operator: In, values: [a]}]}
`

// kubectl apply refuses configurations that are ambiguous or have no effect, with a message
// that says what to change.
func TestWrongConfigsAreRefused(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "refused")
	probeRights(t, ns)
	pod := netPod(ns, "zero", nodes(t)[0])
	maps.Copy(pod.Labels, map[string]string{"app": "operator", "shard": "0", "tier": "backend"})
	create(t, pod)
	require.NoError(t, apply(t, ns, "zero", `values: ["1"]`, `values: ["0"]`, "values: [a]", "values: [z]"))
	require.NoError(t, apply(t, ns, "two", `values: ["1"]`, `values: ["2"]`, "values: [a]", "values: [t]")) // without pods

	for _, c := range []struct {
		what, old, new string
		says           []string
	}{
		{"selects a pod of another's", "matchLabels: {app: operator}\n    matchExpressions: [{key: shard, operator: In, values: [\"1\"]}]", "matchLabels: {tier: backend}",
			[]string{"spec.selector", "pod zero", "ShardingConfig zero", "narrow this selector"}},
		{"could select a pod of another's", `values: ["1"]`, `values: ["1", "2"]`,
			[]string{"spec.selector", "shard=2", "ShardingConfig two", "make the selectors exclude each other"}},
		{"overlaps by exclusion", `operator: In, values: ["1"]`, `operator: NotIn, values: ["0"]`,
			[]string{"spec.selector", "shard=2", "ShardingConfig two", "different values of"}},
		{"unknown field", "  controller:", "  replicas: 2\n  controller:", []string{`unknown field "spec.replicas"`}},
		{"misspelt field", "leaderElectionName: leader", "leaderElectionname: leader", []string{`unknown field "spec.controller.leaderElectionname"`}},
		{"empty selector", "  selector:\n    matchLabels: {app: operator}\n    matchExpressions: [{key: shard, operator: In, values: [\"1\"]}]", "  selector: {}",
			[]string{"spec.selector", "would take every pod of the namespace"}},
		{"no selector", "  selector:\n    matchLabels: {app: operator}\n    matchExpressions: [{key: shard, operator: In, values: [\"1\"]}]\n", "",
			[]string{"spec.selector is required: name the pods of this shard"}},
		{"operator", "{key: shard, operator: In", "{key: shard, operator: Within", []string{"spec.selector.matchExpressions[0].operator", "Within", "not a valid selector operator"}},
		{"values", `operator: In, values: ["1"]`, "operator: In", []string{"spec.selector.matchExpressions[0].values", "must be specified when `operator` is 'In' or 'NotIn'"}},
		{"value", "app: operator", `app: "an operator"`, []string{"spec.selector.matchLabels", "an operator", "a valid label must"}},
		{"value of a limit", "values: [a]", `values: ["-"]`, []string{"spec.limits[0].selector.matchExpressions[0].values[0]", "a valid label must"}},
		{"operator of a limit", "{key: bucket, operator: In", "{key: bucket, operator: Equals", []string{"spec.limits[0].selector.matchExpressions[0].operator", "not a valid selector operator"}},
		{"no limits", "  limits:\n  - relateResources: [{apiGroups: [\"\"], resources: [secrets]}]\n    selector: {matchExpressions: [{key: bucket, operator: In, values: [a]}]}\n", "",
			[]string{"spec.limits is required: list at least one limit"}},
		{"limit that limits nothing", "    selector: {matchExpressions: [{key: bucket, operator: In, values: [a]}]}", "    selector: {}", []string{"spec.limits[0].selector", "an empty selector would give it all of them"}},
		{"subresource", "resources: [secrets]", "resources: [pods/status]", []string{"spec.limits[0].relateResources[0].resources[0]", "write pods"}},
		{"all resources", "resources: [secrets]", `resources: ["*"]`, []string{"spec.limits[0].relateResources[0].resources[0]", "name the resources"}},
		{"star among others", "resources: [secrets]", `resources: ["*", secrets]`, []string{"spec.limits[0].relateResources[0].resources[0]", `"*" must be alone`}},
		{"lock", "leaderElectionName: leader", "leaderElectionName: The_Leader", []string{"spec.controller.leaderElectionName", "The_Leader---wrong", "lower case"}},
		{"lock without a name", "leaderElectionName: leader", `leaderElectionName: ""`, []string{"spec.controller.leaderElectionName"}},
		{"passthrough of shards", "  controller: {leaderElectionName: leader}\n", "  clientCertificates: Passthrough\n", []string{"spec.clientCertificates: Passthrough leaves requests unread", "remove spec.limits", "or choose Refuse"}},
		{"passthrough with a lock", "  limits:\n  - relateResources: [{apiGroups: [\"\"], resources: [secrets]}]\n    selector: {matchExpressions: [{key: bucket, operator: In, values: [a]}]}\n", "  clientCertificates: Passthrough\n",
			[]string{"spec.clientCertificates: Passthrough leaves requests unread", "remove spec.limits, spec.controller"}},
		{"failure policy", "  controller:", "  failurePolicy: Ignore\n  controller:", []string{"spec.failurePolicy", `"Closed", "Open"`}},
		{"token binding", "  controller:", "  tokenBinding: On\n  controller:", []string{"spec.tokenBinding", `"Enforce", "Off"`}},
		{"client certificates", "  controller:", "  clientCertificates: Pass\n  controller:", []string{"spec.clientCertificates", `"Refuse", "Passthrough"`}},
	} {
		t.Run(c.what, func(t *testing.T) {
			err := apply(t, ns, "wrong", c.old, c.new)
			for _, words := range c.says {
				assert.ErrorContains(t, err, words)
			}
			wrong := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "wrong"}}
			require.True(t, apierrors.IsNotFound(cluster.Delete(t.Context(), wrong)), "it is stored")
		})
	}

	t.Run("changed selector", func(t *testing.T) {
		require.NoError(t, apply(t, ns, "good"))
		err := apply(t, ns, "good", `values: ["1"]`, `values: ["2"]`)
		require.ErrorContains(t, err, "spec.selector is immutable: delete this ShardingConfig and create another")
		c := &meshv1alpha1.ShardingConfig{}
		require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "good"}, c))
		require.Equal(t, []string{"1"}, c.Spec.Selector.MatchExpressions[0].Values)
		require.NoError(t, apply(t, ns, "good", "values: [a]", "values: [a, b]"), "all else may be changed")
		require.NoError(t, apply(t, ns, "good", "  controller: {leaderElectionName: leader}\n  limits:\n  - relateResources: [{apiGroups: [\"\"], resources: [secrets]}]\n    selector: {matchExpressions: [{key: bucket, operator: In, values: [a]}]}\n",
			"  clientCertificates: Passthrough\n"), "even into one that divides nothing")
	})
}

// apply applies the good configuration under a name, with texts replaced: pairs of an old
// and a new text.
func apply(t *testing.T, namespace, name string, oldnew ...string) error {
	t.Helper()
	text := strings.NewReplacer("NAMESPACE", namespace, "NAME", name).Replace(goodConfig)
	for pair := range slices.Chunk(oldnew, 2) {
		require.Contains(t, text, pair[0])
		text = strings.Replace(text, pair[0], pair[1], 1)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	_, err := cluster.Kubectl(t.Context(), "apply", "-f", file)
	return err
}

// Pods that cannot be captured, or not from their start, are refused.
func TestWrongPodsAreRefused(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "refused")
	probeRights(t, ns)

	for _, c := range []struct {
		what   string
		change func(*corev1.Pod)
		says   string
	}{
		{"host network by iptables", func(p *corev1.Pod) {
			p.Spec.HostNetwork = true
			p.Annotations = map[string]string{meshv1alpha1.CaptureAnnotation: meshv1alpha1.CaptureIPTables}
		}, "remove hostNetwork from the pod template, or the label " + meshv1alpha1.EnableProxyLabel},
		{"unknown capture mode", func(p *corev1.Pod) {
			p.Annotations = map[string]string{meshv1alpha1.CaptureAnnotation: "sidecar"}
		}, `"sidecar" is no capture mode: write ebpf, iptables or address`},
		{"kubeconfig with a relative path", func(p *corev1.Pod) {
			p.Annotations = map[string]string{meshv1alpha1.CaptureAnnotation: meshv1alpha1.CaptureAddress}
			p.Spec.Containers[0].Args = append(p.Spec.Containers[0].Args, "--kubeconfig=config")
		}, "relative path (config)"},
	} {
		t.Run(c.what, func(t *testing.T) {
			pod := netPod(ns, "wrong", nodes(t)[0])
			c.change(pod)
			require.ErrorContains(t, cluster.Create(t.Context(), pod), c.says)
			require.True(t, apierrors.IsNotFound(cluster.Delete(t.Context(), pod)), "it is stored")
		})
	}

	off, on := outsider(t, ns, "off"), netPod(ns, "on", nodes(t)[0])
	create(t, on)
	err := cluster.Patch(t.Context(), on.DeepCopy(), client.RawPatch("application/merge-patch+json",
		[]byte(`{"metadata": {"annotations": {"`+meshv1alpha1.CaptureAnnotation+`": "iptables"}}}`)))
	require.ErrorContains(t, err, "is fixed when a pod is created")
	for pod, label := range map[*corev1.Pod]string{off: `"true"`, on: "null"} {
		err := cluster.Patch(t.Context(), pod.DeepCopy(), client.RawPatch("application/merge-patch+json",
			[]byte(`{"metadata": {"labels": {"`+meshv1alpha1.EnableProxyLabel+`": `+label+`}}}`)))
		require.ErrorContains(t, err, "set it on the pod template")
		stored := &corev1.Pod{}
		require.NoError(t, cluster.Get(t.Context(), client.ObjectKeyFromObject(pod), stored))
		for _, stamped := range []string{meshv1alpha1.NamespaceLabel, meshv1alpha1.ShardingHashLabel, meshv1alpha1.ControlLabel} {
			delete(pod.Labels, stamped) // other tests may have pods stamped
			delete(stored.Labels, stamped)
		}
		require.Equal(t, pod.Labels, stored.Labels)
	}
}
