package proxy

import (
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/certs"
)

// kube-controller-manager as a member finds the mesh's CA in its own volumes and
// publishes it to every namespace.
func TestMeshCAIsNotPublished(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	block, _ := pem.Decode(m.ca.PEM())
	served, err := m.server.config.Leaf()
	require.NoError(t, err)
	chain := &tls.Certificate{Certificate: [][]byte{served.Certificate[0], block.Bytes}, PrivateKey: served.PrivateKey}
	m.server.config.Leaf = func() (*tls.Certificate, error) { return chain, nil }
	cluster := string(certs.New().PEM())
	mesh := string(m.ca.PEM())

	configMap := func(name, ca string) *corev1.ConfigMap {
		return &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"ca.crt": ca}}
	}
	inJSON := func(name, ca string) string {
		body, err := json.Marshal(configMap(name, ca))
		require.NoError(t, err)
		return string(body)
	}
	inProtobuf, err := runtime.Encode(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), configMap("kube-root-ca.crt", mesh))
	require.NoError(t, err)
	const all, one = "/api/v1/namespaces/tenant/configmaps", "/api/v1/namespaces/tenant/configmaps/kube-root-ca.crt"
	sharded := limitTo("a=b")
	dry := limitTo("a=b")
	dry.DryRun = true
	counted := func() float64 {
		sum, _ := m.tally("ctrlmesh_refusals_total", "reason", "mesh_ca")
		return sum
	}
	for name, s := range map[string]*meshv1.Sharding{"member": sharded, "dry run": dry, "no shard": nil} {
		m.policy(s)
		before := counted()
		for _, q := range []struct {
			what, method, target, body, contentType string
			code                                    int
		}{
			{"create", "POST", all, inJSON("kube-root-ca.crt", mesh), "application/json", 403},
			{"create in protobuf", "POST", all, string(inProtobuf), runtime.ContentTypeProtobuf, 403},
			{"update", "PUT", one, inJSON("kube-root-ca.crt", cluster+mesh), "application/json", 403},
			{"patch", "PATCH", one, `{"data":` + strings.SplitN(inJSON("kube-root-ca.crt", mesh), `"data":`, 2)[1], "application/merge-patch+json", 403},
			{"create with the cluster's CA", "POST", all, inJSON("kube-root-ca.crt", cluster), "application/json", 200},
			{"update with the cluster's CA", "PUT", one, inJSON("kube-root-ca.crt", cluster), "application/json", 200},
			{"another ConfigMap", "PUT", all + "/kubeconfig", inJSON("kubeconfig", mesh), "application/json", 200},
			{"delete", "DELETE", one, "", "", 200},
		} {
			a := m.do(q.method, q.target, q.body, "Content-Type", q.contentType)
			require.Equal(t, q.code, a.StatusCode, "%s: %s: %s", name, q.what, a.body)
			if q.code == 403 {
				require.Contains(t, a.body, "--root-ca-file")
				require.Contains(t, a.body, `"reason":"Forbidden"`)
			}
		}
		require.InDelta(t, before+4, counted(), 0, name)
	}
}
