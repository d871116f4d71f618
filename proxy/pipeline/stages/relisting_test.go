package stages

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

const podsFromFive = "/api/v1/pods?watch=1&allowWatchBookmarks=true&resourceVersion=5"

// filtering is a shard whose lists are filtered.
func filtering(keys ...string) *meshv1.Sharding {
	s := policytest.Owning(keys...)
	s.Method = meshv1.Method_METHOD_FILTER
	return s
}

func TestListsAndWatchesEnterTheLedger(t *testing.T) {
	for _, c := range []struct {
		query                    string
		fills, initial, unmarked bool
		want                     int // under a policy that is new
	}{
		{"", true, false, false, 200},
		{"?continue=x", false, false, false, 200},
		{"?watch=1&sendInitialEvents=true", true, true, false, 200},
		{"?watch=1", false, false, true, 200},
		{"?watch=1&resourceVersion=0", false, false, true, 200},
		{"?watch=1&resourceVersion=5", false, false, false, 410},
	} {
		t.Run(c.query, func(t *testing.T) {
			m := newPod(t)
			m.policy(nil)
			x := m.state("GET", "/api/v1/pods"+c.query, "")
			a := m.decide(x)
			require.Equal(t, c.want, a.code, a.body)
			require.Equal(t, c.fills, x.Resumption.Fills)
			require.Equal(t, c.initial, x.Resumption.Initial != nil)
			require.Equal(t, c.unmarked, x.Narrowed.Unmarked)
			if c.want == 410 {
				require.Equal(t, meshv1.RefusedRelist, a.reason)
				require.Contains(t, a.body, "list again")
			}
			m.env.Ledger.Age(time.Hour)
			require.Equal(t, 200, m.do("GET", "/api/v1/secrets"+c.query, "").code, "what an old policy has filled is right")
		})
	}
}

func TestListUnderAnEarlierPolicyStartsOver(t *testing.T) {
	m := newPod(t)
	before := m.policy(nil)
	m.policy(filtering("a"))
	require.Same(t, pipeline.Restart, before.Evaluate(m.state("GET", "/api/v1/pods", "")))
}

// gain has a client watch what a shard of namespace a sees, until the shard gets b.
func gain(t *testing.T) *pod {
	m := newPod(t)
	pol := m.policy(filtering("a"))
	m.env.Ledger.Age(time.Hour)
	x := m.state("GET", podsFromFive, "")
	require.Nil(t, pol.Evaluate(x))
	m.policy(filtering("a", "b"))
	require.ErrorIs(t, context.Cause(x.Ctx), relist.ErrPolicyChanged, "the watch ends")
	x.Resumption.Leave()
	x.Memory.Release()
	return m
}

func TestWritesOfGainedObjectsAwaitCaches(t *testing.T) {
	m := gain(t)
	for _, c := range []struct {
		method, target string
		want           int
	}{
		{"PUT", "/api/v1/namespaces/a/pods/x", 200},
		{"PUT", "/api/v1/namespaces/b/pods/x", 409},
		{"DELETE", "/api/v1/namespaces/b/pods/x", 409},
		{"GET", "/api/v1/namespaces/b/pods/x", 200},
		{"POST", "/api/v1/namespaces/b/events", 200}, // no decision about objects
		{"PUT", "/api/v1/namespaces/c/pods/x", 403},
	} {
		a := m.do(c.method, c.target, "{}")
		require.Equal(t, c.want, a.code, "%+v: %s", c, a.body)
		if c.want == 409 {
			require.Equal(t, meshv1.RefusedCatchUp, a.reason)
		}
	}
	m.env.Ledger.Age(relist.CatchUp + relist.Deciding)
	require.Equal(t, 200, m.do("PUT", "/api/v1/namespaces/b/pods/x", "{}").code, "the cache is awaited no longer")
}

func TestStaleListsAskForAnEarlierVersion(t *testing.T) {
	const configMaps = "/api/v1/namespaces/ns/configmaps"
	m := newPod(t)
	m.faults(&meshv1.FaultRule{
		Resources: []*meshv1.ResourceMatch{{Resources: []string{"configmaps"}}},
		StaleList: &meshv1.StaleList{AgeNs: int64(time.Hour), Percent: 100},
	})
	version := "11"
	m.api = func(*upstream.Request) upstream.Response {
		return response(200, typeJSON, `{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"`+version+`"},"items":[]}`)
	}
	for _, c := range []struct{ target, want, version string }{
		{configMaps, configMaps, ""}, // nothing was seen before
		{configMaps + "?limit=7", configMaps + "?limit=7&resourceVersion=11&resourceVersionMatch=Exact", "11"},
		{configMaps + "?limit=7&continue=token", configMaps + "?limit=7&continue=token", ""}, // of the same version as the first piece
		{"/api/v1/secrets", "/api/v1/secrets", ""},
	} {
		a := m.do("GET", c.target, "", "Accept-Encoding", "gzip")
		require.Equal(t, 200, a.code)
		require.Equal(t, c.want, m.last().URI)
		require.Equal(t, c.version, a.Stale.Version)
		require.Equal(t, c.target == "/api/v1/secrets", m.last().Header.Get("Accept-Encoding") != "", "versions must be readable")
		version = "13"
	}
	a := m.do("GET", configMaps+"?watch=1&sendInitialEvents=true", "")
	require.Equal(t, 422, a.code, "its client lists")
	require.Equal(t, meshv1.RefusedFault, a.reason)
}
