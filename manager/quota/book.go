package quota

import (
	"cmp"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// Book keeps the shares of all rules of scope Workload. The statuses of CircuitBreakers
// are its record, by which another leader goes on. Its zero value is empty, and safe
// for concurrent use.
type Book struct {
	mu       sync.Mutex
	breakers map[types.NamespacedName]*breaker
}

// breaker is a CircuitBreaker.
type breaker struct {
	// found is what was on record when the book was opened, until it is known which
	// pods there are.
	found   Record
	members map[place]*member
}

// place is where a share may be.
type place struct {
	rule string
	uid  types.UID
}

type member struct {
	Member
	workload, pod string
}

// Record is what may be in force at most, by rule and pod.
type Record map[string]map[string]Share

// recordOf reads what a status has on record.
func recordOf(s v1alpha1.CircuitBreakerStatus) Record {
	out := Record{}
	for _, t := range s.TargetStatus {
		for _, l := range t.LimitingSnapshots {
			if is := ParseShare(l.Share); !is.None() {
				out.set(l.Name, t.PodName, is)
			}
		}
	}
	return out
}

func (r Record) set(rule, pod string, s Share) {
	if r[rule] == nil {
		r[rule] = map[string]Share{}
	}
	r[rule][pod] = s
}

// Has tells whether the book knows of a CircuitBreaker.
func (b *Book) Has(name types.NamespacedName) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.breakers[name] != nil
}

// Open begins with a CircuitBreaker by what its status has on record, which must not
// be from a cache.
func (b *Book) Open(name types.NamespacedName, s v1alpha1.CircuitBreakerStatus) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.breakers == nil {
		b.breakers = map[types.NamespacedName]*breaker{}
	}
	if b.breakers[name] == nil {
		b.breakers[name] = &breaker{found: recordOf(s), members: map[place]*member{}}
	}
}

// Share is what a pod is to be told. It is nobody's of a CircuitBreaker that the book
// was not opened with.
func (b *Book) Share(name types.NamespacedName, rule, pod string, uid types.UID) *meshv1.Share {
	b.mu.Lock()
	defer b.mu.Unlock()
	br := b.breakers[name]
	if br == nil {
		return &meshv1.Share{}
	}
	s := br.found[rule][pod]
	if m := br.members[place{rule, uid}]; m != nil {
		s = m.Told
	}
	return &meshv1.Share{Index: s.Index, Of: s.Of}
}

// Round splits anew, by the policies that agents are told last and whether those are in
// force. It tells whether pods are to be told other shares, and whether any wait for
// their bounds to be recorded.
func (b *Book) Round(policies map[types.UID]compile.Policy, inForce func(compile.Policy) bool) (tell, record bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.read(policies, inForce)
	for _, br := range b.breakers {
		groups := map[[2]string][]place{}
		for at, m := range br.members {
			group := [2]string{at.rule, m.workload}
			groups[group] = append(groups[group], at)
		}
		for _, places := range groups {
			slices.SortFunc(places, func(x, y place) int {
				return cmp.Or(cmp.Compare(br.members[x].pod, br.members[y].pod), cmp.Compare(x.uid, y.uid))
			})
			members := make([]Member, len(places))
			for i, at := range places {
				members[i] = br.members[at].Member
			}
			for i, m := range Split(members) {
				tell = tell || m.Told != members[i].Told
				record = record || !m.Recorded.covers(m.May)
				br.members[places[i]].Member = m
			}
		}
	}
	return tell, record
}

// read takes down who is there, who is leaving, and who has confirmed.
func (b *Book) read(policies map[types.UID]compile.Policy, inForce func(compile.Policy) bool) {
	for _, br := range b.breakers {
		for at, m := range br.members {
			if m.Leaving = true; policies[at.uid].PodPolicy == nil {
				delete(br.members, at)
			}
		}
	}
	opened := map[types.NamespacedName]*breaker{} // since the last round
	for name, br := range b.breakers {
		if len(br.found) > 0 {
			opened[name] = br
		}
	}
	for uid, p := range policies {
		if p.Node == "" {
			continue // it has been told nothing yet
		}
		for _, t := range p.GetTraffic().GetBreakers() {
			br := b.breakers[types.NamespacedName{Namespace: p.Namespace, Name: t.Name}]
			for _, r := range t.Rules {
				if r.Share == nil || br == nil {
					continue
				}
				m := br.enter(place{r.Name, uid}, p)
				m.Leaving = false
				if told := (Share{r.Share.Index, r.Share.Of}); told == m.Told && m.May != told && inForce(p) {
					m.Member = m.Confirm()
				}
			}
		}
		// What is on record counts, whatever the policy says of it now.
		for name, br := range opened {
			for rule, pods := range br.found {
				if _, ok := pods[p.Name]; ok && name.Namespace == p.Namespace {
					if at := (place{rule, uid}); br.members[at] == nil {
						br.enter(at, p).Leaving = true
					}
				}
			}
		}
	}
	for _, br := range b.breakers {
		br.found = nil
		for at, m := range br.members {
			if !m.Leaving {
				continue
			}
			// Its policy is without the rule.
			if m.Told = (Share{}); m.May.None() || inForce(policies[at.uid]) {
				delete(br.members, at)
			}
		}
	}
}

// enter is what is known of a pod.
func (br *breaker) enter(at place, p compile.Policy) *member {
	m := br.members[at]
	if m == nil {
		s := br.found[at.rule][p.Name]
		m = &member{Member: Member{Told: s, May: s, Recorded: s}, workload: p.Workload, pod: p.Name}
		br.members[at] = m
	}
	return m
}

// Record is what is to be recorded now of a CircuitBreaker, of those too that are not
// among its pods any more. Until it is, nobody is told what it does not have.
func (b *Book) Record(name types.NamespacedName) Record {
	b.mu.Lock()
	defer b.mu.Unlock()
	br := b.breakers[name]
	if br == nil {
		return nil
	}
	out := Record{}
	for at, m := range br.members {
		out.set(at.rule, m.pod, m.May)
		// One of both will be on record.
		if m.Recorded.None() || m.May.None() {
			m.Recorded = Share{}
		} else {
			m.Recorded = Share{max(m.Recorded.Index, m.May.Index), max(m.Recorded.Of, m.May.Of)}
		}
	}
	return out
}

// Recorded notes what was recorded. Pods that the record has no room for count too.
func (b *Book) Recorded(name types.NamespacedName, r Record) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if br := b.breakers[name]; br != nil {
		for at, m := range br.members {
			m.Recorded = r[at.rule][m.pod]
		}
	}
}

// Unrecorded tells whether a member of a CircuitBreaker waits for that.
func (b *Book) Unrecorded(name types.NamespacedName) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if br := b.breakers[name]; br != nil {
		for _, m := range br.members {
			if !m.Recorded.covers(m.May) {
				return true
			}
		}
	}
	return false
}

// Close forgets CircuitBreakers that are not there, once nobody has a share of them.
func (b *Book) Close(there func(types.NamespacedName) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, br := range b.breakers {
		if len(br.members) == 0 && !there(name) {
			delete(b.breakers, name)
		}
	}
}
