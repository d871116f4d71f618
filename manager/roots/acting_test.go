package roots

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
)

// acting returns the pods that act on anything.
func (m *mesh) acting() (uids []string) {
	for uid, p := range m.inForce {
		s := p.GetSharding()
		if p.Refuse != "" || s.GetStandby() || !s.GetDryRun() && len(s.GetLimits()) == 0 {
			continue
		}
		scope, err := sharding.FromProto(s.GetLimits()[0].GetScope())
		require.NoError(m, err)
		if s.GetDryRun() || !scope.Empty() {
			uids = append(uids, uid)
		}
	}
	return uids
}

// oneSpec requires that all pods that act do so by the same rules.
func (m *mesh) oneSpec() {
	m.Helper()
	first := ""
	for _, uid := range m.acting() {
		s := m.inForce[uid].GetSharding()
		lock := ""
		for _, l := range s.GetLocks() {
			lock += l.GetName() + " "
		}
		resources := ""
		for _, l := range s.GetLimits() {
			for _, r := range l.GetResources() {
				resources += r.String() + " "
			}
		}
		rules := s.GetKey().String() + s.GetMethod().String() + lock + resources
		if s.GetDryRun() {
			rules = "dry run"
		}
		if first == "" {
			first = rules
		}
		require.Equal(m, first, rules, "pods act by different specs")
	}
}

// A change of what decides who may act: one agent hears of everything later than the other.
func TestSpecChangesWhileNoShardOwnsAnything(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(*v1alpha1.ShardingConfig)
		field  string
		ends   func(m *mesh) bool
	}{
		"lock renamed": {
			func(c *v1alpha1.ShardingConfig) { c.Spec.Controller.LeaderElectionName = "other" }, "spec.controller",
			func(m *mesh) bool { return m.policies["uid-0-1"].GetSharding().GetLocks()[0].GetName() == "other" },
		},
		"resources": {
			func(c *v1alpha1.ShardingConfig) {
				c.Spec.Root.ResourceSelector[0].RelateResources[0].Resources = []string{"secrets"}
			}, "spec.root.resourceSelector",
			func(m *mesh) bool {
				return m.policies["uid-0-1"].GetSharding().GetLimits()[0].GetResources()[0].GetResources()[0] == "secrets"
			},
		},
		"method": {
			func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Method = v1alpha1.MethodFilter }, "spec.root.method",
			func(m *mesh) bool { return m.policies["uid-0-1"].GetSharding().GetMethod().String() == "METHOD_FILTER" },
		},
		"clusters": {
			func(c *v1alpha1.ShardingConfig) {
				c.Spec.Clusters = []v1alpha1.ClusterPath{{PathPrefix: "/clusters/*"}}
			}, "spec.clusters",
			func(m *mesh) bool { return len(m.policies["uid-0-1"].GetClusterPaths()) == 1 },
		},
		"key": { // admission refuses it
			func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Key = v1alpha1.KeyObject }, "spec.root.key",
			func(m *mesh) bool { return m.policies["uid-0-1"].GetSharding().GetKey().String() == "KEY_OBJECT" },
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, pods := sharded(t, 2)
			before := m.owned()
			late := string(pods[1].UID)
			m.change(func(c *v1alpha1.ShardingConfig) {
				c.Spec.Root.OnChange = v1alpha1.OnChangeRelist // no pod is replaced
				tt.change(c)
			})
			m.deaf[late] = true
			m.goOn(time.Minute, m.oneSpec)
			require.Equal(t, []string{late}, m.acting(), "the other has released everything")
			ready := m.ready()
			require.Equal(t, string(v1alpha1.ReasonSpecChanged), ready.Reason, "%s", ready.Message)
			require.Contains(t, ready.Message, tt.field)
			require.Equal(t, "ctrlmesh:ns/op", m.holder("lock"))

			m.deaf[late] = false
			m.goOn(time.Minute, m.oneSpec)
			if name != "key" {
				require.Equal(t, before, m.owned(), "no namespace moves")
			}
			require.Len(t, m.owned(), 2)
			require.Len(t, m.acting(), 2)
			require.True(t, tt.ends(m), "%v", m.policies["uid-0-1"])
			require.Equal(t, string(v1alpha1.ReasonSettled), m.ready().Reason, "%s", m.ready().Message)
		})
	}
}

func TestDryRunOfActingShardsBeginsWhenNoneOwnsAnything(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	late := string(pods[1].UID)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.DryRun, c.Spec.Root.OnChange = true, v1alpha1.OnChangeRelist })
	m.deaf[late] = true
	m.goOn(time.Minute, m.oneSpec)
	require.Equal(t, []string{late}, m.acting())
	m.deaf[late] = false
	m.goOn(time.Minute, m.oneSpec)
	require.Len(t, m.acting(), 2)
	for _, p := range m.policies {
		require.True(t, p.GetSharding().GetDryRun())
	}
	require.Empty(t, m.holder("lock"))
}

// A leader that cannot renew its lock in standby goes on until its lease ends. Under a dry run it
// would do so beside the others.
func TestSpecChangeWaitsForLeasesOfFormerLeaders(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 2)
	const lease = 30
	for _, shard := range m.get().Status.Root.Shards {
		m.leasedFor("leader", compile.UpstreamLock("lock", shard.Name), lease)
	}
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.DryRun, c.Spec.Root.OnChange = true, v1alpha1.OnChangeRelist })
	standing := func() bool { return strings.Contains(m.ready().Message, "whose leases last 30s") }
	for range 60 {
		if m.goOn(time.Second, m.oneSpec); standing() {
			break
		}
	}
	require.True(t, standing(), "%s", m.ready().Message)
	for range lease - 2 {
		require.Empty(t, m.acting())
		m.goOn(time.Second, m.oneSpec)
	}
	m.goOn(5*time.Second, m.oneSpec)
	require.Len(t, m.acting(), 2)
}

// The gate of the former spec may be closed, and that of the next one does not consider its pods.
func TestNoPodIsAssignedDuringASpecChange(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 2)
	m.pod(0)
	late := string(m.pod(2).UID)
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.OnChange, c.Spec.Controller.LeaderElectionName = v1alpha1.OnChangeRelist, "other"
	})
	m.deaf[late] = true
	m.goOn(10*time.Second, m.oneSpec)
	added := m.pod(1)
	m.goOn(time.Minute, m.oneSpec)
	require.Empty(t, m.shardOf(added))
	m.deaf[late] = false
	m.goOn(time.Minute, m.oneSpec)
	require.Equal(t, "op-1-normal", m.shardOf(added))
	require.Len(t, m.owned(), 2)
}

// Without an election, members of the former workload would act on the same keys as those of the
// next one.
func TestPodsOfAnotherWorkloadWaitForTheFormerMembers(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	m.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Controller, c.Spec.Root.OnChange = nil, v1alpha1.OnChangeRelist
	})
	former := m.pod(0)
	m.settle()
	m.refuseEvictions()
	next := m.pod(1)
	next.Name, next.ResourceVersion, next.OwnerReferences[0].Name = "next-0", "", "next"
	next.UID = "next"
	require.NoError(t, m.Create(t.Context(), next))
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.TargetStatefulSet = "next" })
	m.goOn(time.Minute, m.oneSpec)
	require.Equal(t, "next", m.get().Status.Root.Acting.TargetStatefulSet)
	require.Equal(t, []string{string(former.UID)}, m.acting())

	m.funcs.SubResourceCreate = nil
	m.goOn(2*time.Minute, m.oneSpec)
	require.Equal(t, []string{"next"}, m.acting(), "the former member is evicted")
	require.Len(t, m.owned(), 1)
}

// Under onChange Restart the members are replaced, because their caches have what they released.
func TestSpecChangeRestartsMembers(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Controller.LeaderElectionName = "other" })
	for range 20 {
		m.goOn(10*time.Second, m.oneSpec)
		m.replace(2)
	}
	require.Equal(t, string(v1alpha1.ReasonSettled), m.ready().Reason, "%s", m.ready().Message)
	require.Len(t, m.owned(), 2)
	for _, p := range pods {
		require.NotContains(t, m.acting(), string(p.UID))
	}
	require.Equal(t, "ctrlmesh:ns/op", m.holder("other"))
}

func TestSpecOfADeletedRootDoesNotChange(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	require.NoError(t, m.Delete(t.Context(), m.get()))
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Key = v1alpha1.KeyObject })
	m.deaf[string(pods[1].UID)] = true
	m.goOn(time.Minute, m.oneSpec)
}

// To name a lock that was discovered, or to reorder the resources, is no change.
func TestEqualSpecsAreNoChange(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 2)
	m.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Controller = &v1alpha1.ControllerConfig{Locks: []v1alpha1.LockReference{{Namespace: "ns", Name: "lock"}}}
		c.Spec.Root.TargetStatefulSet, c.Spec.Root.TargetRef = "", &v1alpha1.TargetRef{Kind: "StatefulSet", Name: "op"}
	})
	serials := func() map[types.UID]uint64 {
		out := map[types.UID]uint64{}
		for uid, p := range m.policies {
			out[uid] = p.GetSerial()
		}
		return out
	}
	before := serials()
	m.goOn(time.Minute, func() { require.Len(t, m.acting(), 2) })
	require.Equal(t, before, serials())
	require.Equal(t, []v1alpha1.LockReference{{Namespace: "ns", Name: "lock"}}, m.get().Status.Root.Acting.Controller.Locks)
}

// A new manager continues a change that the one before it began.
func TestSpecChangeSurvivesALeader(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	late := string(pods[1].UID)
	m.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.OnChange, c.Spec.Controller.LeaderElectionName = v1alpha1.OnChangeRelist, "other"
	})
	m.deaf[late] = true
	for range 20 {
		m.goOn(2*time.Second, m.oneSpec)
		m.lead()
	}
	m.deaf[late] = false
	m.goOn(5*time.Minute, m.oneSpec)
	require.Equal(t, string(v1alpha1.ReasonSettled), m.ready().Reason, "%s", m.ready().Message)
	require.Equal(t, "other", m.get().Status.Root.Acting.Controller.LeaderElectionName)
	require.Equal(t, "ctrlmesh:ns/op", m.holder("other"))
}

// A misspelt resource divides nothing, so each shard would act on all objects that were meant.
func TestUnknownResourcesGrantNothing(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	m.pod(0)
	m.pod(1)
	for _, undetermined := range []bool{false, true} {
		m.unknown = resources.Unknown{Message: "configmap: did you mean configmaps?", Undetermined: undetermined}
		m.goOn(time.Minute, nil)
		m.shardsOwnNothing()
		require.Empty(t, m.acting())
		require.Equal(t, string(v1alpha1.ReasonUnknownResource), m.ready().Reason)
		require.Contains(t, m.ready().Message, "did you mean configmaps?")
	}
	m.unknown = resources.Unknown{} // the definition was created
	m.goOn(time.Minute, nil)
	require.Len(t, m.owned(), 2)
	require.Equal(t, string(v1alpha1.ReasonSettled), m.ready().Reason)
}

func TestUnknownResourcesLeaveTheDivision(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 2)
	before := m.owned()
	m.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.OnChange = v1alpha1.OnChangeRelist
		c.Spec.Root.ResourceSelector[0].RelateResources[0].Resources = []string{"secret"}
	})
	m.unknown = resources.Unknown{Message: "secret: did you mean secrets?"}
	both := func() { require.Len(t, m.acting(), 2) }
	m.goOn(time.Minute, both)
	require.Equal(t, before, m.owned())
	require.Equal(t, "configmaps", m.policies["uid-0-1"].GetSharding().GetLimits()[0].GetResources()[0].GetResources()[0])
	require.Equal(t, string(v1alpha1.ReasonUnknownResource), m.ready().Reason)
	require.Contains(t, m.ready().Message, "former spec")

	m.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.ResourceSelector[0].RelateResources[0].Resources = []string{"secrets"}
	})
	m.unknown = resources.Unknown{}
	m.goOn(time.Minute, m.oneSpec)
	require.Len(t, m.acting(), 2)
	require.Equal(t, "secrets", m.policies["uid-0-1"].GetSharding().GetLimits()[0].GetResources()[0].GetResources()[0])

	// An aggregated API that fails, or a definition that is deleted, stops no shard.
	for _, undetermined := range []bool{true, false} {
		m.unknown = resources.Unknown{Message: "secrets: the apiserver cannot list", Undetermined: undetermined}
		m.goOn(time.Minute, both)
		require.Equal(t, undetermined, m.ready().Reason == string(v1alpha1.ReasonSettled), m.ready().Message)
	}
}
