package stages

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// withoutCluster is a shard that owns namespace mine, and no objects in no namespace.
func withoutCluster(resources ...string) *meshv1.Sharding {
	s := policytest.Owning("mine")
	s.ReadAll, s.ClusterScopedOwner = true, "op-default"
	s.Limits[0].Resources = policytest.Core(resources...)
	return s
}

func TestOneShardWritesClusterScopedObjects(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	undivided, divided := withoutCluster("pods"), withoutCluster("*")
	divided.Limits[0].Resources[0].ApiGroups = []string{"*"}
	fenced := withoutCluster("pods")
	fenced.FenceNamespaces = true
	for _, q := range []struct {
		method, target, body       string
		undivided, divided, fenced int
	}{
		{"POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles", "{}", 403, 403, 403},
		{"PATCH", "/api/v1/nodes/a", "{}", 403, 403, 403},
		{"PATCH", "/api/v1/nodes/a/status", "{}", 403, 403, 403},
		{"DELETE", "/api/v1/persistentvolumes/a", "", 403, 403, 403},
		{"DELETE", "/api/v1/persistentvolumes", "", 403, 403, 403},
		{"GET", "/api/v1/nodes/a/proxy/stats", "", 403, 403, 403},
		{"GET", "/api/v1/nodes/a", "", 200, 200, 200},
		{"GET", "/api/v1/nodes", "", 200, 200, 200},
		{"GET", "/api/v1/nodes?watch=1", "", 200, 200, 200},
		{"GET", "/api/v1/namespaces/mine", "", 200, 200, 200},
		{"POST", "/apis/authentication.k8s.io/v1/tokenreviews", "{}", 200, 200, 200},
		{"POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", "{}", 200, 200, 200},
		{"POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", "{}", 200, 200, 200},
		{"POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", "{}", 200, 200, 200},
		{"PUT", "/api/v1/namespaces/mine/pods/a", "{}", 200, 200, 200},
		{"PUT", "/api/v1/namespaces/theirs/pods/a", "{}", 403, 403, 403},
		{"POST", "/api/v1/namespaces", `{"metadata":{"name":"mine"}}`, 403, 200, 403},
		{"POST", "/api/v1/namespaces", `{"metadata":{"name":"theirs"}}`, 403, 403, 403},
		{"PATCH", "/api/v1/namespaces/mine", "{}", 403, 200, 200},
		{"PATCH", "/api/v1/namespaces/theirs", "{}", 403, 403, 403},
	} {
		for name, v := range map[string]struct {
			s    *meshv1.Sharding
			want int
		}{"undivided": {undivided, q.undivided}, "divided": {divided, q.divided}, "fenced": {fenced, q.fenced}} {
			m.policy(v.s)
			a := m.do(q.method, q.target, q.body)
			require.Equal(t, v.want, a.code, "%s: %s %s: %s", name, q.method, q.target, a.body)
		}
	}
	m.policy(undivided)
	refused := m.do("DELETE", "/api/v1/nodes/a", "").status
	require.Equal(t, metav1.StatusReasonForbidden, refused.Reason)
	require.Equal(t, "ctrlmesh: delete nodes: a cluster-scoped object does not belong to this pod's shard, ShardingConfig ns/s1: shard op-default alone writes cluster-scoped objects", refused.Message)
}

func TestIsolationAppliesToClusterScopedObjects(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	for isolation, observed := range map[meshv1.Isolation]float64{meshv1.Isolation_ISOLATION_OBSERVE: 1, meshv1.Isolation_ISOLATION_OFF: 0} {
		s := withoutCluster("pods")
		s.Isolation = isolation
		m.policy(s)
		before := testutil.ToFloat64(m.env.Metrics.Foreign.WithLabelValues("ns", "operator", "s1", "delete", "observed"))
		require.Equal(t, 200, m.do("DELETE", "/api/v1/nodes/a", "").code)
		require.Equal(t, observed, testutil.ToFloat64(m.env.Metrics.Foreign.WithLabelValues("ns", "operator", "s1", "delete", "observed"))-before)
	}
	dry := withoutCluster("pods")
	dry.DryRun = true
	m.policy(dry)
	require.Equal(t, 200, m.do("DELETE", "/api/v1/nodes/a", "").code)
	require.EqualValues(t, 1, testutil.ToFloat64(m.env.Metrics.DryRun.WithLabelValues("ns", "operator", "s1", "delete", "refused")))
}

func TestEveryShardWritesSharedClusterScopedObjects(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := withoutCluster("pods")
	s.Shared = []*meshv1.SharedObjects{
		{Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"nodes", "namespaces"}}}, Names: []string{"one"}, WriteAll: true},
		{Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"persistentvolumes"}}}, WriteAll: true},
		{Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"*"}, Resources: []string{"*"}}}, Namespaces: []string{"ns"}, WriteAll: true},
		{Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"*"}, Resources: []string{"*"}}}},
	}
	m.policy(s)
	for _, q := range []struct {
		method, target, body string
		want                 int
	}{
		{"PATCH", "/api/v1/nodes/one", "{}", 200},
		{"PATCH", "/api/v1/nodes/two", "{}", 403},
		{"POST", "/api/v1/nodes", `{"metadata":{"name":"one"}}`, 200},
		{"POST", "/api/v1/nodes", `{"metadata":{"name":"two"}}`, 403},
		{"DELETE", "/api/v1/nodes", "", 403},
		{"PATCH", "/api/v1/namespaces/one", "{}", 200},
		{"PATCH", "/api/v1/namespaces/two", "{}", 403},
		{"PATCH", "/api/v1/namespaces/ns", "{}", 200}, // its own
		{"POST", "/api/v1/persistentvolumes", "{}", 200},
		{"DELETE", "/apis/storage.k8s.io/v1/storageclasses/a", "", 403},
	} {
		a := m.do(q.method, q.target, q.body)
		require.Equal(t, q.want, a.code, "%s %s %s: %s", q.method, q.target, q.body, a.body)
	}
}

func TestStandbyWritesNoClusterScopedObjects(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := policytest.Standby(meshv1.Method_METHOD_AUTO)
	s.Limits[0].Resources[0].ApiGroups = []string{"", "authorization.k8s.io"}
	s.Limits[0].Resources[0].Resources = append(s.Limits[0].Resources[0].Resources, "subjectaccessreviews")
	for owner, want := range map[string][]int{"": {200, 503, 503}, "op-default": {503, 503, 200}} {
		s.ClusterScopedOwner = owner
		for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_ENFORCE, meshv1.Isolation_ISOLATION_OFF} {
			s.Isolation = isolation
			m.policy(s)
			require.Equal(t, want[0], m.do("DELETE", "/apis/storage.k8s.io/v1/storageclasses/a", "").code)
			require.Equal(t, want[1], m.do("DELETE", "/api/v1/nodes/a", "").code)
			require.Equal(t, want[2], m.do("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", "{}").code)
		}
	}
}
