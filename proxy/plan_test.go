package proxy

import (
	"fmt"
	"strings"
	"testing"

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
			plan := pol.Plan(&apirequest.RequestInfo{IsResourceRequest: true, Verb: c.verb, APIGroup: group, Resource: c.resource, Subresource: c.subresource})
			require.Equal(t, c.want, namesOf(plan.Stages))
		})
	}
}

func limitsOf(resource string) []*meshv1.LimitRule {
	return limitsAbout(1, func(_ int, r *meshv1.LimitRule) {
		r.Resources = []*meshv1.ResourceMatch{{ApiGroups: []string{""}, Resources: []string{resource}, Verbs: []string{"get"}}}
	})
}
