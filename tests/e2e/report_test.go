package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Objects older and newer than the shards are stamped. So are objects of namespaces that no
// shard owns: a shard that gets them later finds them stamped.
func (m *members) testStamping(t *testing.T) {
	for i := range m.pods {
		s := settled(t, m.home, m.shard(i), 1).Status.Stamping
		assert.Contains(t, s.Completed, "configmaps")
		assert.Empty(t, s.Message)
		assert.Empty(t, s.Resource, "it walks no more")
	}
	buckets := map[string]string{}
	check := func(cm *corev1.ConfigMap) {
		what := cm.Namespace + "/" + cm.Name
		assert.Equal(t, cm.Namespace, cm.Labels[meshv1alpha1.NamespaceLabel], what)
		assert.Equal(t, "true", cm.Labels[meshv1alpha1.ControlLabel], what)
		bucket := cm.Labels[meshv1alpha1.ShardingHashLabel]
		assert.Regexp(t, "^([0-9]|[12][0-9]|3[01])$", bucket, what)
		if was, ok := buckets[cm.Namespace]; ok {
			assert.Equal(t, was, bucket, what)
		}
		buckets[cm.Namespace] = bucket
	}
	var all corev1.ConfigMapList
	until(t, "the labels of ConfigMaps in new namespaces", func(ctx context.Context) error {
		if err := cluster.List(ctx, &all); err != nil {
			return err
		}
		// The mesh's own objects and those of excluded namespaces are not stamped.
		all.Items = slices.DeleteFunc(all.Items, func(cm corev1.ConfigMap) bool {
			return slices.Contains([]string{kube.SystemNamespace, "kube-system", corev1.NamespaceNodeLease}, cm.Namespace)
		})
		for _, cm := range all.Items {
			if cm.Labels[meshv1alpha1.ShardingHashLabel] == "" {
				return fmt.Errorf("%s/%s has none", cm.Namespace, cm.Name)
			}
		}
		return nil
	})
	assert.GreaterOrEqual(t, len(all.Items), 4*perSpace)
	for i := range all.Items {
		check(&all.Items[i])
	}
	// Objects are stamped at creation, not a moment later; the labels cannot be removed.
	cm := &corev1.ConfigMap{}
	cm.Namespace, cm.Name = m.home, "stamped"
	create(t, cm)
	check(cm)
	cm.Labels = nil
	require.NoError(t, cluster.Update(t.Context(), cm))
	check(cm)
}

// kubectl prints the status.
func (m *members) testStatus(t *testing.T) {
	table, err := cluster.Kubectl(t.Context(), "-n", m.home, "get", "shardingconfig", "-o", "wide")
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(table), "\n")
	require.Len(t, lines, 1+len(m.pods), table)
	assert.Equal(t, strings.Fields("NAME SHARDS MEMBERS READY METHOD HANDOVER ROLLOUT LOCK STATE AGE"), strings.Fields(lines[0]))
	for i, line := range lines[1:] {
		cells := strings.Fields(line) // Fields omits empty columns
		assert.Equal(t, []string{m.shard(i), "1", "1", "1", "Labels", "AllMembersReady"}, cells[:len(cells)-1], table)
	}
	for i, pod := range m.pods {
		c := settled(t, m.home, m.shard(i), 1)
		require.Len(t, c.Status.Pods, 1)
		got := c.Status.Pods[0]
		assert.Equal(t, pod.Name, got.Name)
		assert.Equal(t, pod.Spec.NodeName, got.Node)
		assert.Contains(t, []string{"ebpf", "iptables"}, got.Capture)
		assert.NotEmpty(t, got.PolicyVersion)
		assert.Empty(t, got.Message)
		for kind, want := range map[string]bool{
			meshv1alpha1.ConditionReady: true, meshv1alpha1.ConditionProgressing: false, meshv1alpha1.ConditionDegraded: false,
		} {
			assert.Equal(t, want, meta.IsStatusConditionTrue(c.Status.Conditions, kind), "%s: %+v", kind, c.Status.Conditions)
		}
	}
}

// All requests of members so far went through the mesh, and no request of the pod outside.
func (m *members) testTraffic(t *testing.T) {
	for _, pod := range m.pods {
		traffic, err := cluster.Traffic(t.Context(), audit.Callers{Pods: []string{pod.Namespace + "/" + pod.Name}})
		require.NoError(t, err)
		assert.NotEmpty(t, traffic.Requests)
		assert.Empty(t, traffic.Leaked, never)
	}
	outside, err := cluster.Requests(audit.Callers{Pods: []string{m.home + "/" + m.direct.Name}})
	require.NoError(t, err)
	require.NotEmpty(t, outside)
	lines, err := cluster.AccessLines()
	require.NoError(t, err)
	assert.Len(t, audit.Leaked(outside, lines), len(outside), never+": a request of an unlabelled pod went through the mesh")
	for _, l := range lines {
		assert.NotEqual(t, m.home+"/"+m.direct.Name, l.Pod)
	}
}

// A member trusts only the mesh. An unlabelled pod is unchanged.
func (m *members) testTrust(t *testing.T) {
	const file = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
	var root corev1.ConfigMap
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: m.home, Name: "kube-root-ca.crt"}, &root))
	clusterCA := root.Data["ca.crt"]

	assert.Equal(t, clusterCA, in(t, m.direct, "cat", file))
	assert.Contains(t, sources(m.direct), root.Name)
	assert.NotContains(t, m.direct.Annotations, meshv1alpha1.TrustAnnotation)
	assert.Len(t, listeners(t, m.direct), 1, "only its own")
	for _, pod := range m.pods {
		meshCA := in(t, pod, "cat", file)
		assert.Contains(t, meshCA, "BEGIN CERTIFICATE")
		assert.NotContains(t, meshCA, strings.TrimSpace(clusterCA))
		assert.NotContains(t, sources(pod), root.Name)
		assert.Equal(t, meshv1alpha1.TrustMesh, pod.Annotations[meshv1alpha1.TrustAnnotation])
		assert.Greater(t, len(listeners(t, pod)), 1, "its own and the mesh's")
	}
}

// A client that takes the apiserver's CA from elsewhere reaches no apiserver. The status and an
// Event of the pod say why.
func (m *members) testDistrust(t *testing.T) {
	config := from(t, m.pods[0])
	config.CAData = []byte(in(t, m.direct, "cat", account+"ca.crt"))
	require.ErrorContains(t, clientOf(t, config, inJSON).List(t.Context(), &corev1.ConfigMapList{}), unknownAuthority)
	until(t, "the status to say so", func(ctx context.Context) error {
		c := &meshv1alpha1.ShardingConfig{}
		if err := cluster.Get(ctx, client.ObjectKey{Namespace: m.home, Name: m.shard(0)}, c); err != nil {
			return err
		}
		degraded := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionDegraded)
		return orElse(degraded.Reason == string(meshv1alpha1.ReasonMeshCANotTrusted) && strings.Contains(degraded.Message, "pod "+m.pods[0].Name), fmt.Sprint(degraded))
	})
	until(t, "an Event of the pod", func(ctx context.Context) error {
		var list eventsv1.EventList
		if err := cluster.List(ctx, &list, client.InNamespace(m.home)); err != nil {
			return err
		}
		return orElse(slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Name == m.pods[0].Name && e.Reason == string(meshv1alpha1.ReasonMeshCANotTrusted)
		}), fmt.Sprint(len(list.Items)))
	})
}

// sources returns the ConfigMaps that a pod's volumes project.
func sources(pod *corev1.Pod) []string {
	var out []string
	for _, v := range pod.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if s.ConfigMap != nil {
				out = append(out, s.ConfigMap.Name)
			}
		}
	}
	return out
}

// listeners returns the TCP sockets that listen in a pod's network namespace.
func listeners(t *testing.T, pod *corev1.Pod) []string {
	t.Helper()
	var out []string
	for line := range strings.SplitSeq(in(t, pod, "netstat", "-ltn"), "\n") {
		if strings.Contains(line, "LISTEN") {
			out = append(out, line)
		}
	}
	return out
}

// No log of the mesh contains a token, although agents log at debug level and clients send
// tokens in unusual places.
func (m *members) testTokens(t *testing.T) {
	const file = "/var/run/secrets/kubernetes.io/serviceaccount/token"
	var secrets []string
	for i, pod := range m.pods {
		in(t, pod, "kubectl", "create", "token", probeAccount) // a token in an answer's body
		bad := fmt.Sprintf("e30.eyJub25lIjoidGVzdC%d.c2lnbmF0dXJlLW9mLW5vYm9keQ", i)
		ask(t, pod, []string{"-H", "Authorization: Bearer " + bad}, http.MethodGet, "/api/v1/configmaps?limit=1", "/api/v1/configmaps?access_token="+bad)
		for _, token := range []string{strings.TrimSpace(in(t, pod, "cat", file)), bad} {
			secrets = append(secrets, strings.Split(token, ".")[1:]...) // the claims and the signature; the header is the same in every token
		}
	}
	secrets = append(secrets, "Bearer ")

	last := fmt.Sprintf("last-%d", time.Now().UnixNano())
	for _, pod := range m.pods {
		ask(t, pod, nil, http.MethodGet, "/api/v1/namespaces/"+m.home+"/configmaps/"+last)
	}
	until(t, "the agents' logs up to here", func(context.Context) error {
		if seen := strings.Count(meshLogs(t), last); seen < len(m.pods) {
			return fmt.Errorf("%d lines of the last requests, not %d", seen, len(m.pods))
		}
		return nil
	})
	logs := meshLogs(t)
	for _, secret := range secrets {
		assert.False(t, strings.Contains(logs, secret), "a part of a token is in a log: %s", secret)
	}
}

// meshLogs returns the logs of all agents and managers, including previous containers.
func meshLogs(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for _, workload := range []string{kube.AgentName, kube.ManagerName} {
		require.NoError(t, cluster.MeshLogs(workload, func(_ string, log io.Reader) error {
			_, err := io.Copy(&out, log)
			return err
		}))
	}
	return out.String()
}
