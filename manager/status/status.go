// Package status computes the statuses of ShardingConfigs, CircuitBreakers and
// FaultInjections. Messages say what the user can do. The package is pure.
package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/transfer"
)

const (
	// Grace is how long an agent may be disconnected before its pods count as not ready: as
	// long as its upgrade takes.
	Grace = 30 * time.Second
	// maxPods bounds status.pods, because the object's size is bounded.
	maxPods = 200
	// maxNamed bounds the pods that a condition names, and maxWaited those that a handover
	// names.
	maxNamed  = 3
	maxWaited = 10
)

// Common is the input for the status of any configuration.
type Common struct {
	// Locks are the operator's locks, as they are to be written.
	Locks []v1alpha1.LockStatus
	// Obstacle is the reason why shards own nothing, or do not work as a whole; nil if there
	// is none.
	Obstacle *locks.Obstacle
	Stamping *v1alpha1.StampingStatus
	// MissingBundle is why the CAs of the namespace cannot be written; empty if they can.
	MissingBundle string
	// Wanted returns the version of a pod's policy.
	Wanted func(uid string) string
	// Observe returns what the agents of a node reported about a pod.
	Observe func(node, uid string) push.Observation
	Now     time.Time
	// Since is when this manager became the leader. Until Grace after it, what the last
	// leader wrote about pods applies until their agent connects.
	Since time.Time
}

// Input is the input for the status of one hand-written or derived configuration.
type Input struct {
	Common
	Shard compile.Shard
	// Leader is the leader of a hand-written shard that should act.
	Leader Leader
	// Acting are the limits that members of a hand-written shard act by.
	Acting *v1alpha1.ActingLimits
	// Waits names the pod that the limits of the spec wait for; empty if members act by them.
	Waits string
}

// verdict is the status of one member. An empty reason means that the member is ready, or
// will be by itself.
type verdict struct {
	v1alpha1.MemberStatus
	ready  bool
	reason v1alpha1.Reason
	// unrouted is why reviews that arrive at it are not routed; empty if they are, or are not
	// to be.
	unrouted string
	// distrusted: one of its clients does not trust the mesh's CA.
	distrusted bool
}

func (v verdict) unready() bool { return !v.ready }
func (v verdict) waiting() bool { return !v.ready && v.reason == "" }
func (v verdict) broken() bool  { return v.reason != "" }

// Of computes the status of a hand-written or derived configuration, which is one shard.
// Conditions that did not change keep their times.
func Of(in Input) v1alpha1.ShardingConfigStatus {
	config := in.Shard.Config
	out := v1alpha1.ShardingConfigStatus{
		ObservedGeneration: config.Generation,
		Conditions:         slices.Clone(config.Status.Conditions),
		Members:            int32(len(in.Shard.Members)),
		Lock:               in.Shard.Lock,
		Stamping:           in.Stamping,
		Locks:              in.Locks,
		Acting:             in.Acting,
	}
	if !compile.PassesThrough(config) {
		out.Shards = 1
	}
	if in.Shard.Root != nil {
		out.Held = in.Shard.Owned.Strings()
	}
	verdicts := make([]verdict, len(in.Shard.Members))
	for i, pod := range in.Shard.Members {
		verdicts[i] = in.member(pod)
		if why := in.standby(); why != "" && verdicts[i].ready {
			verdicts[i].ready, verdicts[i].Message = false, "it is in standby until "+why
		}
		if verdicts[i].ready {
			out.ReadyMembers++
		}
	}
	conditions(&out, in, verdicts)

	out.Pods = show(verdicts)
	out.Method = in.method()
	out.Shadow = in.shadow()
	return out
}

// standby returns what ready members in standby wait for; empty if they act.
func (in Input) standby() string {
	switch config := in.Shard.Config; {
	case compile.Shadows(config):
		return ""
	case slices.ContainsFunc(in.Locks, func(l v1alpha1.LockStatus) bool { return !l.Discovered && !l.HeldByMesh }):
		return "the mesh holds the operator's locks"
	case in.Waits != "" && in.Acting != nil && in.Acting.Hash == transfer.None:
		return "no other pod may act on its objects"
	}
	return ""
}

// show returns as many members as a status has room for. It prefers those that are not ready.
func show(verdicts []verdict) []v1alpha1.MemberStatus {
	shown := slices.Clone(verdicts)
	if len(shown) > maxPods {
		ready := func(v verdict) bool { return v.ready }
		shown = slices.Concat(collect.Filter(shown, verdict.unready), collect.Filter(shown, ready))[:maxPods]
	}
	slices.SortFunc(shown, func(a, b verdict) int { return cmp.Compare(a.Name, b.Name) })
	return collect.Map(shown, func(v verdict) v1alpha1.MemberStatus { return v.MemberStatus })
}

// method returns the methods that apply, or the requested one until an agent has reported.
func (in Input) method() string {
	observed := collect.Map(in.Shard.Members, func(pod *corev1.Pod) push.Observation { return in.Observe(pod.Spec.NodeName, string(pod.UID)) })
	switch reported := methods(observed); {
	case reported != "" || compile.PassesThrough(in.Shard.Config):
		return reported
	case in.Shard.Root != nil:
		return requested(in.Shard.Root.Spec.Root)
	}
	return string(v1alpha1.MethodLabels)
}

func (in Input) member(pod *corev1.Pod) verdict {
	uid, node := string(pod.UID), pod.Spec.NodeName
	o := in.Observe(node, uid)
	v := verdict{MemberStatus: v1alpha1.MemberStatus{
		Name: pod.Name, Node: node, Capture: o.Capture, PolicyVersion: o.Version, LockHolder: o.LockHolder,
	}, unrouted: o.WebhookMessage, distrusted: o.Distrusted}
	before := in.before(pod, o)
	if before != nil {
		v.Capture, v.PolicyVersion, v.LockHolder = before.Capture, before.PolicyVersion, before.LockHolder
	}
	bad := func(reason v1alpha1.Reason, format string, args ...any) verdict {
		v.reason, v.Message = reason, fmt.Sprintf(format, args...)
		return v
	}

	trust := pod.Annotations[v1alpha1.TrustAnnotation]
	wanted := in.Wanted(uid)
	switch {
	case slices.ContainsFunc(in.Shard.Conflicts, func(c compile.Conflict) bool { return c.Pod == pod.Name }):
		return bad(v1alpha1.ReasonConflict, "another ShardingConfig selects it too: all its requests are refused")
	case slices.Contains(in.Shard.TooLarge, pod.Name):
		return bad(v1alpha1.ReasonPolicyTooLarge, "its policy exceeds what an agent receives, so that all its requests are refused: name fewer namespaces in selectors, choose another method than Labels, or write fewer rules")
	case trust == "":
		return bad(v1alpha1.ReasonNotAdmitted, "it was created while the mesh did not admit pods, and is not captured: delete it, so that its successor is admitted")
	case compile.PassesThrough(in.Shard.Config) && trust == v1alpha1.TrustBoth && !compile.CanPassThrough(pod):
		return bad(v1alpha1.ReasonCannotPass, "it is captured by address, so its connections cannot be passed through: take annotation %s off its template and delete it", v1alpha1.CaptureAnnotation)
	case withdrawn(in.Shard.Config): // its pods are being replaced, or run unsharded
	case trust != compile.Trust(in.Shard.Config) && trust == v1alpha1.TrustMesh:
		return bad(v1alpha1.ReasonTrustsMeshAlone, "it was admitted to trust the mesh alone, so its connections can neither go to the apiserver direct nor be passed through: delete it, so that its successor is admitted anew")
	case trust != compile.Trust(in.Shard.Config):
		return bad(v1alpha1.ReasonOlderThanConfig, "it was admitted before this ShardingConfig said failurePolicy: Closed, so its clients trust the cluster's CA too: delete it, so that its successor trusts the mesh alone")
	}
	if before != nil && pod.Status.Phase == corev1.PodRunning {
		v.Message, v.ready = before.Message, before.Message == ""
		return v
	}
	v.reason, v.Message = reach{in.Now, in.Since}.policy(pod, o, wanted)
	v.ready = v.Message == ""
	return v
}

func withdrawn(c *v1alpha1.ShardingConfig) bool { return c.Spec.Root != nil && compile.Withdrawn(c) }

// reach decides which policies are in force.
type reach struct{ now, since time.Time }

// policy returns why a policy is not in force in a pod, with a reason if that lasts; both are
// empty if it is in force.
func (r reach) policy(pod *corev1.Pod, o push.Observation, wanted string) (reason v1alpha1.Reason, message string) {
	node := pod.Spec.NodeName
	away := !o.Connected && (o.Left.IsZero() || r.now.After(o.Left.Add(Grace)))
	switch {
	case node == "":
		return "", "it is not scheduled yet"
	case pod.Status.Phase != corev1.PodRunning:
		return "", fmt.Sprintf("it is %s", cmp.Or(pod.Status.Phase, corev1.PodPending))
	case away && (r.now.Before(r.since.Add(Grace)) || r.now.Before(pod.CreationTimestamp.Add(Grace))):
		return "", fmt.Sprintf("the agent on node %s has not connected yet", node)
	case away:
		return v1alpha1.ReasonAgentAway, fmt.Sprintf("no agent of node %s is connected to the manager: see whether the pod of DaemonSet ctrlmesh-agent runs there", node)
	}
	return applied(node, o, wanted)
}

// applied returns why the connected agent of a node does not apply the policy of a running pod.
func applied(node string, o push.Observation, wanted string) (reason v1alpha1.Reason, message string) {
	switch {
	case o.Nacked != "" && o.Nacked == wanted:
		return v1alpha1.ReasonPolicyRejected, "its agent could not apply the policy, the last valid one stays in force: " + o.Nack
	case !o.Reported:
		return "", fmt.Sprintf("the agent on node %s has not reported on it yet", node)
	case o.Capture == "" && o.Message != "":
		return v1alpha1.ReasonNotCaptured, "it is not captured: " + o.Message
	case o.Capture == "":
		return "", "it is not captured yet"
	case o.Version != wanted:
		return "", "its agent does not apply the current policy yet"
	}
	return "", ""
}

// before returns what the last leader wrote about a pod, while that applies; nil after.
func (in Input) before(pod *corev1.Pod, o push.Observation) *v1alpha1.MemberStatus {
	if !unheard(pod, o, in.Now, in.Since) {
		return nil
	}
	return collect.Find(in.Shard.Config.Status.Pods, func(m v1alpha1.MemberStatus) bool { return m.Name == pod.Name && m.Node == pod.Spec.NodeName })
}

// Awaits reports whether next is not to be written yet: it differs from what the last leader wrote only in what
// agents report, and that of a member has not reported to this leader. Else each failover would change all statuses
// twice. Problems that no agent reports are written at once.
func (in Input) Awaits(next v1alpha1.ShardingConfigStatus) bool {
	if in.Obstacle != nil || in.Leader.Missing != nil || in.Shard.Problem != nil || len(in.Shard.Conflicts) > 0 || in.Waits != "" || in.MissingBundle != "" {
		return false
	}
	last := in.Shard.Config.Status
	next.Conditions, next.Pods, next.ReadyMembers, next.Method, next.Shadow = last.Conditions, last.Pods, last.ReadyMembers, last.Method, last.Shadow
	return equality.Semantic.DeepEqual(last, next) && slices.ContainsFunc(in.Shard.Members, func(pod *corev1.Pod) bool {
		return pod.Status.Phase == corev1.PodRunning && unheard(pod, in.Observe(pod.Spec.NodeName, string(pod.UID)), in.Now, in.Since)
	})
}

// unheard reports whether what the last leader wrote about a pod applies: its agent has not reported on it to
// this one, which has led for less than Grace. An agent connects before it reports. A pod that was created since
// may have the name of an earlier one.
func unheard(pod *corev1.Pod, o push.Observation, now, since time.Time) bool {
	return !pod.CreationTimestamp.After(since) && !o.Reported && (o.Connected || o.Left.IsZero()) && now.Before(since.Add(Grace))
}

func conditions(out *v1alpha1.ShardingConfigStatus, in Input, verdicts []verdict) {
	c := conditionsOf{out, in.Shard.Config.Generation, in.Now}
	if in.Shard.Root == nil { // the root reports the leaders of derived shards
		c.leading(in.Leader.Missing)
	}
	c.set(v1alpha1.ConditionReady, in.ready(out, verdicts))
	c.set(v1alpha1.ConditionProgressing, in.progressing(verdicts))
	c.set(v1alpha1.ConditionDegraded, in.degraded(verdicts))
}

func (in Input) ready(out *v1alpha1.ShardingConfigStatus, verdicts []verdict) condition {
	members := fmt.Sprintf("%d of %d members ready", out.ReadyMembers, out.Members)
	if in.Shard.Config.Spec.FailurePolicy == v1alpha1.FailOpen && !compile.PassesThrough(in.Shard.Config) {
		members += openWarning
	}
	switch {
	case in.Shard.Problem != nil:
		return condition{false, in.Shard.Problem.Reason, in.Shard.Problem.Message}
	case out.Members == 0:
		return condition{false, v1alpha1.ReasonNoMembers,
			fmt.Sprintf("no pod in namespace %s matches spec.selector and has label %s: \"true\"; set both on the pod template", in.Shard.Config.Namespace, v1alpha1.EnableProxyLabel)}
	case in.Obstacle != nil:
		return *impeded(in.Obstacle, members)
	case in.Leader.Missing != nil:
		return *impeded(in.Leader.Missing, members)
	case in.Waits != "":
		return condition{false, v1alpha1.ReasonHandingOver, members + "; " + takingOverMessage + in.Waits}
	case out.ReadyMembers == out.Members:
		return condition{true, v1alpha1.ReasonAllReady, members}
	}
	reason := v1alpha1.ReasonStarting
	if i := slices.IndexFunc(verdicts, verdict.broken); i >= 0 {
		reason = verdicts[i].reason
	}
	return condition{false, reason, members + "; " + describe(verdicts, verdict.unready)}
}

func (in Input) progressing(verdicts []verdict) condition {
	switch {
	case in.Waits != "":
		return condition{true, v1alpha1.ReasonHandingOver, takingOverMessage + in.Waits}
	case slices.ContainsFunc(verdicts, verdict.waiting):
		return condition{true, v1alpha1.ReasonStarting, describe(verdicts, verdict.waiting)}
	case in.Stamping != nil && !in.Stamping.Done && in.Shard.Problem == nil:
		return condition{true, v1alpha1.ReasonStamping, stampingMessage}
	}
	return condition{false, v1alpha1.ReasonSettled, ""}
}

func (in Input) degraded(verdicts []verdict) condition {
	broken := slices.IndexFunc(verdicts, verdict.broken)
	switch {
	case in.Shard.Problem != nil:
		return condition{true, in.Shard.Problem.Reason, in.Shard.Problem.Message}
	case len(in.Shard.Conflicts) > 0:
		return condition{true, v1alpha1.ReasonConflict, conflict(in.Shard.Config.Namespace, in.Shard.Conflicts[0])}
	case broken >= 0:
		return condition{true, verdicts[broken].reason, describe(verdicts, verdict.broken)}
	}
	return in.memberTroubles(in.Shard.Config, verdicts)
}

// memberTroubles returns the Degraded condition of a configuration without broken members.
func (c Common) memberTroubles(config *v1alpha1.ShardingConfig, verdicts []verdict) condition {
	stuck := func(v verdict) bool { // refused while its agent is disconnected, although failurePolicy is Open
		return config.Spec.FailurePolicy == v1alpha1.FailOpen && (v.Capture == v1alpha1.CaptureIPTables || v.Capture == v1alpha1.CaptureAddress)
	}
	distrusted := func(v verdict) bool { return v.distrusted }
	switch {
	case slices.ContainsFunc(verdicts, stuck):
		return condition{true, v1alpha1.ReasonCannotFailOpen, stuckMessage + describe(verdicts, stuck)}
	case slices.ContainsFunc(verdicts, distrusted):
		return condition{true, v1alpha1.ReasonMeshCANotTrusted, distrustMessage + describe(verdicts, distrusted)}
	case c.MissingBundle != "":
		return condition{true, v1alpha1.ReasonBundleRefused, bundleMessage + c.MissingBundle}
	case c.Stamping != nil && c.Stamping.Message != "":
		return condition{true, v1alpha1.ReasonStampingProblems, c.Stamping.Message}
	case config.Spec.Webhook != nil:
		if i := slices.IndexFunc(verdicts, func(v verdict) bool { return v.unrouted != "" }); i >= 0 {
			return condition{true, v1alpha1.ReasonWebhookNotRouted, fmt.Sprintf("%spod %s: %s", unroutedMessage, verdicts[i].Name, verdicts[i].unrouted)}
		}
	}
	return condition{false, v1alpha1.ReasonHealthy, ""}
}

// Messages of conditions.
const (
	openWarning     = "; failurePolicy is Open: while no agent serves their node, members run unsharded"
	stampingMessage = "existing objects are being labelled"

	unroutedMessage    = "reviews that the apiserver sends to some members are not routed to the shard that owns the namespace: "
	handingOverMessage = "keys are handed over"
	takingOverMessage  = "spec.limits takes effect once no pod acts on other objects of the operator: "
	bundleMessage      = "the CAs in its namespace are out of date, so that new pods do not start, and those that run will refuse their agents after the next rotation: make room in the namespace's quota, or exempt the ConfigMap from its policies: "
	distrustMessage    = "clients do not trust the mesh's CA and reach no apiserver: let them verify it by /var/run/secrets/kubernetes.io/serviceaccount/ca.crt, and by no CA from their image, their environment, a Secret or the API: "
	stuckMessage       = "failurePolicy is Open, but members that are not captured by ebpf are refused when their agent dies: "
)

func conflict(namespace string, c compile.Conflict) string {
	return fmt.Sprintf("pod %s: %s", c.Pod, compile.ConflictMessage(namespace, c.Configs))
}

// describe names the first few of the members that match, and counts the others.
func describe(verdicts []verdict, which func(verdict) bool) string {
	say := func(v verdict) string {
		return fmt.Sprintf("pod %s: %s", v.Name, cmp.Or(v.Message, "captured by "+v.Capture))
	}
	return strings.Join(clipped(collect.Map(collect.Filter(verdicts, which), say)), "; ")
}
