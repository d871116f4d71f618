package status

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/transfer"
)

var now = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

func pod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(now.Add(-time.Hour)),
			Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh},
		},
		Spec:   corev1.PodSpec{NodeName: "node1"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

var fine = push.Observation{Connected: true, Reported: true, Capture: "ebpf", Version: "v2"}

func input(o push.Observation, pods ...*corev1.Pod) Input {
	return Input{
		Shard: compile.Shard{
			Config:  &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "shard", Generation: 3}},
			Members: pods, Lock: "lock---shard",
		},
		Common: Common{
			Wanted:  func(string) string { return "v2" },
			Observe: func(_, _ string) push.Observation { return o },
			Now:     now,
			Since:   now.Add(-time.Hour),
		},
	}
}

func findCondition(t *testing.T, s v1alpha1.ShardingConfigStatus, kind string) metav1.Condition {
	t.Helper()
	c := meta.FindStatusCondition(s.Conditions, kind)
	require.NotNil(t, c)
	require.EqualValues(t, 3, c.ObservedGeneration)
	return *c
}

func TestReady(t *testing.T) {
	in := input(fine, pod("a"), pod("b"))
	s := Of(in)
	require.EqualValues(t, 3, s.ObservedGeneration)
	require.EqualValues(t, 2, s.Members)
	require.EqualValues(t, 2, s.ReadyMembers)
	require.EqualValues(t, 1, s.Shards)
	require.Equal(t, "Labels", s.Method)
	require.Equal(t, "lock---shard", s.Lock)
	require.Equal(t, v1alpha1.MemberStatus{Name: "a", Node: "node1", Capture: "ebpf", PolicyVersion: "v2"}, s.Pods[0])
	require.Equal(t, metav1.ConditionTrue, findCondition(t, s, v1alpha1.ConditionReady).Status)
	require.Equal(t, metav1.ConditionFalse, findCondition(t, s, v1alpha1.ConditionProgressing).Status)
	require.Equal(t, metav1.ConditionFalse, findCondition(t, s, v1alpha1.ConditionDegraded).Status)

	// Nothing new a minute later: nothing to write.
	in.Shard.Config.Status = s
	in.Now = now.Add(time.Minute)
	require.True(t, equality.Semantic.DeepEqual(s, Of(in)))
}

func TestMembersThatAreNotReady(t *testing.T) {
	for _, c := range []struct {
		name     string
		change   func(*Input, *corev1.Pod, *push.Observation)
		says     string
		degraded v1alpha1.Reason // the reason; empty while it may yet get ready by itself
	}{
		{"not scheduled", func(_ *Input, p *corev1.Pod, _ *push.Observation) { p.Spec.NodeName = "" }, "not scheduled", ""},
		{"pending", func(_ *Input, p *corev1.Pod, _ *push.Observation) { p.Status.Phase = "" }, "Pending", ""},
		{"no annotation", func(_ *Input, p *corev1.Pod, _ *push.Observation) { p.Annotations = nil }, "delete it", v1alpha1.ReasonNotAdmitted},
		{"older", func(_ *Input, p *corev1.Pod, _ *push.Observation) {
			p.Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth
		}, "delete it", v1alpha1.ReasonOlderThanConfig},
		{"admitted under Closed", func(in *Input, _ *corev1.Pod, _ *push.Observation) {
			in.Shard.Config.Spec.FailurePolicy = v1alpha1.FailOpen
		}, "delete it", v1alpha1.ReasonTrustsMeshAlone},
		{"admitted without Passthrough", func(in *Input, _ *corev1.Pod, _ *push.Observation) {
			in.Shard.Config.Spec.ClientCertificates = v1alpha1.ClientCertificatesPassthrough
		}, "delete it", v1alpha1.ReasonTrustsMeshAlone},
		{"passthrough by address", func(in *Input, p *corev1.Pod, _ *push.Observation) {
			in.Shard.Config.Spec.ClientCertificates = v1alpha1.ClientCertificatesPassthrough
			p.Annotations = map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustBoth, v1alpha1.CaptureAnnotation: v1alpha1.CaptureAddress}
		}, "off its template", v1alpha1.ReasonCannotPass},
		{"policy too large", func(in *Input, p *corev1.Pod, _ *push.Observation) {
			in.Shard.TooLarge = []string{p.Name}
		}, "fewer namespaces", v1alpha1.ReasonPolicyTooLarge},
		{"conflict", func(in *Input, p *corev1.Pod, _ *push.Observation) {
			in.Shard.Conflicts = []compile.Conflict{{Pod: p.Name, Configs: []string{"one", "shard"}}}
		}, "refused", v1alpha1.ReasonConflict},
		{"no agent", func(_ *Input, _ *corev1.Pod, o *push.Observation) { *o = push.Observation{} }, "ctrlmesh-agent", v1alpha1.ReasonAgentAway},
		{"no agent on a new node", func(_ *Input, p *corev1.Pod, o *push.Observation) {
			*o = push.Observation{}
			p.CreationTimestamp = metav1.NewTime(now)
		}, "not connected yet", ""},
		{"agent gone", func(_ *Input, _ *corev1.Pod, o *push.Observation) {
			o.Connected, o.Left = false, now.Add(-2*Grace)
		}, "ctrlmesh-agent", v1alpha1.ReasonAgentAway},
		{"unknown", func(_ *Input, _ *corev1.Pod, o *push.Observation) { *o = push.Observation{Connected: true} }, "not reported", ""},
		{"not captured", func(_ *Input, _ *corev1.Pod, o *push.Observation) { o.Capture = "" }, "not captured yet", ""},
		{"cannot be captured", func(_ *Input, _ *corev1.Pod, o *push.Observation) { o.Capture, o.Message = "", "no BPF" }, "no BPF", v1alpha1.ReasonNotCaptured},
		{"old version", func(_ *Input, _ *corev1.Pod, o *push.Observation) { o.Version = "v1" }, "current policy", ""},
		{"nacked", func(_ *Input, _ *corev1.Pod, o *push.Observation) {
			o.Version, o.Nacked, o.Nack = "v1", "v2", "bad selector"
		}, "bad selector", v1alpha1.ReasonPolicyRejected},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := fine
			p := pod("a")
			in := input(o, p)
			c.change(&in, p, &o)
			in.Observe = func(_, _ string) push.Observation { return o }
			s := Of(in)
			require.Zero(t, s.ReadyMembers)
			require.Contains(t, s.Pods[0].Message, c.says)
			require.Equal(t, metav1.ConditionFalse, findCondition(t, s, v1alpha1.ConditionReady).Status)
			degraded, progressing := findCondition(t, s, v1alpha1.ConditionDegraded), findCondition(t, s, v1alpha1.ConditionProgressing)
			if c.degraded == "" {
				require.Equal(t, metav1.ConditionFalse, degraded.Status)
				require.Equal(t, metav1.ConditionTrue, progressing.Status)
				require.Contains(t, progressing.Message, "pod a: ")
			} else {
				require.Equal(t, metav1.ConditionTrue, degraded.Status)
				require.EqualValues(t, c.degraded, degraded.Reason)
				require.Contains(t, degraded.Message, "pod a: ")
			}
		})
	}
}

func TestFailurePolicyOpen(t *testing.T) {
	p := pod("a")
	p.Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth
	o := fine
	in := input(o, p)
	in.Observe = func(_, _ string) push.Observation { return o }
	in.Shard.Config.Spec.FailurePolicy = v1alpha1.FailOpen
	s := Of(in)
	require.Equal(t, metav1.ConditionTrue, findCondition(t, s, v1alpha1.ConditionReady).Status)
	require.Contains(t, findCondition(t, s, v1alpha1.ConditionReady).Message, "members run unsharded")
	require.Equal(t, metav1.ConditionFalse, findCondition(t, s, v1alpha1.ConditionDegraded).Status)

	for _, mode := range []string{v1alpha1.CaptureIPTables, v1alpha1.CaptureAddress} {
		o.Capture = mode
		s = Of(in)
		require.Equal(t, metav1.ConditionTrue, findCondition(t, s, v1alpha1.ConditionReady).Status, "it serves")
		require.EqualValues(t, v1alpha1.ReasonCannotFailOpen, findCondition(t, s, v1alpha1.ConditionDegraded).Reason)
		require.Contains(t, findCondition(t, s, v1alpha1.ConditionDegraded).Message, "pod a: captured by "+mode)
	}

	// What divides nothing has nothing to warn of.
	in.Shard.Config.Spec.ClientCertificates = v1alpha1.ClientCertificatesPassthrough
	s = Of(in)
	require.Zero(t, s.Shards)
	require.Empty(t, s.Method)
	require.NotContains(t, findCondition(t, s, v1alpha1.ConditionReady).Message, "unsharded")
}

func TestAgentBeingReplaced(t *testing.T) {
	o := fine
	o.Connected, o.Left = false, now.Add(-Grace/2)
	require.EqualValues(t, 1, Of(input(o, pod("a"))).ReadyMembers)
}

// A new leader believes the last one until agents had time to connect and to report.
func TestNewLeader(t *testing.T) {
	for name, o := range map[string]push.Observation{
		"no agent has connected": {}, "it has not reported": {Connected: true, Version: "v1"}, "it has connected again": {Connected: true, Left: now},
	} {
		in := input(o, pod("a"), pod("b"))
		in.Since = now
		in.Shard.Config.Status.Pods = []v1alpha1.MemberStatus{
			{Name: "a", Node: "node1", Capture: "ebpf", PolicyVersion: "v2", LockHolder: true},
			{Name: "b", Node: "node1", Message: "it is not captured yet"},
		}
		s := Of(in)
		require.False(t, in.Awaits(s), "the spec is a new one")
		require.Equal(t, in.Shard.Config.Status.Pods, s.Pods, name)
		require.EqualValues(t, 1, s.ReadyMembers, name)

		in.Shard.Config.Status = s
		in.Shard.Config.Status.Method = "ServerSide"
		require.True(t, in.Awaits(Of(in)), name)
		in.Acting = &v1alpha1.ActingLimits{Hash: "x"}
		require.False(t, in.Awaits(Of(in)), "what policies depend on is written at once")
		in.Acting = nil
		in.MissingBundle = "quota"
		require.False(t, in.Awaits(Of(in)), "so is what no agent reports")
		in.MissingBundle = ""
		in.Now = now.Add(2 * Grace)
		require.False(t, in.Awaits(Of(in)), name)
		require.EqualValues(t, 0, Of(in).ReadyMembers, name)
	}
	in := input(push.Observation{}, pod("a"))
	in.Since = now
	in.Shard.Members[0].CreationTimestamp = metav1.Time{Time: now.Add(time.Second)}
	in.Shard.Config.Status.Pods = []v1alpha1.MemberStatus{{Name: "a", Node: "node1", Capture: "ebpf"}}
	require.Zero(t, Of(in).ReadyMembers, "an earlier pod of that name was ready")

	in = input(fine, pod("a"))
	in.Since = now
	in.Shard.Config.Status = Of(in)
	in.Shard.Config.Status.Method = "ServerSide"
	require.False(t, in.Awaits(Of(in)), "its agent has reported")
}

func TestNoMembersAndProblems(t *testing.T) {
	s := Of(input(fine))
	require.EqualValues(t, v1alpha1.ReasonNoMembers, findCondition(t, s, v1alpha1.ConditionReady).Reason)
	require.Equal(t, metav1.ConditionFalse, findCondition(t, s, v1alpha1.ConditionDegraded).Status)

	in := input(fine)
	in.Shard.Problem = &compile.Problem{Reason: v1alpha1.ReasonInvalid, Message: "why"}
	s = Of(in)
	require.EqualValues(t, v1alpha1.ReasonInvalid, findCondition(t, s, v1alpha1.ConditionReady).Reason)
	require.Equal(t, metav1.ConditionTrue, findCondition(t, s, v1alpha1.ConditionDegraded).Status)
}

func TestDerived(t *testing.T) {
	o := fine
	in := input(o, pod("a"), pod("b"))
	in.Observe = func(_, _ string) push.Observation { return o }
	in.Shard.Root = &v1alpha1.ShardingConfig{Spec: v1alpha1.ShardingConfigSpec{Root: &v1alpha1.RootConfig{Method: v1alpha1.MethodAuto}}}
	in.Shard.Owned = sharding.Of(sharding.Range{First: 1, Last: 2})
	s := Of(in)
	require.Equal(t, []string{"0000000000000001-0000000000000002"}, s.Held)
	require.Empty(t, s.Method, "no agent has reported")
	require.Nil(t, s.Root)

	in.Shard.Root.Spec.Root.Method = v1alpha1.MethodServerSide
	require.Equal(t, "ServerSide", Of(in).Method)
	o.Methods = map[string]string{"pods": "ServerSide", "foos.example.com": "Filter", "services": "Filter"}
	require.Equal(t, "Filter,ServerSide", Of(in).Method, "what is done counts, not what is asked for")
}

func TestStamping(t *testing.T) {
	in := input(fine, pod("a"))
	in.Stamping = &v1alpha1.StampingStatus{Resource: "pods", Message: "may not"}
	s := Of(in)
	require.Equal(t, metav1.ConditionTrue, findCondition(t, s, v1alpha1.ConditionReady).Status)
	require.EqualValues(t, v1alpha1.ReasonStamping, findCondition(t, s, v1alpha1.ConditionProgressing).Reason)
	require.Equal(t, "may not", findCondition(t, s, v1alpha1.ConditionDegraded).Message)
}

func TestBounded(t *testing.T) {
	var pods []*corev1.Pod
	for i := range 2 * maxPods {
		p := pod(fmt.Sprintf("p-%04d", i))
		if i > maxPods {
			p.Annotations = nil
		}
		pods = append(pods, p)
	}
	s := Of(input(fine, pods...))
	require.EqualValues(t, 2*maxPods, s.Members)
	require.EqualValues(t, maxPods+1, s.ReadyMembers)
	require.Len(t, s.Pods, maxPods)
	require.Equal(t, fmt.Sprintf("p-%04d", 2*maxPods-1), s.Pods[maxPods-1].Name, "the unready first")
	msg := findCondition(t, s, v1alpha1.ConditionDegraded).Message
	require.Equal(t, maxNamed, strings.Count(msg, "pod p-"))
	require.Contains(t, msg, "and 196 more")
}

func TestBundleThatCannotBeWrittenDegrades(t *testing.T) {
	in := input(fine, pod("a"))
	in.MissingBundle = "writing ConfigMap ns/ctrlmesh-ca.crt: exceeded quota"
	s := Of(in)
	require.Equal(t, metav1.ConditionTrue, findCondition(t, s, v1alpha1.ConditionReady).Status, "the pods that run have a CA")
	degraded := findCondition(t, s, v1alpha1.ConditionDegraded)
	require.EqualValues(t, v1alpha1.ReasonBundleRefused, degraded.Reason)
	require.Contains(t, degraded.Message, "make room in the namespace's quota")
	require.Contains(t, degraded.Message, in.MissingBundle)
}

func TestClientsThatDoNotTrustTheMeshDegrade(t *testing.T) {
	o := fine
	o.Distrusted = true
	s := Of(input(o, pod("a")))
	require.Equal(t, metav1.ConditionTrue, findCondition(t, s, v1alpha1.ConditionReady).Status, "its other clients may be served")
	degraded := findCondition(t, s, v1alpha1.ConditionDegraded)
	require.EqualValues(t, v1alpha1.ReasonMeshCANotTrusted, degraded.Reason)
	require.Contains(t, degraded.Message, "serviceaccount/ca.crt")
	require.Contains(t, degraded.Message, "pod a")
}

func TestLimitsThatWait(t *testing.T) {
	in := input(fine, pod("a"))
	in.Acting, in.Waits = &v1alpha1.ActingLimits{Hash: "other"}, "pod b"
	s := Of(in)
	require.Equal(t, in.Acting, s.Acting)
	require.EqualValues(t, 1, s.ReadyMembers, "members act by earlier limits")
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionProgressing} {
		is := findCondition(t, s, kind)
		require.EqualValues(t, v1alpha1.ReasonHandingOver, is.Reason, kind)
		require.Contains(t, is.Message, "pod b", kind)
	}

	in.Acting = &v1alpha1.ActingLimits{Hash: transfer.None}
	s = Of(in)
	require.Zero(t, s.ReadyMembers)
	require.Contains(t, s.Pods[0].Message, "in standby until no other pod may act on its objects")
}

// The apiserver would reject the whole status.
func TestMessagesOfConditionsAreBounded(t *testing.T) {
	var conditions []metav1.Condition
	condition{false, v1alpha1.ReasonHeldOutside, strings.Repeat("x", 1<<20)}.set(&conditions, v1alpha1.ConditionReady, 1, time.Now())
	require.Less(t, len(conditions[0].Message), 32<<10)
}
