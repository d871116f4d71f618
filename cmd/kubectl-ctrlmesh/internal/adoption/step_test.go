package adoption

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

const home = "team"

var target = layout.Workload{Kind: layout.StatefulSet, Name: "op"}

// podOf returns a ready pod of the workload. An old one is outside the mesh.
func podOf(ordinal int, onMesh bool) corev1.Pod {
	name := "op-" + strconv.Itoa(ordinal)
	pod := *meshtest.Pod(home, name, "node-1")
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: layout.StatefulSet, Name: "op", Controller: new(true)}}
	pod.Labels = map[string]string{"app": "op"}
	if onMesh {
		pod.Labels[v1alpha1.EnableProxyLabel] = "true"
	}
	return pod
}

func workload(labelled bool, pods ...corev1.Pod) *snapshot.Workload {
	w := &snapshot.Workload{Workload: target, Replicas: 2, Template: map[string]string{"app": "op"}, Pods: pods}
	if labelled {
		w.Template[v1alpha1.EnableProxyLabel] = "true"
	}
	return w
}

// rootOf returns a root of two shards with a reason of the condition Ready; none if it is empty.
func rootOf(reason v1alpha1.Reason, message string) v1alpha1.ShardingConfig {
	c := v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "op", Generation: 1}}
	c.Spec.Root = &v1alpha1.RootConfig{
		Prefix: "op", TargetRef: &v1alpha1.TargetRef{Kind: target.Kind, Name: target.Name}, Auto: &v1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
	}
	if reason == "" {
		return c
	}
	c.Status.ObservedGeneration = 1
	meshtest.SetCondition(&c, v1alpha1.ConditionReady, reason == v1alpha1.ReasonSettled, reason, message)
	c.Status.Locks = []v1alpha1.LockStatus{{Namespace: home, Name: "lock", HeldByMesh: true}}
	c.Status.Root = &v1alpha1.RootStatus{Shards: []v1alpha1.ShardStatus{{Name: "op-1-normal", Held: []string{meshtest.Halves[0]}}, {Name: "op-2-normal", Held: []string{meshtest.Halves[1]}}}}
	return c
}

// stateOf returns a snapshot of a mesh that runs. Each shard has a leader.
func stateOf(t *testing.T, w *snapshot.Workload, configs ...v1alpha1.ShardingConfig) *snapshot.Snapshot {
	t.Helper()
	s, err := meshtest.Healthy(t).Reader(t).Read(t.Context(), snapshot.Programs)
	require.NoError(t, err)
	s.Subjects.Workload, s.Configs = w, configs
	s.LeasesRead[home] = true
	for _, shard := range []string{"op-1-normal", "op-2-normal"} {
		lease := meshtest.Lease(home, "lock---"+shard, "op-0_1")
		s.Leases[types.NamespacedName{Namespace: home, Name: lease.Name}] = *lease
	}
	return s
}

func deleting(c v1alpha1.ShardingConfig) v1alpha1.ShardingConfig {
	c.DeletionTimestamp = new(metav1.NewTime(meshtest.Now))
	return c
}

func terminating(pod corev1.Pod) corev1.Pod {
	pod.DeletionTimestamp = new(metav1.NewTime(meshtest.Now))
	return pod
}

func unready(pod corev1.Pod, waits string) corev1.Pod {
	pod = *pod.DeepCopy()
	meshtest.Unready(&pod)
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: waits}}}}
	return pod
}

// change returns a workload with a change.
func change(w *snapshot.Workload, with func(*snapshot.Workload)) *snapshot.Workload {
	with(w)
	return w
}

// stepCase is a state, and what its step must be. why and do are parts.
type stepCase struct {
	workload *snapshot.Workload
	configs  []v1alpha1.ShardingConfig
	wanted   *v1alpha1.ShardingConfig
	change   func(*snapshot.Snapshot)
	kind     Kind
	action   Action
	why, do  string
}

func requireSteps(t *testing.T, next func(*snapshot.Snapshot, Request) Step, cases map[string]stepCase) {
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			s := stateOf(t, c.workload, c.configs...)
			if c.change != nil {
				c.change(s)
			}
			step := next(s, Request{Namespace: home, Target: target, Wanted: c.wanted})
			assert.Equal(t, c.kind, step.Kind, "%+v", step)
			assert.Equal(t, c.action, step.Action)
			assert.Contains(t, step.Why, c.why)
			assert.Contains(t, step.Do, c.do)
			if c.kind == Wait || c.kind == Stop {
				assert.NotEmpty(t, step.Why)
				assert.NotEmpty(t, step.Do, "what to do about %s", step.Why)
			}
		})
	}
}

func TestStepsOfAdoption(t *testing.T) {
	old, current := []corev1.Pod{podOf(0, false), podOf(1, false)}, []corev1.Pod{podOf(0, true), podOf(1, true)}
	settled := []v1alpha1.ShardingConfig{rootOf(v1alpha1.ReasonSettled, "")}
	absent := []v1alpha1.ShardingConfig{rootOf(v1alpha1.ReasonTargetNotFound, "no pod")}
	outside := []v1alpha1.ShardingConfig{rootOf(v1alpha1.ReasonHeldOutside, "lock team/lock is held by op-0")}
	requireSteps(t, Adopt, map[string]stepCase{
		"no workload":     {kind: Stop, why: "there is no StatefulSet op in namespace team", do: "-n"},
		"no root":         {workload: workload(false, old...), wanted: &absent[0], kind: Act, action: CreateRoot},
		"deleted root":    {workload: workload(false, old...), configs: []v1alpha1.ShardingConfig{deleting(absent[0])}, kind: Stop, why: "is being deleted", do: "kubectl ctrlmesh remove statefulset/op -n team"},
		"none wanted":     {workload: workload(true, current...), kind: Stop, why: "no ShardingConfig targets StatefulSet op", do: "kubectl ctrlmesh adopt statefulset/op -n team -f FILE"},
		"labelled first":  {workload: workload(true, current...), wanted: &absent[0], kind: Act, action: CreateRoot},
		"unlabelled":      {workload: workload(false, old...), configs: absent, kind: Act, action: SetLabel},
		"another value":   {workload: change(workload(true, old...), func(w *snapshot.Workload) { w.Template[v1alpha1.EnableProxyLabel] = "yes" }), configs: absent, kind: Act, action: SetLabel},
		"half replaced":   {workload: workload(true, old[0], current[1]), configs: outside, kind: Wait, why: "1 of 2 pods are replaced; old: op-0; ShardingConfig op: HeldOutside: lock team/lock is held by op-0 (the rolling update", do: "kubectl -n team describe statefulset/op"},
		"terminating pod": {workload: workload(true, terminating(old[0]), current[1]), configs: outside, kind: Wait, why: "terminating: op-0"},
		"missing pod":     {workload: workload(true, current[1]), configs: outside, kind: Wait, why: "1 of 2 pods are replaced"},
		"unready pod":     {workload: workload(true, current[0], unready(current[1], "ImagePullBackOff")), configs: settled, kind: Wait, why: "not ready: op-1 (ImagePullBackOff)"},
		"on delete":       {workload: change(workload(true, old[0], current[1]), func(w *snapshot.Workload) { w.OnDelete = true }), configs: outside, kind: Wait, why: "OnDelete", do: "kubectl -n team delete pod op-0"},
		"partition":       {workload: change(workload(true, old[0], current[1]), func(w *snapshot.Workload) { w.Partition = 1 }), configs: outside, kind: Wait, why: "partition of 1", do: `"partition":0`},
		"low partition":   {workload: change(workload(true, old[1], current[0]), func(w *snapshot.Workload) { w.Partition = 1 }), configs: outside, kind: Wait, do: "describe"},
		"paused":          {workload: change(workload(true, old...), func(w *snapshot.Workload) { w.Paused = true }), configs: outside, kind: Wait, why: "it is paused", do: "rollout resume"},
		"no status":       {workload: workload(true, current...), configs: []v1alpha1.ShardingConfig{rootOf("", "")}, kind: Wait, why: "has not written the status", do: "describe shardingconfig op"},
		"old status": {workload: workload(true, current...), configs: settled, kind: Wait, why: "has not written the status of ShardingConfig op yet: 0 of 2 replicas are ready", do: "describe",
			change: func(s *snapshot.Snapshot) {
				s.Configs = []v1alpha1.ShardingConfig{*s.Configs[0].DeepCopy()}
				s.Configs[0].Generation, s.Mesh.Manager.Status.ReadyReplicas = 2, 0
			}},
		"unknown lock": {workload: workload(true, current...), configs: []v1alpha1.ShardingConfig{rootOf(v1alpha1.ReasonUnknownLock, "lock a/b")}, kind: Wait, why: "UnknownLock: lock a/b (name the lock in spec.controller.locks"},
		"without leader": {workload: workload(true, current...), configs: settled, kind: Wait, why: "shard op-2-normal has no leader: Lease team/lock---op-2-normal", do: "kubectl ctrlmesh shards op -n team", change: func(s *snapshot.Snapshot) {
			delete(s.Leases, types.NamespacedName{Namespace: home, Name: "lock---op-2-normal"})
		}},
		"unread Leases":  {workload: workload(true, current...), configs: settled, kind: Wait, why: "the leader of shard op-1-normal is not in the status yet", change: func(s *snapshot.Snapshot) { s.LeasesRead[home] = false }},
		"damaged status": {workload: workload(true, current...), configs: []v1alpha1.ShardingConfig{damaged()}, kind: Stop, why: "reading what shard", do: "bug"},
		"adopted":        {workload: workload(true, current...), configs: settled, kind: Done},
	})
}

func damaged() v1alpha1.ShardingConfig {
	c := rootOf(v1alpha1.ReasonSettled, "")
	c.Status.Root.Shards[0].Held = []string{"nonsense"}
	return c
}

func TestStepsOfRemoval(t *testing.T) {
	old, current := []corev1.Pod{podOf(0, false), podOf(1, false)}, []corev1.Pod{podOf(0, true), podOf(1, true)}
	settled := rootOf(v1alpha1.ReasonSettled, "")
	withdrawing := deleting(rootOf(v1alpha1.ReasonWithdrawing, "waiting for op-1"))
	requireSteps(t, Remove, map[string]stepCase{
		"adopted":       {workload: workload(true, current...), configs: []v1alpha1.ShardingConfig{settled}, kind: Act, action: DeleteRoot},
		"withdrawing":   {workload: workload(true, current...), configs: []v1alpha1.ShardingConfig{withdrawing}, kind: Wait, why: "is being deleted: Withdrawing: waiting for op-1", do: "describe shardingconfig op"},
		"no manager":    {workload: workload(true, current...), configs: []v1alpha1.ShardingConfig{withdrawing}, kind: Wait, why: "the manager must release it: 0 of 2", change: func(s *snapshot.Snapshot) { s.Mesh.Manager.Status.ReadyReplicas = 0 }},
		"without root":  {workload: workload(true, current...), kind: Act, action: UnsetLabel},
		"half replaced": {workload: workload(false, current[0], old[1]), kind: Wait, why: "1 of 2 pods are replaced; old: op-0"},
		"on delete":     {workload: change(workload(false, current...), func(w *snapshot.Workload) { w.OnDelete = true }), kind: Wait, why: "OnDelete", do: "delete pod op-0 op-1"},
		"removed":       {workload: workload(false, old...), kind: Done},
		"no workload":   {kind: Done},
	})
}

func TestProblemsBeforeAdoption(t *testing.T) {
	old := []corev1.Pod{podOf(0, false), podOf(1, false)}
	root := rootOf("", "")
	byHand := v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "by-hand"}}
	byHand.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "op"}}
	selecting := rootOf("", "")
	selecting.Name, selecting.Spec.Root.TargetRef, selecting.Spec.Root.TargetSelector = "selecting", nil, byHand.Spec.Selector
	other := rootOf("", "")
	other.Name = "other"
	elsewhere := other
	elsewhere.Namespace = "elsewhere"
	larger := *root.DeepCopy()
	larger.Spec.Root.Auto.ShardingSize = 3
	disabled := *root.DeepCopy()
	disabled.Spec.Root.Disable = new(true)
	canary := *larger.DeepCopy()
	canary.Spec.Root.Canary = &v1alpha1.CanaryConfig{Replicas: new(int32(2))}
	for name, c := range map[string]struct {
		wanted  *v1alpha1.ShardingConfig
		configs []v1alpha1.ShardingConfig
		change  func(*snapshot.Snapshot)
		want    []string // parts
	}{
		"none":            {wanted: &root},
		"same root":       {wanted: &root, configs: []v1alpha1.ShardingConfig{root}},
		"its root":        {configs: []v1alpha1.ShardingConfig{other}},
		"no root":         {want: []string{"no ShardingConfig targets StatefulSet op"}},
		"another spec":    {wanted: &larger, configs: []v1alpha1.ShardingConfig{root}, want: []string{"exists with another spec"}},
		"disabled":        {configs: []v1alpha1.ShardingConfig{disabled}, want: []string{"remove spec.root.disable"}},
		"few replicas":    {wanted: &larger, want: []string{"has 2 replicas, and its shards need 3: kubectl -n team scale statefulset/op --replicas=3"}},
		"canary":          {wanted: &canary, want: []string{"need 5"}},
		"another root":    {wanted: &root, configs: []v1alpha1.ShardingConfig{other}, want: []string{"ShardingConfig team/other selects pods"}},
		"by hand":         {wanted: &root, configs: []v1alpha1.ShardingConfig{byHand}, want: []string{"ShardingConfig team/by-hand selects pods"}},
		"by selector":     {wanted: &root, configs: []v1alpha1.ShardingConfig{selecting}, want: []string{"ShardingConfig team/selecting selects pods"}},
		"other namespace": {wanted: &root, configs: []v1alpha1.ShardingConfig{elsewhere}},
		"no manager":      {wanted: &root, change: func(s *snapshot.Snapshot) { s.Mesh.Manager = nil }, want: []string{"install the mesh"}},
		"uncovered node":  {wanted: &root, change: func(s *snapshot.Snapshot) { s.Subjects.Workload.Pods[1].Spec.NodeName = "node-9" }, want: []string{"without a ready agent (node-9)"}},
		"no agents":       {wanted: &root, change: func(s *snapshot.Snapshot) { s.Mesh.Agents = nil }, want: []string{"there is no DaemonSet"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := stateOf(t, workload(false, old[0], old[1]), c.configs...)
			if c.change != nil {
				c.change(s)
			}
			got := Problems(s, Request{Namespace: home, Target: target, Wanted: c.wanted})
			require.Len(t, got, len(c.want), "%q", got)
			for i, part := range c.want {
				require.Contains(t, got[i], part)
			}
		})
	}
}

func TestRemovalIsRefused(t *testing.T) {
	root := rootOf(v1alpha1.ReasonSettled, "")
	byHand := v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "by-hand"}}
	byHand.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "op"}}
	selecting := rootOf("", "")
	selecting.Name, selecting.Spec.Root.TargetRef, selecting.Spec.Root.TargetSelector = "selecting", nil, byHand.Spec.Selector
	derived := v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "op-1-normal", Labels: map[string]string{v1alpha1.RootLabel: "op"}}}
	request := Request{Namespace: home, Target: target}
	on := workload(true, podOf(0, true), podOf(1, true))

	require.NoError(t, Removable(stateOf(t, on, root, derived), request))
	require.ErrorContains(t, Removable(stateOf(t, nil), request), "there is no StatefulSet op")
	require.ErrorContains(t, Removable(stateOf(t, on, byHand), request), "hand-written")
	require.ErrorContains(t, Removable(stateOf(t, on, root, selecting), request), "another root selects pods of StatefulSet op: selecting")

	s := stateOf(t, on, root, byHand, selecting, derived)
	named, err := Named(s, home, "op")
	require.NoError(t, err)
	require.Equal(t, request, named)
	for name, want := range map[string]string{"none": "there is no ShardingConfig none", "by-hand": "hand-written", "selecting": "several workloads", "op-1-normal": "name the root"} {
		_, err := Named(s, home, name)
		require.ErrorContains(t, err, want)
	}
}

func TestTargetsAreParsed(t *testing.T) {
	for _, text := range []string{"statefulset/op", "sts/op", "StatefulSets/op", "statefulset.apps/op"} {
		got, err := ParseTarget(text)
		require.NoError(t, err, text)
		require.Equal(t, target, got)
	}
	got, err := ParseTarget("deploy/op")
	require.NoError(t, err)
	require.Equal(t, layout.Deployment, got.Kind)
	for _, text := range []string{"", "op", "sts/", "/op", "daemonset/op", "sts/op/x"} {
		_, err := ParseTarget(text)
		require.Error(t, err, text)
	}
}
