package proxy

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
	"github.com/ctrlmesh/ctrlmesh/proxy/activity"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// ofTwo is a shard of a root, beside another.
func ofTwo(s *meshv1.Sharding) *meshv1.Sharding {
	s = proto.CloneOf(s)
	s.Owners = []*meshv1.Owner{{Shard: s.GetShard()}, {Shard: "other"}}
	return s
}

// counting puts a policy in force under which all writes count from now on.
func (m *mesh) counting(s *meshv1.Sharding) {
	m.t.Helper()
	m.policy(s)
	m.pod.env.Observations.Activity.Reset(time.Now().Add(-activity.Grace))
	m.pod.Activity()
}

// activityOf returns what the pod did to the objects of a resource; nil: nothing.
func (m *mesh) activityOf(resource string) *meshv1.ResourceActivity {
	for _, a := range m.pod.Activity() {
		if a.GetResource() == resource {
			return a
		}
	}
	return nil
}

func TestWritesOfUndividedResourcesCount(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "missing") {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = io.WriteString(w, `{}`)
	}})
	tenant, node := sample.Key("tenant", ""), sample.Key("", "n1")
	object := sample.Key("tenant", "a")
	lease := `{"metadata":{"name":"leases"},"spec":{"holderIdentity":"pod_1"}}`
	unshared := ofTwo(policytest.Owning("mine"))
	shared := ofTwo(policytest.Owning("mine"))
	shared.Shared = []*meshv1.SharedObjects{{
		Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"secrets"}}}, Namespaces: []string{"tenant"}, WriteAll: true,
	}}
	standby := ofTwo(policytest.Owning())
	standby.Standby = true
	withLock := ofTwo(policytest.Owning("mine"))
	withLock.Locks = []*meshv1.Lock{{Namespace: "tenant", Name: "leader", UpstreamName: "leader---s1"}}
	for _, q := range []struct {
		name           string
		policy         *meshv1.Sharding
		method, target string
		body, resource string
		writes         int
		keys           []uint64
	}{
		{"update", unshared, "PUT", "/api/v1/namespaces/tenant/secrets/a", `{}`, "secrets", 1, []uint64{tenant}},
		{"create", unshared, "POST", "/api/v1/namespaces/tenant/secrets", `{}`, "secrets", 1, []uint64{tenant}},
		{"subresource", unshared, "PATCH", "/apis/apps/v1/namespaces/tenant/deployments/a/status", `{}`, "deployments", 1, []uint64{tenant}},
		{"in no namespace", unshared, "PUT", "/api/v1/nodes/n1", `{}`, "nodes", 1, []uint64{node}},
		{"created in no namespace", unshared, "POST", "/api/v1/nodes", `{}`, "nodes", 1, nil},
		{"by object", ofTwo(policytest.ByObject("pods")), "PUT", "/api/v1/namespaces/tenant/secrets/a", `{}`, "secrets", 1, []uint64{object}},
		{"created by object", ofTwo(policytest.ByObject("pods")), "POST", "/api/v1/namespaces/tenant/secrets", `{}`, "secrets", 1, nil},
		{"read", unshared, "GET", "/api/v1/namespaces/tenant/secrets/a", "", "secrets", 0, nil},
		{"failed", unshared, "PUT", "/api/v1/namespaces/tenant/secrets/missing", `{}`, "secrets", 0, nil},
		{"dry run", unshared, "PUT", "/api/v1/namespaces/tenant/secrets/a?dryRun=All", `{}`, "secrets", 0, nil},
		{"shared", shared, "PUT", "/api/v1/namespaces/tenant/secrets/a", `{}`, "secrets", 0, nil},
		{"shared elsewhere", shared, "PUT", "/api/v1/namespaces/other/secrets/a", `{}`, "secrets", 1, []uint64{sample.Key("other", "")}},
		{"Event", unshared, "POST", "/api/v1/namespaces/tenant/events", `{}`, "events", 0, nil},
		{"lock", withLock, "PUT", "/api/v1/namespaces/tenant/configmaps/leader", `{"metadata":{"name":"leader","resourceVersion":"1"}}`, "configmaps", 0, nil},
		{"beside the lock", withLock, "PUT", "/api/v1/namespaces/tenant/configmaps/other", `{"metadata":{"name":"other"}}`, "configmaps", 1, []uint64{tenant}},
		{"Lease", unshared, "PUT", "/apis/coordination.k8s.io/v1/namespaces/tenant/leases/leases---s1", lease, "leases", 0, nil},
		{"object of the mesh", unshared, "PUT", "/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/tenant/shardingconfigs/a", `{}`, "shardingconfigs", 0, nil},
		{"review", unshared, "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", `{}`, "subjectaccessreviews", 0, nil},
		{"token", unshared, "POST", "/api/v1/namespaces/tenant/serviceaccounts/a/token", `{}`, "serviceaccounts", 0, nil},
		{"standby", standby, "PUT", "/api/v1/namespaces/tenant/secrets/a", `{}`, "secrets", 0, nil},
		{"hand-written shard", policytest.Owning("mine"), "PUT", "/api/v1/namespaces/tenant/secrets/a", `{}`, "secrets", 0, nil},
	} {
		t.Run(q.name, func(t *testing.T) {
			m.counting(q.policy)
			m.do(q.method, q.target, q.body, "Content-Type", "application/json")
			a := m.activityOf(q.resource)
			require.EqualValues(t, q.writes, a.GetWrites())
			require.False(t, a.GetDivided())
			require.Equal(t, q.keys, a.GetKeys())
		})
	}
}

// Isolation lets such writes pass if the configuration says so.
func TestForeignWritesOfDividedResourcesCount(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	loose := func(i meshv1.Isolation) *meshv1.Sharding {
		s := ofTwo(policytest.Owning("mine"))
		s.Isolation = i
		return s
	}
	everyones := ofTwo(policytest.Owning("mine"))
	everyones.Shared = []*meshv1.SharedObjects{{Resources: everyones.Limits[0].Resources, Names: []string{"a"}, WriteAll: true}}
	for _, q := range []struct {
		name, target    string
		policy          *meshv1.Sharding
		writes, foreign int
	}{
		{"own", "/api/v1/namespaces/mine/pods/a", loose(meshv1.Isolation_ISOLATION_OBSERVE), 1, 0},
		{"refused", "/api/v1/namespaces/theirs/pods/a", loose(meshv1.Isolation_ISOLATION_ENFORCE), 0, 0},
		{"observed", "/api/v1/namespaces/theirs/pods/a", loose(meshv1.Isolation_ISOLATION_OBSERVE), 1, 1},
		{"off", "/api/v1/namespaces/theirs/pods/a", loose(meshv1.Isolation_ISOLATION_OFF), 1, 1},
		{"exception", "/api/v1/namespaces/theirs/pods/a", everyones, 1, 1},
	} {
		t.Run(q.name, func(t *testing.T) {
			m.counting(q.policy)
			m.do("PATCH", q.target, `{}`, "Content-Type", "application/merge-patch+json")
			a := m.activityOf("pods")
			require.EqualValues(t, q.writes, a.GetWrites())
			require.EqualValues(t, q.foreign, a.GetForeignWrites())
			require.Equal(t, q.writes > 0, a.GetDivided())
			require.Empty(t, a.GetKeys())
		})
	}
}

func TestOpenWatchesOfAllNamespacesCount(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	m := newMesh(t, &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		select {
		case <-end:
		case <-r.Context().Done():
		}
	}})
	m.counting(ofTwo(policytest.Owning("mine")))
	watch := func(target string) *http.Response {
		resp, err := m.client(true).Get("https://kubernetes.default.svc" + target)
		require.NoError(t, err)
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	watch("/api/v1/namespaces/tenant/secrets?watch=1")
	watch("/api/v1/services?watch=1&fieldSelector=metadata.name%3Da")
	watch("/api/v1/nodes?watch=1")
	all := watch("/api/v1/configmaps?watch=1")
	require.Eventually(t, func() bool { return m.activityOf("configmaps").GetWatched() && m.activityOf("nodes").GetWatched() }, soon, time.Millisecond)
	require.Nil(t, m.activityOf("secrets"))
	require.Nil(t, m.activityOf("services"))
	close(end)
	_, _ = io.Copy(io.Discard, all.Body)
	require.Eventually(t, func() bool { return m.activityOf("configmaps") == nil }, soon, time.Millisecond)
}

// After a handover, a shard may still write what another reconciles by now.
func TestChangedDivisionStartsCountsAnew(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.counting(ofTwo(policytest.Owning("mine")))
	write := func() {
		m.do("PUT", "/api/v1/namespaces/tenant/secrets/a", `{}`, "Content-Type", "application/json")
	}
	write()
	m.policy(ofTwo(policytest.Owning("mine")))
	require.EqualValues(t, 1, m.activityOf("secrets").GetWrites(), "the same division")
	m.policy(ofTwo(policytest.Owning("mine", "tenant")))
	write()
	require.Nil(t, m.pod.Activity())
}
