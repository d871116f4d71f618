package proxy

import (
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// What a pod requests is counted while its requests pass unchanged, for its owner.
// Events are read on their way, and pass as they are, also what cannot be read.
func TestEventsThatPassUnchangedAreCounted(t *testing.T) {
	t.Parallel()
	const (
		bookmark = `{"type":"BOOKMARK","object":{"kind":"ConfigMap","metadata":{"resourceVersion":"9"}}}` + "\n"
		added    = ` {"type":"ADDED","object":{"kind":"ConfigMap","metadata":{"namespace":"a","name":"x","resourceVersion":"9"}}}` + "\n\n"
		strange  = `{"type":"ADDED","object":{"metadata":{"namespace":1}}}` + "\n"
	)
	for name, c := range map[string]struct {
		contentType, body string
		header            []string
		events            int
	}{
		"JSON":                     {jsonType, bookmark + added + added, nil, 2},
		"what cannot be read":      {jsonType, added + strange + added, nil, 1},
		"cut short":                {jsonType, added + added[:20], nil, 1},
		"an unknown encoding":      {"application/cbor", added, nil, 0},
		"compressed by the server": {jsonType, added, []string{"Accept-Encoding", "gzip"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", c.contentType)
				if of := r.Header.Get("Accept-Encoding"); of != "" {
					w.Header().Set("Content-Encoding", of)
				}
				_, _ = io.WriteString(w, c.body)
			}}
			m := newMesh(t, api)
			m.policy(nil)
			a := m.do("GET", allConfigMaps+"?watch=true", "", c.header...)
			require.Equal(t, 200, a.StatusCode)
			require.Equal(t, c.body, a.body)
			is := m.pod.Usage().GetResources()
			require.Len(t, is, 1)
			require.EqualValues(t, c.events, is[0].GetEvents())
		})
	}
}

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
	observed := limitTo("shard=a")
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
	m.policy(limitTo("shard=a"))
	require.Nil(t, m.pod.Usage(), "a shard costs nothing more")
	work()
	m.policy(nil)
	require.EqualValues(t, 7, m.pod.Usage().GetRequests())
}
