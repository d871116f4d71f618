package proxy

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

func TestRequestsThatPassUnchangedAreCounted(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPatch {
			w.WriteHeader(http.StatusConflict)
		}
	}}
	m := newMesh(t, api)
	require.Nil(t, m.pod.Usage())
	work := func() {
		m.do("GET", "/apis/example.com/v1/foos", "")
		m.do("PUT", "/apis/example.com/v1/namespaces/a/foos/x", "{}")
		m.do("PATCH", "/apis/example.com/v1/namespaces/a/foos/x/status", "{}", "Content-Type", "application/merge-patch+json")
		m.do("GET", "/version", "")
	}
	observed := policytest.LimitTo("shard=a")
	observed.DryRun = true
	for name, sharding := range map[string]*meshv1.Sharding{"without a configuration": nil, "with a dry run": observed} {
		t.Run(name, func(t *testing.T) {
			before := m.pod.Usage().GetRequests()
			m.policy(sharding)
			work()
			is := m.pod.Usage()
			require.Equal(t, before+3, is.GetRequests())
			require.Len(t, is.GetResources(), 1)
			foos := is.GetResources()[0]
			require.True(t, foos.GetAll())
			require.Equal(t, foos.GetWrites(), foos.GetConflicts())
			require.Equal(t, "a", foos.GetNamespaces()[0].GetNamespace())
			require.False(t, foos.GetIndivisible())
		})
	}
	m.policy(nil)
	m.do("GET", "/apis/example.com/v1/foos", "", "Accept", "application/cbor")
	require.True(t, m.pod.Usage().GetResources()[0].GetIndivisible())
	m.policy(policytest.LimitTo("shard=a"))
	require.Nil(t, m.pod.Usage(), "a shard costs nothing more")
	work()
	m.policy(nil)
	require.EqualValues(t, 7, m.pod.Usage().GetRequests())
}
