package quota

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// Allocator keeps the shares of all rules of scope Workload. It is recorded in the statuses of
// CircuitBreakers, from which the next leader continues. Its zero value is empty and ready
// to use. It is safe for concurrent use.
type Allocator struct {
	mu       sync.Mutex
	breakers map[types.NamespacedName]*breaker
	pods     map[types.UID]*pod
	opened   bool // a breaker was opened since the last round
}

// breaker is the state of a CircuitBreaker.
type breaker struct {
	// found is the record that the CircuitBreaker was opened with. It is kept until the
	// next round has read all pods.
	found  shares
	groups map[[2]string]*group // by rule and workload
	// record is the last result of Record, and initially what Open was given. It is valid
	// while known is set; a change of a member clears known.
	record []v1alpha1.RuleShares
	known  bool
}

// group is the set of members that share one rule.
type group struct {
	breaker  *breaker
	members  []*member
	unsorted bool
	// changed reports whether a member differs from the input of the last split, so that
	// the next split may have another result.
	changed bool
	// waits reports whether the bound of a member is not recorded yet.
	waits bool
}

type pod struct {
	// version is the version of the policy that was read last.
	version string
	// settled reports whether that policy was in force, and no split has changed a member
	// since.
	settled bool
	members map[place]*member
}

// place names the rule of which a pod has a share.
type place struct{ breaker, rule string }

type member struct {
	Member
	group *group
	pod   *pod
	name  string
	uid   types.UID
	named bool // the policy that is being read contains the rule
	gone  bool // the next split removes the member
}

// set updates the member, and reports whether that changed it.
func (m *member) set(now Member) bool {
	if m.Member == now {
		return false
	}
	m.Member = now
	m.group.change()
	return true
}

// leave removes the member for good.
func (m *member) leave() {
	m.gone = true
	m.group.change()
}

func (g *group) change() { g.changed, g.breaker.known = true, false }

// Lacks reports whether Open must be called for a CircuitBreaker before agents are sent
// any of its rules. This is so if the Allocator does not contain it, and it has rules of scope
// Workload or shares on record.
func (a *Allocator) Lacks(c *v1alpha1.CircuitBreaker) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.breakers[nameOf(c)] == nil && (len(c.Status.Shares) > 0 ||
		slices.ContainsFunc(c.Spec.RateLimitings, func(l v1alpha1.Limiting) bool { return l.Scope == v1alpha1.LimitScopeWorkload }))
}

func nameOf(c *v1alpha1.CircuitBreaker) types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
}

// Open adds a CircuitBreaker with the shares that its status records. The status must not
// come from a cache.
func (a *Allocator) Open(name types.NamespacedName, s v1alpha1.CircuitBreakerStatus) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.breakers == nil {
		a.breakers, a.pods = map[types.NamespacedName]*breaker{}, map[types.UID]*pod{}
	}
	if a.breakers[name] == nil {
		a.breakers[name] = &breaker{found: sharesOf(s.Shares), groups: map[[2]string]*group{}, record: s.Shares, known: true}
		a.opened = true
	}
}

// Share returns the share to send to a pod. It is empty if Open was not called for the
// CircuitBreaker.
func (a *Allocator) Share(name types.NamespacedName, rule, pod string, uid types.UID) *meshv1.Share {
	a.mu.Lock()
	defer a.mu.Unlock()
	br := a.breakers[name]
	if br == nil {
		return &meshv1.Share{}
	}
	s := br.found[rule][pod]
	if p := a.pods[uid]; p != nil {
		if m := p.members[place{name.Name, rule}]; m != nil {
			s = m.Sent
		}
	}
	return &meshv1.Share{Index: s.Index, Of: s.Of}
}

// Round updates the members and splits the rules again. policies are the last ones
// compiled, and inForce reports whether a policy is in force. Round reports whether pods
// must be sent other shares (send), and whether any pod waits for its bound to be recorded
// (record). Policies with the same version must be equal.
func (a *Allocator) Round(policies map[types.UID]compile.Policy, inForce func(compile.Policy) bool) (send, record bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.read(policies, inForce)
	var s splitter
	for _, br := range a.breakers {
		for at, g := range br.groups {
			if g.changed {
				send = s.split(g) || send
			}
			record = record || g.waits
			if len(g.members) == 0 {
				delete(br.groups, at)
			}
		}
	}
	return send, record
}

// splitter splits groups. It keeps the last result, because most groups equal the previous
// one.
type splitter struct{ in, before, after []Member }

// split splits a group, and reports whether any member must be sent another share.
func (s *splitter) split(g *group) (send bool) {
	g.members = slices.DeleteFunc(g.members, func(m *member) bool { return m.gone })
	if g.unsorted {
		slices.SortFunc(g.members, func(x, y *member) int { return cmp.Or(cmp.Compare(x.name, y.name), cmp.Compare(x.uid, y.uid)) })
	}
	s.in = s.in[:0]
	for _, m := range g.members {
		s.in = append(s.in, m.Member)
	}
	if !slices.Equal(s.in, s.before) {
		s.after = Split(s.in)
		s.in, s.before = s.before, s.in
	}
	g.unsorted, g.changed = false, false
	for i, m := range g.members {
		sent := m.Sent
		if m.set(s.after[i]) {
			m.pod.settled = false
			send = send || m.Sent != sent
		}
	}
	g.look()
	return send
}

// look sets whether a member waits.
func (g *group) look() {
	g.waits = slices.ContainsFunc(g.members, func(m *member) bool { return !m.Recorded.covers(m.May) })
}

// read updates which members exist, which are leaving, and which have confirmed.
func (a *Allocator) read(policies map[types.UID]compile.Policy, inForce func(compile.Policy) bool) {
	for uid, p := range a.pods {
		if policies[uid].PodPolicy == nil {
			for _, m := range p.members {
				m.leave()
			}
			delete(a.pods, uid)
		}
	}
	if len(a.breakers) == 0 {
		return
	}
	opened := map[types.NamespacedName]*breaker{}
	for name, br := range a.breakers {
		if len(br.found) > 0 {
			opened[name] = br
		}
	}
	for uid, policy := range policies {
		if policy.Node == "" {
			continue // no agent was sent the policy yet
		}
		p := a.pods[uid]
		if p == nil {
			p = &pod{members: map[place]*member{}}
			a.pods[uid] = p
		} else if !a.opened && p.version == policy.Version && (p.settled || len(p.members) == 0 || !inForce(policy)) {
			continue // nothing relevant has changed
		}
		a.readPod(p, policy, opened, inForce(policy))
	}
	for _, br := range opened {
		br.found, br.known = nil, false
	}
	a.opened = false
}

func (a *Allocator) readPod(p *pod, policy compile.Policy, opened map[types.NamespacedName]*breaker, inForce bool) {
	p.version, p.settled = policy.Version, inForce
	for _, t := range policy.GetTraffic().GetBreakers() {
		br := a.breakers[types.NamespacedName{Namespace: policy.Namespace, Name: t.Name}]
		like := p.first(t)
		for _, r := range t.Rules {
			if r.Share == nil || br == nil {
				continue
			}
			m := br.enter(p, place{t.Name, r.Name}, policy)
			m.named = true
			now := m.Member
			now.Leaving = false
			if sent := (Share{r.Share.Index, r.Share.Of}); inForce && sent == now.Sent {
				now = now.Confirm()
			}
			if now.May.None() {
				now.Like = like
			}
			m.set(now)
		}
	}
	p.readRecord(policy, opened)
	p.leaveOthers(inForce)
}

// readRecord adds the pod's recorded shares. They count even if the policy no longer
// contains the rule.
func (p *pod) readRecord(policy compile.Policy, opened map[types.NamespacedName]*breaker) {
	for name, br := range opened {
		for rule, pods := range br.found {
			if _, ok := pods[policy.Name]; ok && name.Namespace == policy.Namespace {
				br.enter(p, place{name.Name, rule}, policy)
			}
		}
	}
}

// leaveOthers marks the pod as leaving the rules that its policy does not contain.
func (p *pod) leaveOthers(inForce bool) {
	for at, m := range p.members {
		if m.named {
			m.named = false
			continue
		}
		now := m.Member
		now.Leaving, now.Sent = true, Share{}
		if m.set(now); now.May.None() || inForce {
			m.leave()
			delete(p.members, at)
		}
	}
}

// first returns the upper bound of the pod's share of the first rule that grants it one.
func (p *pod) first(t *meshv1.Breaker) Share {
	for _, r := range t.Rules {
		if m := p.members[place{t.Name, r.Name}]; m != nil && !m.May.None() {
			return m.May
		}
	}
	return Share{}
}

// enter returns the pod's member at a place. If there is none, it adds one with the share
// on record.
func (br *breaker) enter(p *pod, at place, policy compile.Policy) *member {
	if m := p.members[at]; m != nil {
		return m
	}
	key := [2]string{at.rule, policy.Workload}
	g := br.groups[key]
	if g == nil {
		g = &group{breaker: br}
		br.groups[key] = g
	}
	s := br.found[at.rule][policy.Name]
	m := &member{Member: Member{Sent: s, May: s, Recorded: s}, group: g, pod: p, name: policy.Name, uid: types.UID(policy.Uid)}
	g.members, g.unsorted = append(g.members, m), true
	g.change()
	p.members[at] = m
	return m
}

// Record returns what to record now in the status of a CircuitBreaker, including the
// shares of pods that it no longer selects. Until it is recorded, no pod is sent a share
// that exceeds the previous record. If Open was not called for the CircuitBreaker, its
// record stays as it is. ok is false if the record is too large for a status: then nothing
// must be recorded. The caller must not modify the result.
func (a *Allocator) Record(c *v1alpha1.CircuitBreaker) (record []v1alpha1.RuleShares, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	br := a.breakers[nameOf(c)]
	if br == nil {
		return c.Status.Shares, true
	}
	if br.known {
		return br.record, true
	}
	if record, ok = br.write(); !ok {
		return nil, false
	}
	for _, g := range br.groups {
		for _, m := range g.members {
			// Whether the write succeeds is unknown: Recorded must be safe for the old
			// record and for the new one.
			now := m.Member
			if now.Recorded.None() || now.May.None() {
				now.Recorded = Share{}
			} else {
				now.Recorded = Share{max(now.Recorded.Index, now.May.Index), max(now.Recorded.Of, now.May.Of)}
			}
			m.set(now)
		}
	}
	br.record, br.known = record, true
	return record, true
}

// Recorded updates the members of a CircuitBreaker after record was written to its status.
func (a *Allocator) Recorded(name types.NamespacedName, record []v1alpha1.RuleShares) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if br := a.breakers[name]; br != nil {
		known := sharesOf(record)
		for at, g := range br.groups {
			pods := known[at[0]]
			for _, m := range g.members {
				now := m.Member
				now.Recorded = pods[m.name]
				m.set(now)
			}
			g.look()
		}
	}
}

// Unrecorded reports whether a member of a CircuitBreaker waits for its bound to be
// recorded.
func (a *Allocator) Unrecorded(name types.NamespacedName) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	br := a.breakers[name]
	return br != nil && collect.Any(br.groups, func(_ [2]string, g *group) bool { return g.waits })
}

// Close removes the CircuitBreakers for which there returns false, once no pod may have a
// share of them.
func (a *Allocator) Close(there func(types.NamespacedName) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.breakers, func(name types.NamespacedName, br *breaker) bool { return len(br.groups) == 0 && !there(name) })
}
