package stages

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/usage"
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
		"JSON":                     {typeJSON, bookmark + added + added, nil, 2},
		"what cannot be read":      {typeJSON, added + strange + added, nil, 1},
		"cut short":                {typeJSON, added + added[:20], nil, 1},
		"an unknown encoding":      {"application/cbor", added, nil, 0},
		"compressed by the server": {typeJSON, added, []string{"Accept-Encoding", "gzip"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			m := newPod(t)
			m.api = func(r *upstream.Request) upstream.Response {
				resp := response(200, c.contentType, c.body)
				resp.Header.Set("Content-Encoding", r.Header.Get("Accept-Encoding"))
				return resp
			}
			m.policy(nil)
			a := m.do("GET", "/api/v1/configmaps?watch=true", "", c.header...)
			require.Equal(t, 200, a.code)
			require.Equal(t, c.body, a.body)
			m.env.Observations.Usage.Add(&usage.Request{}, time.Now()) // nothing is reported before a request is accounted
			var events uint64
			for _, r := range m.env.Observations.Usage.Report().GetResources() {
				events += r.GetEvents()
			}
			require.EqualValues(t, c.events, events)
		})
	}
}
