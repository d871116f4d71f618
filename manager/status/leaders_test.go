package status

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
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
			Led{Members: []LedMember{waiting(member("x", true), "z")}, Known: []v1alpha1.LockStatus{{Namespace: "kube-system", Name: "real"}}}, "", v1alpha1.ReasonHeldOutside},
		"one of two looks at a lock":            {Led{Members: []LedMember{waiting(member("x", true), "z"), member("y", true)}}, "", ""},
		"they look at a lock of the mesh":       {Led{Members: []LedMember{waiting(member("x", true), "ctrlmesh:ns/other")}}, "", ""},
		"they look at a lock that nobody holds": {Led{Members: []LedMember{waiting(member("x", true), "")}}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var l Leaders
			c.led.Name = "s"
			now := time.Unix(1e9, 0)
			holder := func(string, string) string { return "z" }
			is := l.Round([]Led{c.led}, holder, now)["s"]
			require.Equal(t, c.pod, is.Pod)
			require.Nil(t, is.Missing, "it may just begin")
			is = l.Round([]Led{c.led}, holder, now.Add(LeaderlessAfter))["s"]
			if c.reason == "" {
				require.Nil(t, is.Missing)
				return
			}
			require.Equal(t, c.reason, is.Missing.Reason)
			require.Contains(t, is.Missing.Message, "shard s has no")
			require.Equal(t, c.reason != v1alpha1.ReasonNoReadyMember, is.contends())

			l.Round(nil, holder, now.Add(LeaderlessAfter)) // it was not to act in between
			require.Nil(t, l.Round([]Led{c.led}, holder, now.Add(2*LeaderlessAfter))["s"].Missing)
		})
	}
}
