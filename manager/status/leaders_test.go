package status

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

func TestLeadersOfAShard(t *testing.T) {
	a := &meshv1.Lock{Namespace: "ns", Name: "a", UpstreamName: "a---s"}
	b := &meshv1.Lock{Namespace: "kube-system", Name: "b", UpstreamName: "b---s"}
	member := func(name string, ready bool, held ...string) LedMember {
		return LedMember{Name: name, Ready: ready, Observation: push.Observation{LockReport: push.LockReport{HeldLocks: held}}}
	}
	waiting := func(m LedMember, holder string) LedMember {
		m.ObservedLocks = []push.ObservedLock{{Namespace: "kube-system", Name: "real", Resource: "leases", Holder: holder}}
		return m
	}
	for name, c := range map[string]struct {
		led    Led
		pod    string
		reason v1alpha1.Reason // of what is missing after a while; empty if nothing is
	}{
		"one lock":                   {Led{Locks: []*meshv1.Lock{a}, Members: []LedMember{member("x", true), member("y", true, "ns/a")}}, "y", ""},
		"a lock each":                {Led{Locks: []*meshv1.Lock{a, b}, Members: []LedMember{member("x", true, "kube-system/b"), member("y", true, "ns/a")}}, "y,x", ""},
		"one of two locks":           {Led{Locks: []*meshv1.Lock{a, b}, Members: []LedMember{member("y", true, "ns/a")}}, "y", v1alpha1.ReasonNoLeader},
		"no lock":                    {Led{Members: []LedMember{member("x", true)}}, "", ""},
		"no ready member":            {Led{Locks: []*meshv1.Lock{a}, Members: []LedMember{member("x", false, "ns/a")}}, "", v1alpha1.ReasonNoReadyMember},
		"no member":                  {Led{}, "", v1alpha1.ReasonNoReadyMember},
		"a leader that is not ready": {Led{Locks: []*meshv1.Lock{a}, Members: []LedMember{member("x", false, "ns/a"), member("y", true)}}, "", v1alpha1.ReasonNoLeader},
		"another lock":               {Led{Locks: []*meshv1.Lock{a}, Members: []LedMember{waiting(member("x", true), "z")}}, "", v1alpha1.ReasonUnknownLock},
		"no lock is known, and all wait for one": {
			Led{Members: []LedMember{waiting(member("x", true), "z"), waiting(member("y", true), "z")}}, "", v1alpha1.ReasonUnknownLock},
		"all wait for a lock that was discovered": {
			Led{Members: []LedMember{waiting(member("x", true), "z")}, Listed: []v1alpha1.LockStatus{{Namespace: "kube-system", Name: "real"}}}, "", v1alpha1.ReasonHeldOutside},
		"one of two looks at a lock":            {Led{Members: []LedMember{waiting(member("x", true), "z"), member("y", true)}}, "", ""},
		"they look at a lock of the mesh":       {Led{Members: []LedMember{waiting(member("x", true), "ctrlmesh:ns/other")}}, "", ""},
		"they look at a lock that nobody holds": {Led{Members: []LedMember{waiting(member("x", true), "")}}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c.led.Name = "s"
			now := time.Unix(1e9, 0)
			var since map[string]time.Time
			find := func(now time.Time, shards ...Led) (leaders map[string]Leader) {
				leaders, since = FindLeaders(shards, since, func(string, string) string { return "z" }, now)
				return leaders
			}
			is := find(now, c.led)["s"]
			require.Equal(t, c.pod, is.Pod)
			require.Nil(t, is.Missing, "it may just begin")
			is = find(now.Add(LeaderlessAfter), c.led)["s"]
			if c.reason == "" {
				require.Nil(t, is.Missing)
				return
			}
			require.Equal(t, c.reason, is.Missing.Reason)
			require.Contains(t, is.Missing.Message, "shard s has no")
			require.Equal(t, c.reason != v1alpha1.ReasonNoReadyMember, is.contends())

			find(now.Add(LeaderlessAfter)) // it was not to act in between
			require.Nil(t, find(now.Add(2*LeaderlessAfter), c.led)["s"].Missing)
		})
	}
}

// refusedBy returns the observation of a member whose requests for a lock are refused.
func refusedBy(refusals ...push.LockRefusal) push.Observation {
	return push.Observation{LockReport: push.LockReport{Refusals: refusals}}
}

func TestMissingLeaderNamesWhatTheAPIServerRefuses(t *testing.T) {
	const denied = `User "system:serviceaccount:op:sa" cannot update resource "configmaps" in API group "" in the namespace "kube-system"`
	refused := func(name, resource, verb string, code int, message string) push.LockRefusal {
		return push.LockRefusal{Namespace: "kube-system", Name: name, Resource: resource, Verb: verb, Code: code, Message: message}
	}
	const prefix = "shard s has no leader: none of its 2 ready pods holds lock kube-system/op---s, which nobody holds"
	for name, c := range map[string]struct {
		first, second push.Observation
		message       string // after prefix
	}{
		"nothing": {push.Observation{}, push.Observation{}, ""},
		"update of a ConfigMap": {refusedBy(refused("op", "configmaps", "update", 403, denied)), push.Observation{},
			`; the apiserver answers 403 to pod op-0 for "update configmaps kube-system/op---s": ` + denied +
				"; run kubectl -n kube-system create role ctrlmesh-shard-op.s-configmaps --verb=get,update,patch --resource=configmaps --resource-name=op---s" +
				" && kubectl -n kube-system create rolebinding ctrlmesh-shard-op.s-configmaps --role=ctrlmesh-shard-op.s-configmaps --serviceaccount=op:sa"},
		"read of two Leases by both": {
			refusedBy(refused("op", "leases", "get", 403, "")), refusedBy(refused("op", "leases", "get", 403, ""), refused("other", "leases", "get", 403, "")),
			`; the apiserver answers 403 to pod op-0 and 1 more for "get leases kube-system/op---s"` +
				"; run kubectl -n kube-system create role ctrlmesh-shard-op.s-leases --verb=get,update,patch --resource=leases.coordination.k8s.io --resource-name=op---s --resource-name=other---s" +
				" && kubectl -n kube-system create rolebinding ctrlmesh-shard-op.s-leases --role=ctrlmesh-shard-op.s-leases --serviceaccount=op:sa"},
		"creation, which RBAC does not permit by name": {push.Observation{}, refusedBy(refused("op", "endpoints", "create", 403, "")),
			`; the apiserver answers 403 to pod op-1 for "create endpoints kube-system/op---s"` +
				"; run kubectl -n kube-system create role ctrlmesh-shard-op.s-endpoints-create --verb=create --resource=endpoints" +
				" && kubectl -n kube-system create rolebinding ctrlmesh-shard-op.s-endpoints-create --role=ctrlmesh-shard-op.s-endpoints-create --serviceaccount=op:sa"},
		"by a watch": {refusedBy(refused("op", "leases", "watch", 403, "")), push.Observation{},
			`; the apiserver answers 403 to pod op-0 for "watch leases kube-system/op---s"` +
				"; run kubectl -n kube-system create role ctrlmesh-shard-op.s-leases --verb=get,update,patch,watch --resource=leases.coordination.k8s.io --resource-name=op---s" +
				" && kubectl -n kube-system create rolebinding ctrlmesh-shard-op.s-leases --role=ctrlmesh-shard-op.s-leases --serviceaccount=op:sa"},
		"a webhook": {refusedBy(refused("op", "leases", "update", 403, `admission webhook "x" denied the request`)), push.Observation{},
			`; the apiserver answers 403 to pod op-0 for "update leases kube-system/op---s": admission webhook "x" denied the request` +
				"; this is not RBAC: change the admission policy, webhook or quota that forbids it"},
		"a lock that nobody creates": {refusedBy(refused("op", "leases", "get", 404, "")), push.Observation{},
			`; the apiserver answers 404 to pod op-0 for "get leases kube-system/op---s"; the operator does not create it: run ` +
				`echo '{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"namespace":"kube-system","name":"op---s"}}' | kubectl create -f -`},
		"no namespace": {refusedBy(refused("op", "leases", "create", 404, "")), push.Observation{},
			`; the apiserver answers 404 to pod op-0 for "create leases kube-system/op---s"; create namespace kube-system`},
		"no token": {refusedBy(refused("op", "leases", "get", 401, "Unauthorized")), push.Observation{},
			`; the apiserver answers 401 to pod op-0 for "get leases kube-system/op---s": Unauthorized; the token of its ServiceAccount is not valid`},
		"a failing webhook": {refusedBy(refused("op", "leases", "update", 500, "Internal error occurred")), push.Observation{},
			`; the apiserver answers 500 to pod op-0 for "update leases kube-system/op---s": Internal error occurred`},
		"another lock and this one": {
			refusedBy(refused("op", "leases", "get", 404, "")), refusedBy(refused("other", "leases", "update", 403, "x"), refused("op", "leases", "update", 403, "y")),
			`; the apiserver answers 403 to pod op-1 for "update leases kube-system/op---s": y; this is not RBAC: change the admission policy, webhook or quota that forbids it`},
		"a lock of another policy": {refusedBy(refused("former", "leases", "get", 403, "")), push.Observation{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var since map[string]time.Time
			led := Led{Name: "s", Config: types.NamespacedName{Namespace: "op", Name: "root"}, Locks: []*meshv1.Lock{
				{Namespace: "kube-system", Name: "op", UpstreamName: "op---s"}, {Namespace: "kube-system", Name: "other", UpstreamName: "other---s"},
			}, Members: []LedMember{{Name: "op-0", Account: "sa", Ready: true, Observation: c.first}, {Name: "op-1", Account: "sa", Ready: true, Observation: c.second}}}
			nobody := func(string, string) string { return "" }
			now := time.Unix(1e9, 0)
			round := func(after time.Duration) *locks.Obstacle {
				var leaders map[string]Leader
				leaders, since = FindLeaders([]Led{led}, since, nobody, now.Add(after))
				return leaders["s"].Missing
			}
			require.Nil(t, round(0))
			missing := round(LeaderlessAfter)
			require.Equal(t, v1alpha1.ReasonNoLeader, missing.Reason)
			require.Equal(t, prefix+c.message, missing.Message)

			led.Members[0].HeldLocks = []string{"kube-system/op", "kube-system/other"}
			require.Nil(t, round(2*LeaderlessAfter), "it leads")
		})
	}
}

func TestShardWithoutReadyMemberNamesWhatTheAPIServerRefuses(t *testing.T) {
	led := Led{Name: "s", Locks: []*meshv1.Lock{{Namespace: "ns", Name: "op", UpstreamName: "op---s"}}, Members: []LedMember{
		{Name: "op-0", Observation: refusedBy(push.LockRefusal{Namespace: "ns", Name: "op", Resource: "configmaps", Verb: "create", Code: 500})},
	}}
	now := time.Unix(1e9, 0)
	_, since := FindLeaders([]Led{led}, nil, nil, now)
	leaders, _ := FindLeaders([]Led{led}, since, nil, now.Add(LeaderlessAfter))
	missing := leaders["s"].Missing
	require.Equal(t, v1alpha1.ReasonNoReadyMember, missing.Reason)
	require.Contains(t, missing.Message, `no working owner; the apiserver answers 500 to pod op-0 for "create configmaps ns/op---s"`)
}
