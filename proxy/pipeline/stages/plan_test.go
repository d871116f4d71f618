package stages

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
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
	own := policytest.Divided(sharding.Keys("ns"), meshv1.Method_METHOD_SERVER_SIDE)
	dry := proto.CloneOf(own)
	dry.DryRun = true
	limits := &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "b", Rules: []*meshv1.LimitRule{{
		Name: "r", Key: "k", MaxInFlight: 1, Trigger: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
		Resources: []*meshv1.ResourceMatch{{ApiGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}}},
	}}}}}
	const first = "upgrade charge forwardedHeader "
	for _, c := range []struct {
		name     string
		key      match.Kind
		sharding *meshv1.Sharding
		traffic  *meshv1.Traffic
		want     string
	}{
		{"nothing divided", match.Kind{Verb: "get", Resource: "pods"}, nil, nil, "audit"},
		{"path", match.Kind{Verb: "get"}, own, nil, "audit"},
		{"list of all", match.Kind{Verb: "list", Resource: "pods"}, nil, nil, "relist audit"},
		{"list of a shard", match.Kind{Verb: "list", Resource: "pods"}, own, nil, "narrow relist audit"},
		{"write of a shard", match.Kind{Verb: "update", Resource: "pods"}, own, nil, "fence catchUp audit"},
		{"connection", match.Kind{Verb: "create", Resource: "pods", Subresource: "exec"}, own, nil, "fence audit connect"},
		{"lock", match.Kind{Verb: "update", Group: "coordination.k8s.io", Resource: "leases"}, policytest.Locked("s1"), nil, "lock election audit recharge"},
		{"dry run of a list", match.Kind{Verb: "list", Resource: "pods"}, dry, nil, "dryNarrow relist audit"},
		{"dry run of a write", match.Kind{Verb: "update", Resource: "pods"}, dry, nil, "fence audit"},
		{"standby", match.Kind{Verb: "update", Resource: "pods"}, policytest.Standby(meshv1.Method_METHOD_AUTO), nil, "standby audit"},
		{"other rules", match.Kind{Verb: "get", Resource: "secrets"}, nil, limits, "audit"},
		{"limit", match.Kind{Verb: "get", Resource: "pods"}, nil, limits, "audit limit"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pol := newPod(t).set(&meshv1.PodPolicy{Sharding: c.sharding, Traffic: c.traffic})
			require.Equal(t, "certificate classify token", namesOf(pol.Plans.Gate))
			require.Equal(t, first+c.want, namesOf(pol.make(c.key).Stages))
		})
	}
}

// A nil pointer in a plan would be a stage, and fail with the first request.
func TestNoStageIsANilPointer(t *testing.T) {
	dry, root, shadowed, denied := withoutClusterScoped(), withoutClusterScoped(), policytest.Locked("s1"), policytest.Owning("mine")
	dry.DryRun, dry.Locks, dry.DeniedUserAgents = true, policytest.Locked("s1").Locks, []string{"a"}
	shadowed.Shadow = &meshv1.Shadow{}
	denied.DeniedUserAgents, denied.UserAgent = []string{"a"}, "b"
	rules := &meshv1.Traffic{
		Breakers: []*meshv1.Breaker{{Name: "b", Rules: []*meshv1.LimitRule{{Name: "r", Key: "k", MaxInFlight: 1, Resources: []*meshv1.ResourceMatch{{}}}}}},
		Injections: []*meshv1.Injection{{Name: "i", Rules: []*meshv1.FaultRule{{
			Name: "r", Key: "f", StaleList: &meshv1.StaleList{AgeNs: 1, Percent: 1}, Resources: []*meshv1.ResourceMatch{{}},
		}}}},
	}
	constructors := slices.Concat(gateStages, firstStages, memberClusterStages, shardingStages, lastStages)
	made := make([]bool, len(constructors))
	for _, m := range []*meshv1.PodPolicy{
		{}, {Refuse: "two configurations"}, {AnyToken: true, Traffic: rules}, {Sharding: policytest.Owning("mine")}, {Sharding: policytest.ByObject("pods")},
		{Sharding: dry}, {Sharding: root}, {Sharding: policytest.Standby(meshv1.Method_METHOD_AUTO)}, {Sharding: shadowed}, {Sharding: denied},
		{Sharding: policytest.Divided(sharding.Keys("ns"), meshv1.Method_METHOD_AUTO)}, {Sharding: policytest.LimitTo("a=b")},
		{Sharding: &meshv1.Sharding{Shard: "s1", Key: meshv1.Key_KEY_CLUSTER, Limits: []*meshv1.Limit{{
			Scope: sharding.Keys("mine").Proto(), Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"cluster.karmada.io"}, Resources: []string{"clusters"}}},
		}}}},
	} {
		pol := newPod(t).set(m)
		for _, verb := range []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"} {
			for _, key := range []match.Kind{
				{}, {Resource: "pods"}, {Resource: "pods", Subresource: "exec"}, {Resource: "nodes"}, {Resource: "configmaps"}, {Resource: "secrets"},
				{Group: "coordination.k8s.io", Resource: "leases"}, {Resource: "pods", MemberCluster: true},
			} {
				key.Verb = verb
				for i, construct := range constructors {
					s := construct(pol, key)
					if s == nil {
						continue
					}
					made[i] = true
					v := reflect.ValueOf(s)
					require.False(t, v.Kind() == reflect.Pointer && v.IsNil(), "%T for %+v under %v: return nil, not a pointer that is nil", s, key, m)
				}
			}
		}
	}
	require.NotContains(t, made, false, "no policy of this test makes a stage by the constructor of this index")
}

// withoutClusterScoped is a shard of a root that writes no objects in no namespace, and shares some.
func withoutClusterScoped() *meshv1.Sharding {
	s := policytest.Owning("mine")
	s.ReadAll, s.FenceNamespaces, s.ClusterScopedOwner = true, true, "op-default"
	s.Shared = []*meshv1.SharedObjects{{Resources: policytest.Core("pods"), Namespaces: []string{"shared"}, WriteAll: true}}
	return s
}
