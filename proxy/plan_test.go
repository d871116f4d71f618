package proxy

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

func namesOf(s pipeline.Stages) string {
	var names []string
	for _, one := range s {
		_, name, _ := strings.Cut(fmt.Sprintf("%T", one), ".")
		names = append(names, strings.TrimSuffix(name, "Stage"))
	}
	return strings.Join(names, " ")
}

func TestPlanHasOnlyStagesWithSomethingToDo(t *testing.T) {
	t.Parallel()
	own := divided(sharding.Keys("ns"), meshv1.Method_METHOD_SERVER_SIDE)
	for _, c := range []struct {
		name, verb, resource, subresource string
		sharding                          *meshv1.Sharding
		traffic                           *meshv1.Traffic
		want                              string
	}{
		{"nothing divided", "get", "pods", "", nil, nil, "upgrade admission forwardedHeader audit"},
		{"list of all", "list", "pods", "", nil, nil, "upgrade admission forwardedHeader relist audit"},
		{"list of a shard", "list", "pods", "", own, nil, "upgrade admission forwardedHeader narrow relist audit"},
		{"write of a shard", "update", "pods", "", own, nil, "upgrade admission forwardedHeader fence catchUp audit"},
		{"connection", "create", "pods", "exec", own, nil, "upgrade admission forwardedHeader fence audit connect"},
		{"lock", "update", "leases", "", locked("s1"), nil, "upgrade admission forwardedHeader lock election audit readmission"},
		{"other rules", "get", "secrets", "", nil, decided{limits: limitsOf("pods")}.traffic(), "upgrade admission forwardedHeader audit"},
		{"limit", "get", "pods", "", nil, decided{limits: limitsOf("pods")}.traffic(), "upgrade admission forwardedHeader audit limit"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMesh(t, &recorder{})
			m.set(&meshv1.PodPolicy{Sharding: c.sharding, Traffic: c.traffic})
			group := ""
			if c.resource == "leases" {
				group = "coordination.k8s.io"
			}
			pol := m.pod.env.Policy.Load()
			require.Equal(t, "certificate classify token", namesOf(pol.Gate))
			plan := pol.Plan(&pipeline.Request{Info: &apirequest.RequestInfo{IsResourceRequest: true, Verb: c.verb, APIGroup: group, Resource: c.resource, Subresource: c.subresource}})
			require.Equal(t, c.want, namesOf(plan.Stages))
		})
	}
}

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
