package status

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/undivided"
)

// rootInput is a root of two shards of one pod each, op-0 and op-1, that is settled.
func rootInput() *RootInput {
	yes := false
	in := &RootInput{
		Config: &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op", Generation: 3}},
		State:  handover.State{Shards: map[string]handover.Shard{}, Members: map[string]handover.Member{}},
		Common: Common{
			Wanted: func(string) string { return "5-v2" },
			Observe: func(_, _ string) push.Observation {
				o := fine
				o.Version = "5-v2" // of a shard, by its serial
				o.Methods = map[string]string{"pods": "Filter"}
				return o
			},
			Now: now, Since: now.Add(-time.Hour),
		},
	}
	in.Config.Spec.Root = &v1alpha1.RootConfig{
		Prefix: "op", TargetStatefulSet: "op", Disable: &yes,
		Auto: &v1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
	}
	for i, name := range []string{"op-1-normal", "op-2-normal"} {
		p := pod(fmt.Sprintf("op-%d", i))
		in.Pods = append(in.Pods, p)
		in.State.Shards[name] = handover.Shard{Serial: 5}
		in.State.Members[p.Name] = handover.Member{UID: p.Name, Name: p.Name, Node: "node1", Shard: name, Serial: 5}
		in.Root.Shards = append(in.Root.Shards, v1alpha1.ShardStatus{Name: name, Serial: 5, Namespaces: int32(i), Weight: 7})
	}
	return in
}

// move lets op-1-normal give keys to op-2-normal; op-0 has not confirmed.
func move(in *RootInput, phase handover.Phase, since time.Time) {
	m := handover.Move{From: "op-1-normal", To: "op-2-normal", Keys: sharding.Keys("a"), Phase: phase, Since: since}
	in.State.Moves = append(in.State.Moves, m)
	in.Root.Handovers = append(in.Root.Handovers, v1alpha1.HandoverStatus{From: m.From, To: m.To, Phase: string(phase)})
	for _, lags := range []string{m.From, m.To} {
		s := in.State.Shards[lags]
		s.Serial++
		in.State.Shards[lags] = s
	}
}

// Two shards that write the same objects may be an accident, or not.
func TestUndividedResourcesAreAWarning(t *testing.T) {
	secrets := v1alpha1.UndividedResource{Resource: "secrets", Shards: []string{"op-1-normal", "op-2-normal"}, Writes: 7, Common: 2, Namespaces: []string{"a", "b"}}
	widgets := v1alpha1.UndividedResource{Group: "example.com", Resource: "widgets", Shards: []string{"op-1-normal", "op-2-normal"}, Writes: 7}
	for _, q := range []struct {
		name  string
		found []v1alpha1.UndividedResource
		want  condition
	}{
		{"nothing", nil, condition{false, v1alpha1.ReasonDivided, ""}},
		{"written", []v1alpha1.UndividedResource{secrets, widgets}, condition{true, v1alpha1.ReasonUndividedWrites,
			"several shards write to the same namespaces or objects of secrets (as in a, b), which spec.root does not divide: if they reconcile the same objects, add the resource to spec.root.resourceSelector; see status.root.undivided"}},
		{"watched", []v1alpha1.UndividedResource{widgets}, condition{true, v1alpha1.ReasonUndividedWatches,
			"several shards watch in all namespaces, and write, widgets.example.com, which spec.root does not divide: if they reconcile the same objects, add the resource to spec.root.resourceSelector; see status.root.undivided"}},
	} {
		t.Run(q.name, func(t *testing.T) {
			in := rootInput()
			in.Undivided = undivided.Result{Undivided: q.found, Foreign: []v1alpha1.ForeignWrites{{Resource: "pods", Writes: 1}}}
			s := OfRoot(*in)
			is := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionUndivided)
			require.Equal(t, q.want, condition{is.Status == metav1.ConditionTrue, v1alpha1.Reason(is.Reason), is.Message})
			require.Equal(t, q.found, s.Root.Undivided)
			require.Equal(t, in.Undivided.Foreign, s.Root.ForeignWrites)
			require.True(t, meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionReady), "it is no stop")
			require.True(t, meta.IsStatusConditionFalse(s.Conditions, v1alpha1.ConditionDegraded))
		})
	}
}

func TestIdleShardsAreAWarning(t *testing.T) {
	in := rootInput()
	is := func() metav1.Condition {
		return *meta.FindStatusCondition(OfRoot(*in).Conditions, v1alpha1.ConditionShardIdle)
	}
	require.Equal(t, metav1.ConditionFalse, is().Status)
	in.Root.Shards[1].Idle = true
	require.Equal(t, metav1.ConditionTrue, is().Status)
	require.Equal(t, "shard op-2-normal, which owns 7 objects: pods watch them and have written nothing for 10m0s, while other shards write: they may wait for an election that the mesh does not see; look at their logs", is().Message)
	require.True(t, meta.IsStatusConditionTrue(OfRoot(*in).Conditions, v1alpha1.ConditionReady), "it may have nothing to do")
}

func TestRootSettled(t *testing.T) {
	in := rootInput()
	s := OfRoot(*in)
	require.EqualValues(t, 3, s.ObservedGeneration)
	require.EqualValues(t, 2, s.Shards)
	require.Equal(t, v1alpha1.ShardLabel+" in ("+strings.Join(s.Root.ChildShardingConfigs, ",")+")", s.Selector)
	require.EqualValues(t, 2, s.Members)
	require.EqualValues(t, 2, s.ReadyMembers)
	require.Equal(t, "Filter", s.Method)
	require.Equal(t, Settled, s.Root.Handover)
	require.Equal(t, []string{"op-1-normal", "op-2-normal"}, s.Root.ChildShardingConfigs)
	require.Equal(t, v1alpha1.ShardStatus{Name: "op-2-normal", Serial: 5, Namespaces: 1, Weight: 7, Members: 1, ReadyMembers: 1}, s.Root.Shards[1])
	require.EqualValues(t, v1alpha1.ReasonSettled, findCondition(t, s, v1alpha1.ConditionReady).Reason)
	require.Equal(t, metav1.ConditionTrue, findCondition(t, s, v1alpha1.ConditionReady).Status)
	require.Equal(t, metav1.ConditionFalse, findCondition(t, s, v1alpha1.ConditionProgressing).Status)
	require.Equal(t, metav1.ConditionFalse, findCondition(t, s, v1alpha1.ConditionDegraded).Status)
	require.Zero(t, in.Root.Shards[0].Members, "what was given is not written to")

	in.Config.Status = s
	in.Now = now.Add(time.Minute)
	require.True(t, equality.Semantic.DeepEqual(s, OfRoot(*in)), "nothing new a minute later")
}

func TestRootsThatAreNotSettled(t *testing.T) {
	const ready, progressing, degraded = v1alpha1.ConditionReady, v1alpha1.ConditionProgressing, v1alpha1.ConditionDegraded
	yes := true
	for _, c := range []struct {
		name     string
		change   func(*RootInput)
		ready    v1alpha1.Reason // the reason
		degraded v1alpha1.Reason // the reason; empty if not
		word     string
		in, says string // a condition, and what it says
	}{
		{"releasing", func(in *RootInput) { move(in, handover.Releasing, now) },
			v1alpha1.ReasonHandingOver, "", Releasing, progressing, "pod op-0 on node node1: its agent has just confirmed"},
		{"granting", func(in *RootInput) { move(in, handover.Granting, now) },
			v1alpha1.ReasonHandingOver, "", Granting, progressing, "pod op-1 on node node1"},
		{"releasing and granting", func(in *RootInput) { move(in, handover.Granting, now); move(in, handover.Releasing, now) },
			v1alpha1.ReasonHandingOver, "", Releasing, ready, "handed over"},
		{"blocked", func(in *RootInput) { move(in, handover.Releasing, now.Add(-2*BlockedAfter)) },
			v1alpha1.ReasonBlocked, v1alpha1.ReasonBlocked, Blocked, degraded, "pod op-0 on node node1"},
		{"restarting", func(in *RootInput) {
			m := in.State.Members["op-0"]
			m.Stale = true
			in.State.Members["op-0"], in.Restarting = m, "pod op-0 may not be evicted now: budget"
		}, v1alpha1.ReasonRestarting, "", Restarting, progressing, "may not be evicted now: budget"},
		{"a restarted pod is gone", func(in *RootInput) {
			in.State.Members["op-9"] = handover.Member{UID: "op-9", Name: "op-9", Node: "node1", Shard: "op-1-normal", Serial: 4, Stale: true}
		}, v1alpha1.ReasonSettled, "", Settled, ready, "2 of 2 members ready"},
		{"the successor of a restarted pod is awaited", func(in *RootInput) {
			in.State.Members["op-9"] = handover.Member{UID: "op-9", Name: "op-9", Node: "node1", Shard: "op-1-normal", Serial: 4, Stale: true}
			in.Restarting = "pod op-9 was evicted, and its successor does not exist yet"
		}, v1alpha1.ReasonRestarting, "", Restarting, progressing, "pod op-9 was evicted"},
		{"the first keys wait", func(in *RootInput) { in.Unconfirmed = []string{"pod op-7"} },
			v1alpha1.ReasonWaiting, "", Waiting, ready, "waiting for pod op-7"},
		{"nobody to take", func(in *RootInput) {
			in.State.Shards["op-2-normal"] = handover.Shard{Serial: 5, Wanted: sharding.Keys("a")}
		}, v1alpha1.ReasonWaiting, "", Waiting, progressing, "waiting for a ready member of shard op-2-normal"},
		{"invalid", func(in *RootInput) { in.Problem = &compile.Problem{Reason: "Why", Message: "because"} },
			"Why", "Why", Settled, degraded, "because"},
		{"broken", func(in *RootInput) { in.Problem = errors.New("because") },
			v1alpha1.ReasonInvalid, v1alpha1.ReasonInvalid, Settled, degraded, "because"},
		{"conflict", func(in *RootInput) {
			in.Conflicts = []compile.Conflict{{Pod: "op-0", Configs: []string{"by-hand", "op"}}}
		}, v1alpha1.ReasonConflict, v1alpha1.ReasonConflict, Settled, degraded, "pod op-0: ShardingConfigs by-hand, op"},
		{"no pods", func(in *RootInput) { in.Pods = nil; clear(in.State.Members) },
			v1alpha1.ReasonTargetNotFound, "", Settled, ready, "no pod of StatefulSet op"},
		{"a pod too few for a moment", func(in *RootInput) { in.Pods = in.Pods[:1]; delete(in.State.Members, "op-1") },
			v1alpha1.ReasonNotEnoughPods, "", Settled, ready, "StatefulSet op lacks pods (1): shard op-2-normal"},
		{"a pod too few", func(in *RootInput) {
			in.Pods = in.Pods[:1]
			delete(in.State.Members, "op-1")
			in.Config.Status.Conditions = []metav1.Condition{{Type: ready, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(now.Add(-2 * Grace))}}
		}, v1alpha1.ReasonNotEnoughPods, v1alpha1.ReasonNotEnoughPods, Settled, degraded, "op-2-normal"},
		{"a resource that may come", func(in *RootInput) {
			in.Obstacle = &locks.Obstacle{Reason: v1alpha1.ReasonUnknownResource, Message: "no foos"}
		}, v1alpha1.ReasonUnknownResource, "", Waiting, ready, "no foos"},
		{"an unknown resource", func(in *RootInput) {
			in.Obstacle = &locks.Obstacle{Reason: v1alpha1.ReasonUnknownResource, Message: "no foos"}
			in.Config.Status.Conditions = []metav1.Condition{{Type: ready, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(now.Add(-2 * Grace))}}
		}, v1alpha1.ReasonUnknownResource, v1alpha1.ReasonUnknownResource, Waiting, degraded, "no foos"},
		{"a pod without a place yet", func(in *RootInput) { delete(in.State.Members, "op-1") },
			v1alpha1.ReasonStarting, "", Settled, progressing, "pod op-1: it is in standby until a shard takes it"},
		{"surplus", func(in *RootInput) { in.Pods = append(in.Pods, pod("op-2")) },
			v1alpha1.ReasonReplicasSurplus, "", Settled, ready, "1 more pods"},
		{"withdrawing", func(in *RootInput) { in.Config.Spec.Root.Disable = &yes },
			v1alpha1.ReasonWithdrawing, "", Settled, ready, "withdrawn"},
		{"disabled", func(in *RootInput) { in.Config.Spec.Root.Disable = &yes; clear(in.State.Members) },
			v1alpha1.ReasonDisabled, "", Settled, ready, "unsharded"},
		{"cannot weigh", func(in *RootInput) { in.Root.Weighing = "may not list foos" },
			v1alpha1.ReasonSettled, "", Settled, degraded, ""},
		{"no agent", func(in *RootInput) { in.Observe = func(_, _ string) push.Observation { return push.Observation{} } },
			v1alpha1.ReasonAgentAway, v1alpha1.ReasonAgentAway, Settled, degraded, "ctrlmesh-agent"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := rootInput()
			c.change(in)
			s := OfRoot(*in)
			require.Equal(t, c.word, s.Root.Handover)
			require.EqualValues(t, c.ready, findCondition(t, s, ready).Reason)
			if is := findCondition(t, s, degraded); c.degraded == "" {
				require.Equal(t, metav1.ConditionFalse, is.Status)
			} else {
				require.Equal(t, metav1.ConditionTrue, is.Status)
				require.EqualValues(t, c.degraded, is.Reason)
			}
			require.Contains(t, findCondition(t, s, c.in).Message, c.says)
		})
	}
}

// A pod that is waited for is named, and why.
func TestWaitsFor(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*RootInput, *push.Observation)
		says   string
	}{
		{"not yet", func(_ *RootInput, o *push.Observation) { o.Version = "v1" }, "a write may be under way"},
		{"no agent", func(_ *RootInput, o *push.Observation) { *o = push.Observation{} }, "DaemonSet ctrlmesh-agent"},
		{"rejected", func(_ *RootInput, o *push.Observation) { o.Version, o.Nacked, o.Nack = "v1", "5-v2", "disk full" }, "disk full"},
		{"gone", func(in *RootInput, _ *push.Observation) { in.Pods = in.Pods[1:] }, "not confirmed yet that it is refused"},
		{"gone with its node", func(in *RootInput, o *push.Observation) { in.Pods = in.Pods[1:]; *o = push.Observation{} }, "delete the Node object"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := rootInput()
			move(in, handover.Releasing, now)
			o := fine
			c.change(in, &o)
			in.Observe = func(_, _ string) push.Observation { return o }
			waits := OfRoot(*in).Root.Handovers[0].WaitsFor
			require.Len(t, waits, 1)
			require.Contains(t, waits[0], "pod op-0 on node node1: ")
			require.Contains(t, waits[0], c.says)
		})
	}
	in := rootInput()
	move(in, handover.Releasing, now)
	for uid, m := range in.State.Members {
		m.Serial = in.State.Shards[m.Shard].Serial
		in.State.Members[uid] = m
	}
	in.Obstacle = &locks.Obstacle{Message: "another pod may act"}
	require.Equal(t, []string{"another pod may act"}, OfRoot(*in).Root.Handovers[0].WaitsFor)
}
