package stages

import (
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

func TestResumedWatchBeginsWithWhatTheShardGained(t *testing.T) {
	const (
		items = `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":[` +
			`{"metadata":{"namespace":"a","name":"had","uid":"1"}},{"metadata":{"namespace":"b","name":"gained","uid":"2"}},{"metadata":{"namespace":"c","name":"foreign","uid":"3"}}]}`
		event = `{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"b","name":"next","uid":"4"}}}` + "\n"
	)
	for name, c := range map[string]struct {
		watch, accept string
		list          upstream.Response
		want          int
	}{
		"supplement":                {podsFromFive, typeJSON, response(200, typeJSON, items), 200},
		"another version":           {podsFromFive, typeJSON, response(200, typeJSON, strings.Replace(items, `"5"`, `"6"`, 1)), 410},
		"a list that fails":         {podsFromFive, typeJSON, response(500, typeJSON, "{}"), 410},
		"a list of another type":    {podsFromFive, typeJSON, response(200, "application/cbor", ""), 410},
		"a table":                   {podsFromFive, typeJSON + ";as=Table;v=v1;g=meta.k8s.io", response(200, typeJSON, items), 410},
		"a client without bookmark": {strings.Replace(podsFromFive, "allowWatchBookmarks=true&", "", 1), typeJSON, response(200, typeJSON, items), 410},
	} {
		t.Run(name, func(t *testing.T) {
			m := gain(t)
			m.api = func(r *upstream.Request) upstream.Response {
				if strings.Contains(r.Target, "watch=") {
					return response(200, typeJSON, event)
				}
				return c.list
			}
			a := m.do("GET", c.watch, "", "Accept", c.accept)
			require.Equal(t, c.want, a.code, a.body)
			if c.want == 410 {
				require.Equal(t, meshv1.RefusedRelist, a.reason)
				return
			}
			require.NoError(t, a.err)
			events := strings.Split(strings.TrimSpace(a.body), "\n")
			require.Len(t, events, 3)
			for i, want := range []string{`"gained"`, `"BOOKMARK"`, `"next"`} {
				require.Contains(t, events[i], want)
			}
			list, err := url.Parse(m.last().URI)
			require.NoError(t, err)
			require.Equal(t, url.Values{"resourceVersion": {"5"}, "resourceVersionMatch": {"Exact"}}, list.Query())
		})
	}
}
