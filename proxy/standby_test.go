package proxy

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

func TestStandbyFindsNothing(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(true, twenty()...))
	c := m.client(true)
	for _, method := range []meshv1.Method{meshv1.Method_METHOD_AUTO, meshv1.Method_METHOD_LABELS, meshv1.Method_METHOD_FILTER} {
		for _, key := range []meshv1.Key{meshv1.Key_KEY_NAMESPACE, meshv1.Key_KEY_OBJECT} {
			s := policytest.Standby(method)
			s.Key = key
			m.policy(s)
			for form, accept := range forms {
				require.Empty(t, m.all(c, "/api/v1/configmaps", accept[0], 0), "%v %s", method, form)
				require.Empty(t, m.all(c, "/api/v1/namespaces/ns-1/configmaps", accept[0], 0), "%v %s", method, form)
				require.Empty(t, m.watched(c, "/api/v1/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", accept[1]), "%v %s", method, form)
			}
		}
	}
}

// TestStandbySettlesAfterEarlierWrites checks that a policy of standby is acknowledged
// only when no write that the policy before let through can take effect any more.
func TestStandbySettlesAfterEarlierWrites(t *testing.T) {
	t.Parallel()
	arrived, answer := make(chan struct{}), make(chan struct{})
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			arrived <- struct{}{}
			<-answer
		}
	}}
	m := newMesh(t, api)
	free := policytest.Standby(meshv1.Method_METHOD_AUTO)
	free.Standby, free.Limits[0].Scope = false, sharding.All().Proto()
	m.policy(free)
	written := make(chan int, 1)
	go func() {
		written <- m.with(m.client(true), "PUT", "/api/v1/namespaces/a/pods/a", "{}").StatusCode
	}()
	<-arrived
	settled := m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "2", Sharding: policytest.Standby(meshv1.Method_METHOD_AUTO)})
	select {
	case <-settled:
		t.Fatal("a write is under way")
	case <-time.After(50 * time.Millisecond):
	}
	close(answer)
	require.Equal(t, 200, <-written)
	select {
	case <-settled:
	case <-time.After(soon):
		t.Fatal("the standby has not settled")
	}
}

func TestLeavingStandbyRelists(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	m.restore(policytest.Standby(meshv1.Method_METHOD_AUTO), time.Time{})
	c := m.client(true)
	const pods, secrets = "/api/v1/pods?watch=1&resourceVersion=5", "/api/v1/secrets?watch=1&resourceVersion=5"
	quiet, other := m.open(c, pods), m.open(c, secrets)
	granted := policytest.Standby(meshv1.Method_METHOD_AUTO)
	granted.Standby, granted.Limits[0].Scope = false, sharding.Keys("a").Proto()
	m.policy(granted)
	require.NoError(t, <-quiet)
	require.Equal(t, 410, m.with(c, "GET", pods, "").StatusCode)
	select {
	case err := <-other:
		t.Fatal("a watch of another resource ended:", err)
	default:
	}
}
