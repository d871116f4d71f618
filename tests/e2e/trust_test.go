package e2e

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const unknownAuthority = "x509: certificate signed by unknown authority"

// A connection that is not redirected reaches the real apiserver, which the pod does not trust.
func TestPodsNotCapturedTrustNoApiserver(t *testing.T) {
	p := newPair(t)
	node := p.b.Spec.NodeName

	t.Run("no agent when the pod starts", func(t *testing.T) {
		restore := changedAgents(t, notOn(node))
		require.NoError(t, noPods(t.Context(), kube.AgentName, node))
		late := &member{netPod(p.namespace, "late", node), owned(t)}
		create(t, shard(p.namespace, "late", []string{"late"}, []string{late.owns}, "configmaps"), late.Pod)
		start := time.Now()
		late.Pod = ready(t, p.namespace, "late")
		require.Equal(t, meshv1alpha1.TrustMesh, late.Annotations[meshv1alpha1.TrustAnnotation])
		late.refused(t, unknownAuthority)
		says(t, 1, []string{"check"}, "agent-missing: node "+node)
		traffic, err := cluster.Traffic(t.Context(), audit.Callers{Pods: []string{p.namespace + "/late"}, Since: start})
		require.NoError(t, err)
		require.Empty(t, traffic.Requests)

		restore()
		late.works(t) // the same pod: it was not restarted when the agent started late
		settled(t, p.namespace, "late", 1)
	})

	t.Run("redirections removed", func(t *testing.T) {
		p.b.works(t)
		start := time.Now()
		restore := changedAgents(t, cleaners(t))
		for _, m := range []*member{p.a, p.b} {
			m.refused(t, unknownAuthority)
		}
		traffic, err := cluster.Traffic(t.Context(), audit.Callers{Pods: []string{p.namespace + "/a", p.namespace + "/b"}, Since: start})
		require.NoError(t, err)
		require.Empty(t, traffic.Leaked, never)

		restore()
		p.a.works(t)
		p.b.works(t)
	})
}

// cleaners returns a change of the agents into pods that remove every redirection from their
// nodes.
func cleaners(t *testing.T) func(*corev1.PodTemplateSpec) {
	t.Helper()
	manifests, err := cluster.Kubectl(t.Context(), "kustomize", filepath.Join(cluster.Root, "deploy", "cleanup"))
	require.NoError(t, err)
	for document := range strings.SplitSeq(manifests, "\n---\n") {
		a := &appsv1.DaemonSet{}
		if strings.Contains(document, "\nkind: DaemonSet\n") {
			require.NoError(t, yaml.Unmarshal([]byte(document), a))
			return func(s *corev1.PodTemplateSpec) { a.Spec.Template.DeepCopyInto(s) }
		}
	}
	require.Fail(t, "deploy/cleanup has no DaemonSet")
	return nil
}
