package explain

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// Action is what the mesh does with a request.
type Action string

// Actions.
const (
	// Unchanged: the request passes.
	Unchanged Action = "Unchanged"
	// Narrowed: a list, watch or deletecollection passes, restricted to some objects.
	Narrowed Action = "Narrowed"
	// Renamed: the request is about a lock, and passes under the name of the shard's lock.
	Renamed Action = "Renamed"
	// DryRun: the pod is a shadow, and the write passes as a dry run.
	DryRun Action = "DryRun"
	// Faulted: a fault may be injected.
	Faulted Action = "Faulted"
	// Refused: the proxy answers the request itself.
	Refused Action = "Refused"
	// Disconnected: no agent serves the pod, so that its connections are refused.
	Disconnected Action = "Disconnected"
)

// Verdict is what the mesh does with a request.
type Verdict struct {
	Namespace       string `json:"namespace"`
	Pod             string `json:"pod"`
	Verb            string `json:"verb"`
	Resource        string `json:"resource"`
	ObjectNamespace string `json:"objectNamespace,omitempty"`
	Name            string `json:"name,omitempty"`
	Cluster         string `json:"cluster,omitempty"`

	Action Action `json:"effect"`
	// Code is the status code of a refusal, and Reason its reason in ctrlmesh_refusals_total.
	Code   int32          `json:"code,omitempty"`
	Reason meshv1.Refusal `json:"reason,omitempty"`
	// Summary says it in a sentence. Of a refusal it has the message that the client gets.
	Summary string `json:"summary"`
	// By is the rule that decides; empty if none does.
	By string `json:"by,omitempty"`
	// Owner is the shard that owns the object.
	Owner string `json:"owner,omitempty"`
	// PodState is what the pod is to the mesh.
	PodState string  `json:"podState"`
	Limits   []Limit `json:"limits,omitempty"`
	Faults   []Fault `json:"faults,omitempty"`
	// Notes say what else a user must know, and what the API does not show.
	Notes []string `json:"notes,omitempty"`
	// Do is what a user can do about it.
	Do string `json:"do,omitempty"`
}

// outside is the state of a pod without the label.
const outside = "not on the mesh: it lacks the label " + v1alpha1.EnableProxyLabel

// Of returns the verdict about a request, from a snapshot of the namespace of its pod.
func Of(s *snapshot.Snapshot, q *Request) (Verdict, error) {
	return verdict(s, q, func(pod *corev1.Pod) (inForce, error) { return policyOf(s, pod) })
}

// verdict is Of, with the policies of pods by of.
func verdict(s *snapshot.Snapshot, q *Request, of func(*corev1.Pod) (inForce, error)) (Verdict, error) {
	v := Verdict{
		Namespace: q.Pod.Namespace, Pod: q.Pod.Name, Verb: q.Verb, Resource: q.Resource.String(),
		ObjectNamespace: q.Namespace, Name: q.Name, Cluster: q.Cluster, Action: Unchanged, Summary: "passes unchanged",
	}
	pod := s.Subjects.Pod
	if !compile.Labelled(pod) {
		v.PodState = outside
		return v, nil
	}
	in, err := of(pod)
	if err != nil {
		return v, err
	}
	v.Notes = in.notes
	v.PodState = memberText(s, pod, in)
	if in.Passthrough {
		v.By = describe(in.config, "clientCertificates: Passthrough")
		v.Summary = "passes undecrypted: the proxy does not read it"
	} else if err := v.decide(s, q, in); err != nil {
		return v, err
	}
	v.connection(s, pod, in)
	v.remarks(s, q, in)
	return v, nil
}

// decide asks the proxy.
func (v *Verdict) decide(s *snapshot.Snapshot, q *Request, in inForce) error {
	d, err := evaluate(in.PodPolicy, q)
	if err != nil {
		return err
	}
	v.isolated(s, q, in, d)
	if err := v.withheld(s, q, in, d); err != nil {
		return err
	}
	if d.end != nil {
		return nil
	}
	if err := v.electing(q, in, d); err != nil {
		return err
	}
	if v.Limits, err = limitsOf(s, in.PodPolicy, d); err != nil {
		return err
	}
	if v.Faults, err = faultsOf(s, in.PodPolicy, d); err != nil {
		return err
	}
	v.limited(in)
	return nil
}

// isolated fills in what the stages before the rules of traffic decide.
func (v *Verdict) isolated(s *snapshot.Snapshot, q *Request, in inForce, d *evaluated) {
	if d.end != nil {
		v.Action, v.Code, v.Reason = Refused, d.end.Status.ErrStatus.Code, d.end.Reason
		v.Summary = refusal(d.end)
		v.By, v.Do = refusedBy(in, d)
		if v.Reason == meshv1.RefusedForeign {
			v.Owner = ownerText(s, q, in)
		}
		return
	}
	v.passed(s, q, in, d)
}

// refusal returns the code, the reason and the message of a refusal.
func refusal(end *pipeline.Outcome) string {
	is := end.Status.ErrStatus
	return fmt.Sprintf("%d %s: %s", is.Code, end.Reason, strings.TrimPrefix(is.Message, "ctrlmesh: "))
}

// withheld says what a dry run, or isolation Observe, keeps from the request.
func (v *Verdict) withheld(s *snapshot.Snapshot, q *Request, in inForce, d *evaluated) error {
	spec := in.GetSharding()
	if d.end != nil || !spec.GetDryRun() && d.x.Would == "" {
		return nil
	}
	rule := "dryRun: true"
	if !spec.GetDryRun() {
		rule = "isolation: Observe"
	}
	enforced := proto.CloneOf(in.PodPolicy)
	if enforced.Sharding.DryRun = false; !spec.GetDryRun() {
		enforced.Sharding.Isolation = meshv1.Isolation_ISOLATION_ENFORCE
	}
	would, err := evaluate(enforced, q)
	if err != nil {
		return err
	}
	other := Verdict{Action: Unchanged, Summary: v.Summary}
	other.isolated(s, q, in, would)
	if other.Action != Unchanged {
		v.By = describe(in.config, rule)
		v.Notes = append(v.Notes, fmt.Sprintf("without %s: %s", rule, other.Summary))
	}
	return nil
}

// electing says whether a write of a Lease is refused if it is a leader-election record: its body decides.
func (v *Verdict) electing(q *Request, in inForce, d *evaluated) error {
	if d.x.Lock.Named != nil || q.Resource.Name != "leases" || q.Verb != "create" && q.Verb != "update" {
		return nil
	}
	elects := *q
	elects.elects = true
	would, err := evaluate(in.PodPolicy, &elects)
	if err == nil && would.end != nil {
		v.Notes = append(v.Notes, "if it is a leader-election record: "+refusal(would.end))
	}
	return err
}

// limited fills in what rules of traffic decide.
func (v *Verdict) limited(in inForce) {
	for _, l := range v.Limits {
		if l.refusal == nil {
			continue
		}
		v.Action, v.Code, v.Reason = Refused, 429, meshv1.RefusedLimited
		if l.refusal.Opened {
			v.Code, v.Reason = 503, meshv1.RefusedBreaker
		}
		v.Summary = fmt.Sprintf("%d %s: %s", v.Code, v.Reason, l.Summary)
		v.By = fmt.Sprintf("CircuitBreaker %s, rule %s", l.Breaker, l.Rule)
		v.Do = fmt.Sprintf("see kubectl ctrlmesh breaker %s -n %s, and docs/operations.md#open-breakers", l.Breaker, in.GetNamespace())
		return
	}
	if len(v.Faults) > 0 {
		f := v.Faults[0]
		v.Action = Faulted
		v.Summary = "a fault may be injected; otherwise: " + v.Summary
		v.By = fmt.Sprintf("FaultInjection %s, rule %s", f.Injection, f.Rule)
		v.Do = fmt.Sprintf("kubectl ctrlmesh faults stop %s -n %s ends it", f.Injection, in.GetNamespace())
	}
}

// connection fills in what follows if no agent serves the pod.
func (v *Verdict) connection(s *snapshot.Snapshot, pod *corev1.Pod, in inForce) {
	node := pod.Spec.NodeName
	if node == "" || !s.Has(snapshot.Programs) {
		return
	}
	agents := report.AgentsByNode(s)
	i := slices.IndexFunc(agents, func(a report.Agent) bool { return a.Node == node })
	see := fmt.Sprintf("see kubectl -n %s describe daemonset %s", s.Namespace, snapshot.Agent)
	direct, why := in.withoutAgent(pod.Name)
	switch {
	case i >= 0 && agents[i].Ready:
	case i >= 0 && agents[i].Pod != "":
		v.Notes = append(v.Notes, fmt.Sprintf("agent %s of node %s is not ready, so that connections may be refused: %s", agents[i].Pod, node, see))
	case direct:
		v.Action, v.Code, v.Reason, v.Owner, v.Limits, v.Faults = Unchanged, 0, "", "", nil, nil
		v.Summary, v.By = fmt.Sprintf("passes unchanged, because node %s has no agent", node), describe(in.config, failsOpen)
		if why != failsOpen {
			v.Notes = append(v.Notes, "only "+why)
		}
		v.Do = see
	default:
		v.Notes = append(v.Notes, "once the node has an agent: "+v.Summary)
		v.Action, v.Code, v.Reason, v.Owner = Disconnected, 0, "", ""
		v.Summary, v.By = fmt.Sprintf("the connection is refused, because node %s has no agent", node), describe(in.config, why)
		v.Do = see
	}
}

// remarks adds what the API does not show.
func (v *Verdict) remarks(s *snapshot.Snapshot, q *Request, in inForce) {
	if q.Name == "" && q.named() && namesMatter(q, in) {
		v.Notes = append(v.Notes, "no object is named, so that rules about single objects, such as locks, do not apply")
	}
	if s.Subjects.Pod.Annotations[v1alpha1.TrustAnnotation] == "" {
		v.Notes = append(v.Notes, "the pod was created while the mesh did not admit pods, so that its clients may not trust the mesh")
	}
	if q.UserAgent == "" && agentsMatter(in) {
		v.Notes = append(v.Notes, "rules with a User-Agent exist: name that of the client by --user-agent")
	}
	if why := unready(in, v.Pod); why != "" {
		v.Notes = append(v.Notes, "the manager says that the pod is not ready, so that its agent may apply an earlier policy: "+why)
	}
	if v.Action == Unchanged && q.writes() && gains(in, q.Namespace) {
		v.Notes = append(v.Notes, "the shard gained the namespace just now: until the caches of the pod have its objects, writes get 409")
	}
	if err := s.Requires(snapshot.Settings); err != nil {
		v.Notes = append(v.Notes, fmt.Sprintf("the defaults are taken for the settings of the mesh: %v", err))
	}
}

// namesMatter reports whether a rule may depend on the name of the object.
func namesMatter(q *Request, in inForce) bool {
	spec := in.GetSharding()
	names := func(of []*meshv1.ResourceMatch) bool {
		return slices.ContainsFunc(of, func(m *meshv1.ResourceMatch) bool { return len(m.GetNames()) > 0 })
	}
	return lock.Kind(q.Resource.Group, q.Resource.Name) && len(spec.GetLocks()) > 0 ||
		slices.ContainsFunc(spec.GetShared(), func(o *meshv1.SharedObjects) bool { return len(o.GetNames()) > 0 }) ||
		slices.ContainsFunc(in.GetTraffic().GetBreakers(), func(b *meshv1.Breaker) bool {
			return slices.ContainsFunc(b.GetRules(), func(r *meshv1.LimitRule) bool { return names(r.GetResources()) })
		}) ||
		slices.ContainsFunc(in.GetTraffic().GetInjections(), func(i *meshv1.Injection) bool {
			return slices.ContainsFunc(i.GetRules(), func(r *meshv1.FaultRule) bool { return names(r.GetResources()) })
		})
}

// agentsMatter reports whether a rule depends on the User-Agent.
func agentsMatter(in inForce) bool {
	return len(in.GetSharding().GetDeniedUserAgents()) > 0 || slices.ContainsFunc(in.GetTraffic().GetBreakers(), func(b *meshv1.Breaker) bool {
		return slices.ContainsFunc(b.GetRules(), func(r *meshv1.LimitRule) bool { return len(r.GetUserAgents()) > 0 })
	})
}

// gains reports whether the shard of the pod is being granted a namespace.
func gains(in inForce, namespace string) bool {
	if in.config == nil || in.config.Status.Root == nil || namespace == "" {
		return false
	}
	return slices.ContainsFunc(in.config.Status.Root.Handovers, func(h v1alpha1.HandoverStatus) bool {
		keys, err := sharding.Parse(h.Keys)
		return err == nil && h.To == in.GetSharding().GetShard() && keys.Owns(namespace)
	})
}

// unready returns why the status says that a pod is not ready; empty if it does not say so.
func unready(in inForce, pod string) string {
	if m := in.member(pod); m != nil {
		return m.Message
	}
	return ""
}

// member returns what the status says about a pod; nil if it says nothing.
func (in inForce) member(pod string) *v1alpha1.MemberStatus {
	if in.config == nil {
		return nil
	}
	return collect.Find(in.config.Status.Pods, func(m v1alpha1.MemberStatus) bool { return m.Name == pod })
}

const failsOpen = "failurePolicy: Open"

// withoutAgent reports whether connections of a pod go directly to the apiserver while its node has no agent, and why.
// Those of a pod that eBPF does not capture do not after a crash of the agent.
func (in inForce) withoutAgent(pod string) (direct bool, why string) {
	m := in.member(pod)
	switch {
	case !in.GetFailOpen():
		return false, "failurePolicy: Closed"
	case m == nil || m.Capture == "":
		return true, "if eBPF captures the pod"
	case m.Capture == v1alpha1.CaptureEBPF:
		return true, failsOpen
	case m.Capture == v1alpha1.CaptureIPTables:
		return false, "captured by iptables; direct only after the agent stopped in order"
	}
	return false, "captured by " + m.Capture
}

// memberText says what the pod is to the mesh.
func memberText(s *snapshot.Snapshot, pod *corev1.Pod, in inForce) string {
	parts := []string{"no ShardingConfig selects it"}
	if in.config != nil {
		shard := in.GetSharding().GetShard()
		parts[0] = origin.Describe(in.config)
		if shard != "" && shard != in.config.Name {
			parts[0] = "shard " + shard
		}
		if m := in.member(pod.Name); m != nil && m.Capture != "" {
			parts = append(parts, "captured by "+m.Capture)
		}
	}
	node := pod.Spec.NodeName
	agents := report.AgentsByNode(s)
	i := slices.IndexFunc(agents, func(a report.Agent) bool { return a.Node == node && a.Pod != "" })
	switch {
	case node == "":
		parts = append(parts, "on no node yet")
	case !s.Has(snapshot.Programs):
		parts = append(parts, fmt.Sprintf("on %s, whose agent cannot be read", node))
	case i < 0:
		parts = append(parts, "no agent on "+node)
	case !agents[i].Ready:
		parts = append(parts, "agent not ready on "+node)
	default:
		parts = append(parts, "agent ready on "+node)
	}
	return strings.Join(parts, ", ")
}

// Findings reports whether the request does not pass, or may get a fault.
func (v Verdict) Findings() bool {
	return v.Action == Refused || v.Action == Faulted || v.Action == Disconnected
}

// WriteText implements render.Report.
func (v Verdict) WriteText(t *render.Text) {
	t.Line("%s", v.Summary)
	for _, line := range []struct{ title, text string }{{"by", v.By}, {"owner", v.Owner}, {"pod", v.Pod + ", " + v.PodState}} {
		if line.text != "" {
			t.Line("  %s: %s", line.title, line.text)
		}
	}
	for _, l := range v.Limits {
		if l.refusal != nil {
			continue // the summary says it
		}
		state := ""
		if l.State != "" {
			state = " (" + string(l.State) + ")"
		}
		t.Line("  limit: CircuitBreaker %s, rule %s%s: %s", l.Breaker, l.Rule, state, l.Summary)
	}
	for _, f := range v.Faults {
		t.Line("  fault: FaultInjection %s, rule %s: %s", f.Injection, f.Rule, strings.Join(f.Faults, ", "))
	}
	for _, note := range v.Notes {
		t.Line("  note: %s", note)
	}
	if v.Do != "" {
		t.Line("  do: %s", v.Do)
	}
}
