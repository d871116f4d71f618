package inject

import (
	"crypto/x509"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

var egressCA = func() []byte {
	ca, err := trust.NewCA("egress", func(*x509.Certificate) {}, time.Now())
	if err != nil {
		panic(err)
	}
	return ca.Bundle()
}()

// trusting is as the ServiceAccount admission leaves it.
const trusting = `{
  "metadata": {"name": "p", "namespace": "ns", "labels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"}, "annotations": {"ctrlmesh.kusionstack.io/trust-egress": "true"}},
  "spec": {"fieldOfTheFuture": {"a": 1}, "volumes": [{"name": "data", "emptyDir": {}}],
    "initContainers": [{"name": "bare"}],
    "containers": [
      {"name": "main", "env": [{"name": "A", "value": "b"}], "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
      {"name": "own", "env": [{"name": "SSL_CERT_DIR", "value": "/own"}]}]}
}`

func TestTrustEgress(t *testing.T) {
	w := newWebhook(t)
	r, m := create(t, w, trusting, false)
	got, err := yaml.Marshal(m)
	require.NoError(t, err)
	golden := filepath.Join("testdata", "egress.yaml")
	if os.Getenv("UPDATE") != "" {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(golden, got, 0o600))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
	require.Len(t, r.Warnings, 1)
	require.Contains(t, r.Warnings[0], "container own: SSL_CERT_DIR is set")

	annotations := m["metadata"].(map[string]any)["annotations"].(map[string]any)
	require.Equal(t, "true", annotations[v1alpha1.EgressTrustAnnotation])

	cm := ensured(t, w, EgressBundle)
	require.Len(t, cm.Data, 2)
	for _, content := range cm.Data {
		require.Equal(t, string(egressCA), content)
	}
	require.True(t, w.Bundles.Right(cm))
	require.NotContains(t, ensured(t, w, BothBundle).Data["ca.crt"], string(egressCA), "never trusted for the apiserver")

	again, err := json.Marshal(m)
	require.NoError(t, err)
	r, m2 := create(t, w, string(again), false)
	require.Empty(t, r.Patches)
	require.Equal(t, m, m2)
}

func TestOthersDoNotTrustEgress(t *testing.T) {
	w := newWebhook(t)
	claims := strings.Replace(trusting, `egress": "true"`, `egress": "false", "ctrlmesh.kusionstack.io/egress-trust": "true"`, 1)
	_, m := create(t, w, claims, false)
	require.NotContains(t, m["metadata"].(map[string]any)["annotations"], v1alpha1.EgressTrustAnnotation, "it is not for users to say")
	require.Len(t, m["spec"].(map[string]any)["volumes"], 1)
	_, m = create(t, w, trusting, true)
	require.Len(t, m["spec"].(map[string]any)["volumes"], 2)
	require.True(t, apierrors.IsNotFound(w.Bundles.Client.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: EgressBundle}, &corev1.ConfigMap{})), "a dry run writes nothing")

	w.Bundles.Egress = func() []byte { return nil }
	r, _ := create(t, w, trusting, false)
	require.False(t, r.Allowed)
}

// A pod without volumes, and one whose containers are given an environment before.
func TestTrustEgressWhereThereIsNothing(t *testing.T) {
	_, m := create(t, newWebhook(t), `{"metadata":{"namespace":"ns","annotations":{"ctrlmesh.kusionstack.io/trust-egress":"true"},"labels":{"ctrlmesh.kusionstack.io/enable-proxy":"true"}},"spec":{"containers":[{"name":"a"}]}}`, true)
	require.Len(t, m["spec"].(map[string]any)["volumes"], 1)

	p, _ := admit(t, newWebhook(t, agentService("10.96.0.20")), func(p *corev1.Pod) { p.Annotations[v1alpha1.TrustEgressAnnotation] = "true" })
	for _, c := range append(p.Spec.InitContainers, p.Spec.Containers...) {
		names := map[string]int{}
		for _, e := range c.Env {
			names[e.Name]++
		}
		require.Equal(t, 1, names["SSL_CERT_DIR"], c.Name)
		require.Equal(t, 1, names["NODE_EXTRA_CA_CERTS"], c.Name)
		require.Equal(t, 1, names["KUBERNETES_SERVICE_HOST"], c.Name)
		require.Equal(t, egressDir, c.VolumeMounts[len(c.VolumeMounts)-1].MountPath)
	}
}
