package push

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/wake"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/usage"
)

// maxSerial bounds the serials that agents report, so that there is always a greater one.
const maxSerial = 1 << 62

// maxText bounds each text of an agent that the manager keeps, in bytes.
const maxText = 512

// stream is the stream of one agent. Server.mu guards the fields after can.
type stream struct {
	conn   meshv1.Mesh_ConnectServer
	ready  wake.Flag // set when there may be something to send
	cancel context.CancelCauseFunc
	can    abilities

	clusterDirty bool
	synced       bool
	webhooks     *string                // version that was sent last; nil before the first
	dirty        map[string]struct{}    // pods whose policy must still be sent
	seen         map[string]Observation // the agent's reports, by pod uid
	// versions and namespaces are the versions and namespaces of the pods in its hello. They are
	// kept until the first Set, which shows which pods have policies.
	versions, namespaces map[string]string
}

// abilities of an agent's node, by its hello.
type abilities struct {
	capture     string // the best capture mode
	hostNetwork bool
	reason      string   // why not
	known       []string // constants Ability...
}

func can(h *meshv1.Hello) abilities {
	a := abilities{
		hostNetwork: h.HostNetwork, reason: cmp.Or(clip(h.HostNetworkReason), "its agent is too old to report it"),
		known: h.Abilities,
	}
	if len(h.Captures) > 0 && slices.Contains(captures, h.Captures[0]) {
		a.capture = h.Captures[0]
	}
	return a
}

// has reports whether an agent has an ability.
func (a abilities) has(ability string) bool { return slices.Contains(a.known, ability) }

var captures = []string{v1alpha1.CaptureEBPF, v1alpha1.CaptureIPTables, v1alpha1.CaptureAddress}

// send sends until the context ends or the connection fails.
func (s *Server) send(ctx context.Context, name string, st *stream) error {
	for {
		msg := s.next(name, st)
		if msg == nil {
			select {
			case <-st.ready.Wait():
				continue
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		if err := st.conn.Send(msg); err != nil {
			return err
		}
	}
}

// next returns the next message for a stream; nil if there is none now.
func (s *Server) next(name string, st *stream) *meshv1.ManagerMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cluster == nil {
		return nil // before the first Set, send nothing rather than an empty state
	}
	if st.clusterDirty {
		st.clusterDirty = false
		return &meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Cluster{Cluster: s.cluster}}
	}
	for uid := range st.dirty {
		delete(st.dirty, uid)
		if p := s.nodes.node(name).policies[uid]; p != nil {
			if reason := st.lacks(p); reason != "" {
				o := st.seen[uid]
				o.Withheld = true
				o.Nacked, o.Nack = p.Version, fmt.Sprintf("%s: upgrade the agent of node %s", reason, name)
				st.seen[uid] = o
				continue
			}
			st.sending(uid, p.Version)
			return &meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Upsert{Upsert: p}}
		}
		return &meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Remove{Remove: &meshv1.Remove{Uid: uid}}}
	}
	if !st.synced {
		st.synced = true
		return &meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Synced{Synced: &meshv1.Synced{}}}
	}
	return s.nextWebhooks(name, st)
}

// nextWebhooks returns the webhooks of a node, unless its agent has them. It comes last, so
// that no policy waits for it.
func (s *Server) nextWebhooks(name string, st *stream) *meshv1.ManagerMessage {
	w := s.nodes.node(name).webhooks
	if !s.webhooksKnown || st.webhooks != nil && *st.webhooks == w.GetVersion() {
		return nil
	}
	if w == nil {
		w = &meshv1.Webhooks{}
	}
	st.webhooks = new(w.GetVersion())
	return &meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Webhooks{Webhooks: w}}
}

// needs are the abilities without which an agent must not get some policies.
var needs = []struct {
	ability, without string
	of               func(*meshv1.PodPolicy) bool
}{
	{meshv1.AbilityLargePolicies, "it is larger than its agent receives", func(p *meshv1.PodPolicy) bool { return proto.Size(p) > meshv1.MaxSmallPolicyBytes }},
	{meshv1.AbilityStandby, "its agent knows neither standby nor the operator's locks", func(p *meshv1.PodPolicy) bool {
		s := p.GetSharding()
		return s.GetStandby() || s.GetDryRun() || len(s.GetLocks()) > 0
	}},
	{meshv1.AbilityClusterScoped, "its agent does not know clusterScoped of roots", func(p *meshv1.PodPolicy) bool { return p.GetSharding().GetClusterScopedOwner() != "" }},
	{meshv1.AbilityUserAgents, "its agent does not know User-Agents of configurations", func(p *meshv1.PodPolicy) bool {
		s := p.GetSharding()
		return s.GetUserAgent() != "" || s.GetUserAgentPrefix() != "" || len(s.GetDeniedUserAgents()) > 0
	}},
	{meshv1.AbilityRequestScope, "its agent does not know scope of rules", func(p *meshv1.PodPolicy) bool {
		return matched(p.GetTraffic(), func(m *meshv1.ResourceMatch) bool { return m.GetScope() != meshv1.RequestScope_REQUEST_SCOPE_ALL })
	}},
	{meshv1.AbilityShadow, "its agent does not know shadows", func(p *meshv1.PodPolicy) bool { return p.GetSharding().GetShadow() != nil }},
	{meshv1.AbilityClusters, "its agent does not know clusters", func(p *meshv1.PodPolicy) bool {
		return len(p.GetClusterPaths()) > 0 || matched(p.GetTraffic(), func(m *meshv1.ResourceMatch) bool { return len(m.GetClusters()) > 0 })
	}},
	{meshv1.AbilityMemberNamespaces, "its agent does not know namespaces of member clusters", func(p *meshv1.PodPolicy) bool {
		return len(p.GetClusterPaths()) > 0 && p.GetSharding().GetKey() == meshv1.Key_KEY_NAMESPACE
	}},
}

// lacks returns why a policy must not be sent to an agent; empty if it may. A policy that
// is too large would end the stream, and affect all other pods of the node.
func (st *stream) lacks(p *meshv1.PodPolicy) string {
	for _, n := range needs {
		if !st.can.has(n.ability) && n.of(p) {
			return n.without
		}
	}
	return ""
}

// matched reports whether a rule matches requests in a way for which set is true.
func matched(t *meshv1.Traffic, set func(*meshv1.ResourceMatch) bool) bool {
	return slices.ContainsFunc(t.GetBreakers(), func(b *meshv1.Breaker) bool {
		return slices.ContainsFunc(b.GetRules(), func(r *meshv1.LimitRule) bool { return slices.ContainsFunc(r.GetResources(), set) })
	}) || slices.ContainsFunc(t.GetInjections(), func(i *meshv1.Injection) bool {
		return slices.ContainsFunc(i.GetRules(), func(r *meshv1.FaultRule) bool { return slices.ContainsFunc(r.GetResources(), set) })
	})
}

// sending records that another version of a pod's policy is sent. The previous version is not
// in force any more, or soon will not be, so the agent must confirm it again if it is sent
// again. A version with a serial is kept: nothing older comes into force after it.
func (st *stream) sending(uid, version string) {
	o, said := st.seen[uid]
	if _, serial := compile.Serial(o.Version); said && o.Version != version && !serial {
		o.Version = ""
		st.seen[uid] = o
	}
}

// receive reads until the connection ends. It begins with the first Set: before that all reports
// would be of unknown pods and be ignored, and agents report a pod again only when it changes.
func (s *Server) receive(ctx context.Context, name string, st *stream) error {
	select {
	case <-s.firstSet():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	for {
		msg, err := st.conn.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case msg.GetAck() != nil:
			s.ack(name, st, msg.GetAck())
		case msg.GetReport() != nil:
			s.report(name, st, msg.GetReport())
		case msg.GetHello() != nil:
			return status.Error(codes.InvalidArgument, "a second hello")
		}
		// Ignore other kinds, which a newer agent may send.
	}
}

func (s *Server) ack(name string, st *stream, a *meshv1.Ack) {
	if a.Error != "" {
		metrics.PolicyNacks.Inc()
		s.log().Warn("an agent could not apply a policy", "node", name, "pod", clip(a.Uid), "error", clip(a.Error))
	}
	if a.Uid == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes.node(name)
	if n.policies[a.Uid] == nil { // not a pod of this node, or no more
		if a.Version == "" && a.Error == "" && n.confirm(a.Uid, st) {
			s.Changed()
		}
		return
	}
	o := st.seen[a.Uid]
	o.Serial, o.Barred, o.Withheld = int64(min(a.Serial, maxSerial)), a.Barred, false
	if a.Error == "" {
		o.Version, o.Nacked, o.Nack, o.TrafficMessage = clip(a.Version), "", "", clip(a.TrafficError)
	} else {
		o.Nacked, o.Nack = clip(a.Version), clip(a.Error)
	}
	st.seen[a.Uid] = o
	s.Changed()
}

func (s *Server) report(name string, st *stream, r *meshv1.Report) {
	news := false
	for _, p := range r.Pods {
		news = s.reportPod(name, st, p) || news
	}
	if news {
		s.Changed()
	} else {
		s.Counted()
	}
}

// reportPod stores a pod's report, and reports whether more has changed than counts. It
// reads these, which may be many, without the lock.
func (s *Server) reportPod(name string, st *stream, p *meshv1.PodReport) (news bool) {
	policy := s.policy(name, p.GetUid())
	if policy == nil {
		return false
	}
	rules := states(policy.GetTraffic().GetBreakers(), p.Rules, validRule)
	faults := states(policy.GetTraffic().GetInjections(), p.Faults, validFault)
	active, used := activity(p.Activity), usage.Bounded(p.Usage)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nodes.node(name).policies[p.Uid] == nil {
		return false
	}
	before := st.seen[p.Uid]
	o := before
	o.Reported, o.Capture, o.Message, o.Version, o.Methods = true, clip(p.Capture), clip(p.Message), clip(p.Version), clipMethods(p.Methods)
	o.LockReport = LockReport{p.LockHolder, heldLocks(p.HeldLocks), observedLocks(p.ObservedLocks), lockRefusals(policy, p.LockRefusals), deadHolders(p.DeadHolders)}
	o.TrafficReport = TrafficReport{Rules: rules, Faults: faults, EgressMessage: clip(p.EgressMessage), TrafficMessage: clip(p.TrafficMessage)}
	o.WebhookMessage, o.Distrusted, o.Activity, o.Outcomes, o.Shadow = clip(p.WebhookMessage), p.Distrusted, active, outcomes(p.Outcomes), shadow(p.Shadow)
	o.Usage = used
	if o.Version == o.Nacked && !o.Withheld { // saved by a later try, which no ack follows
		o.Nacked, o.Nack = "", ""
	}
	st.seen[p.Uid] = o
	if len(o.Dead) > 0 {
		if s.exits == nil {
			s.exits = map[string]string{}
		}
		s.exits[p.Uid] = name
	}
	return !o.equalExceptCounts(before)
}

// policy returns the policy of a pod on a node; nil if it has none.
func (s *Server) policy(node, uid string) *meshv1.PodPolicy {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.nodes[node]; n != nil {
		return n.policies[uid]
	}
	return nil
}

// lockResources are those that can hold a lock. Earlier agents report Leases alone.
var lockResources = []string{"leases", "configmaps", "endpoints"}

// deadHolders returns the reported holders, bounded. It omits holders with texts that are
// too long, because a clipped one would name another holder.
func deadHolders(dead []*meshv1.DeadHolder) (out []Holder) {
	for _, d := range dead[:min(len(dead), meshv1.MaxLocks*len(lockResources))] {
		h := Holder{d.GetNamespace(), d.GetName(), cmp.Or(d.GetResource(), lockResources[0]), d.GetIdentity(), d.GetResourceVersion()}
		if slices.Contains(lockResources, h.Resource) && max(len(h.Namespace), len(h.Name), len(h.Version)) <= maxText && len(h.Identity) <= meshv1.MaxIdentity {
			out = append(out, h)
		}
	}
	return out
}

// heldLocks returns the reported names, bounded and sorted.
func heldLocks(names []string) []string {
	out := collect.Map(names[:min(len(names), meshv1.MaxLocks)], clip)
	slices.Sort(out)
	return out
}

// observedLocks returns the reported locks, bounded and sorted. Locks whose names
// cannot be an object's, or whose resource cannot hold a lock, are left out.
func observedLocks(locks []*meshv1.ObservedLock) []ObservedLock {
	var out []ObservedLock
	for _, l := range locks[:min(len(locks), meshv1.MaxLocks)] {
		if len(validation.IsDNS1123Label(l.GetNamespace()))+len(validation.IsDNS1123Subdomain(l.GetName())) > 0 ||
			!slices.Contains(lockResources, l.GetResource()) {
			continue
		}
		out = append(out, ObservedLock{l.GetNamespace(), l.GetName(), l.GetResource(), clip(l.GetHolder()), l.GetWritten()})
	}
	slices.SortFunc(out, func(a, b ObservedLock) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Resource, b.Resource))
	})
	return out
}

// clipMethods bounds the methods that an agent reports for a pod.
func clipMethods(methods map[string]string) map[string]string {
	var out map[string]string
	for resource, method := range methods {
		if len(out) == meshv1.MaxMethods {
			break
		}
		if out == nil {
			out = map[string]string{}
		}
		out[clip(resource)] = clip(method)
	}
	return out
}

// clip bounds a text from an agent, and replaces characters that cannot be stored.
func clip(text string) string {
	text = strings.ToValidUTF8(text[:min(len(text), maxText)], "?")
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
}
