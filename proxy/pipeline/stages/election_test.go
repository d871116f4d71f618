package stages

import (
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"fmt"
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
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

const (
	recordJSON = `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"op"},"spec":{"holderIdentity":"other-1_x","leaseDurationSeconds":15,"acquireTime":"2030-01-01T00:00:00.000000Z","renewTime":"2030-01-01T00:00:00.000000Z","leaseTransitions":1}}`
	annotated  = `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"op","annotations":{"control-plane.alpha.kubernetes.io/leader":"{\"holderIdentity\":\"me\"}"}},"data":{"a":%q}}`
)

func TestRecordsOfUnknownLocksAreRefused(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	small, large := fmt.Sprintf(annotated, "b"), fmt.Sprintf(annotated, strings.Repeat("b", 1<<17))
	heartbeat := `{"metadata":{"name":"node-1"},"spec":{"holderIdentity":"node-1","leaseDurationSeconds":40,"renewTime":"2030-01-01T00:00:00.000000Z"}}`
	released := strings.Replace(recordJSON, "other-1_x", "", 1)
	const leases, other = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", "/api/v1/namespaces/kube-system"
	sharded := policytest.Locked("s1")
	sharded.Limits = []*meshv1.Limit{{Selector: "a=b"}}
	for name, s := range map[string]*meshv1.Sharding{"sharded": sharded, "standby": policytest.Standby(meshv1.Method_METHOD_AUTO)} {
		m.policy(s)
		named := s.Locks[0]
		for _, q := range []struct {
			method, target, body string
			found                bool
		}{
			{"POST", leases, strings.Replace(recordJSON, `"op"`, `"another"`, 1), true},
			{"PUT", leases + "/another", recordJSON, true},
			{"PATCH", leases + "/another", recordJSON, true},
			{"PUT", other + "/configmaps/another", small, true},
			{"POST", other + "/endpoints", strings.Replace(small, `"op"`, `"another"`, 1), true},
			{"PUT", leases + "/node-1", heartbeat, false},
			{"PUT", leases + "/another", released, false},
			{"PUT", leases + "/another---s1", recordJSON, false},
			{"PUT", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node-1", recordJSON, false},
			{"POST", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", recordJSON, false},
			{"PUT", other + "/configmaps/another", large, false}, // too large to be looked at
			{"PUT", other + "/configmaps/another", `{"data":{"a":"b"}}`, false},
			{"PUT", other + "/secrets/another", small, false},
			{"DELETE", leases + "/another", "", false},
		} {
			if name == "standby" && !q.found {
				continue // leases and configmaps are divided there
			}
			m.env.Observations.Observed = lock.Observations{}
			a := m.do(q.method, q.target, q.body)
			if !q.found {
				require.Equal(t, 200, a.code, "%s %s %s: %s", name, q.method, q.target, a.body)
				require.Equal(t, q.body, m.last().Body)
				require.Empty(t, m.observed())
				continue
			}
			require.Equal(t, 503, a.code, "%s %s %s: %s", name, q.method, q.target, a.body)
			require.Equal(t, "1", a.retryAfter())
			require.Contains(t, a.body, "kube-system/another")
			seen := m.observed()
			require.Len(t, seen, 1)
			require.True(t, seen[0].Written)
			require.Equal(t, "kube-system/another", seen[0].Namespace+"/"+seen[0].Name)
			require.Contains(t, q.target, seen[0].Resource)
		}
		m.env.Observations.Observed = lock.Observations{}
		a := m.do("PUT", "/apis/coordination.k8s.io/v1/namespaces/"+named.Namespace+"/leases/"+named.Name, recordJSON)
		require.Equal(t, map[string]int{"sharded": 200, "standby": 503}[name], a.code, a.body)
		require.Empty(t, m.observed(), "the policy names it")
	}
	m.policy(nil)
	require.Equal(t, 200, m.do("PUT", leases+"/another", recordJSON).code, "a pod that is no member")
}

func TestPolledLocksAreObserved(t *testing.T) {
	t.Parallel()
	answer := recordJSON
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response { return response(200, typeJSON, answer) }
	m.policy(policytest.LimitTo("a=b"))
	const target = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/op"
	require.Equal(t, answer, m.do("GET", target, "").body)
	require.Equal(t, []lock.Observed{{Namespace: "kube-system", Name: "op", Resource: "leases", Holder: "other-1_x", Written: false}}, m.observed())
	require.Equal(t, 503, m.do("PUT", target, recordJSON).code)
	require.Equal(t, []lock.Observed{{Namespace: "kube-system", Name: "op", Resource: "leases", Holder: "other-1_x", Written: true}}, m.observed(), "the holder stays known")

	named := policytest.LimitTo("a=b")
	named.Locks = []*meshv1.Lock{{Namespace: "kube-system", Name: "op", UpstreamName: "op---s1"}}
	m.policy(named)
	require.Empty(t, m.observed(), "the policy names it now")
	m.do("GET", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node-1", "")
	require.Empty(t, m.observed(), "a heartbeat")

	m.policy(policytest.LimitTo("a=b"))
	for _, of := range []string{"pod_1", "pod", "", strings.Repeat("x", 1<<17)} {
		m.env.Observations.Observed = lock.Observations{}
		answer = strings.Replace(recordJSON, "other-1_x", of, 1)
		require.Equal(t, answer, m.do("GET", target, "").body)
		require.Empty(t, m.observed(), "held by %.10s", of)
	}
}

// A mutex between operators has the record of an election.
func TestExcludedLocksPass(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response { return response(200, typeJSON, recordJSON) }
	excludes := []*meshv1.ExcludedLock{{Namespace: "kube-system", Name: "op"}, {Namespace: "kube-system", Name: "node-*"}}
	const leases = "/apis/coordination.k8s.io/v1/namespaces/"
	for name, s := range map[string]*meshv1.Sharding{"sharded": policytest.LimitTo("a=b"), "dry run": {Shard: "s1", DryRun: true}} {
		s.ExcludedLocks = excludes
		m.policy(s)
		for _, q := range []struct{ method, target string }{
			{"GET", leases + "kube-system/leases/op"}, {"PUT", leases + "kube-system/leases/op"}, {"PATCH", leases + "kube-system/leases/node-1"}, {"POST", leases + "kube-system/leases"},
		} {
			a := m.do(q.method, q.target, recordJSON)
			require.Equal(t, 200, a.code, "%s: %s %s", name, q.method, q.target)
			require.Equal(t, q.target, m.last().URI, "under its own name")
		}
		require.Empty(t, m.observed(), name)
	}
	m.policy(&meshv1.Sharding{Shard: "s1", Limits: []*meshv1.Limit{{Selector: "a=b"}}, ExcludedLocks: excludes})
	for _, other := range []string{"kube-system/leases/op2", "kube-system/leases/nod", "ns/leases/op"} {
		a := m.do("PUT", leases+other, recordJSON)
		require.Equal(t, 503, a.code, other)
		require.Contains(t, a.body, "spec.controller.excludedLocks")
	}
}

// kube-controller-manager as a member finds the mesh's CA in its own volumes and
// publishes it to every namespace.
func TestMeshCAIsNotPublished(t *testing.T) {
	t.Parallel()
	m, ca := newPod(t), certs.New()
	block, _ := pem.Decode(ca.PEM())
	chain := &tls.Certificate{Certificate: [][]byte{ca.Leaf("a").Certificate[0], block.Bytes}}
	m.env.Leaf = func() (*tls.Certificate, error) { return chain, nil }
	cluster, mesh := string(certs.New().PEM()), string(ca.PEM())

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
	sharded := policytest.LimitTo("a=b")
	dry := policytest.LimitTo("a=b")
	dry.DryRun = true
	for name, s := range map[string]*meshv1.Sharding{"member": sharded, "dry run": dry, "no shard": nil} {
		m.policy(s)
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
			require.Equal(t, q.code, a.code, "%s: %s: %s", name, q.what, a.body)
			if q.code == 403 {
				require.Contains(t, a.body, "--root-ca-file")
				require.Equal(t, meshv1.RefusedMeshCA, a.reason)
				require.Equal(t, metav1.StatusReasonForbidden, a.status.Reason)
			}
		}
	}
}
