package proxy

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func limitsOf(resource string) []*meshv1.LimitRule {
	return limitsAbout(1, func(_ int, r *meshv1.LimitRule) {
		r.Resources = []*meshv1.ResourceMatch{{ApiGroups: []string{""}, Resources: []string{resource}, Verbs: []string{"get"}}}
	})
}

// answered returns ctrlmesh_requests_total by verb, resource and code.
func (m *mesh) answered() map[string]int {
	m.t.Helper()
	families, err := m.registry.Gather()
	require.NoError(m.t, err)
	out := map[string]int{}
	for _, f := range families {
		if f.GetName() != "ctrlmesh_requests_total" {
			continue
		}
		for _, series := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range series.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			out[labels["verb"]+" "+labels["resource"]+" "+labels["code"]] += int(series.GetCounter().GetValue())
		}
	}
	return out
}

func TestRequestsCountRefusalsOfGate(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy         *meshv1.PodPolicy
		method, target string
		header         []string
		want           string
	}{
		"no policy":     {nil, "GET", "/api/v1/pods", nil, "unclassified  503"},
		"contradiction": {&meshv1.PodPolicy{Version: "v", Refuse: "two configurations"}, "GET", "/api/v1/pods", nil, "unclassified  503"},
		"malformed":     {&meshv1.PodPolicy{Version: "v"}, "GET", "/api/v1/namespaces/a/..", nil, "unclassified  400"},
		"token":         {&meshv1.PodPolicy{Version: "v"}, "GET", "/api/v1/namespaces/a/pods", []string{"Authorization", "Bearer " + jwt("uid-2")}, "list pods 403"},
		"token, path":   {&meshv1.PodPolicy{Version: "v"}, "GET", "/version", []string{"Authorization", "Bearer " + jwt("uid-2")}, "get  403"},
		"not refused":   {&meshv1.PodPolicy{Version: "v"}, "GET", "/api/v1/namespaces/a/pods", nil, "list pods 200"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, &recorder{})
			if test.policy != nil {
				m.set(test.policy)
			}
			m.do(test.method, test.target, "", test.header...)
			require.Equal(t, map[string]int{test.want: 1}, m.answered())
		})
	}
}

func TestRequestsCountConnectionsClosedWithoutResponse(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.faults(&meshv1.FaultRule{Reset_: &meshv1.Reset{Percent: 100}})
	_, err := m.client(true).Do(asking(t, t.Context(), "GET", deployment))
	require.Error(t, err)
	require.Eventually(t, func() bool { return m.answered()["get deployments other"] == 1 }, soon, time.Millisecond)
}
