package quota

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

var cb = types.NamespacedName{Namespace: "ns", Name: "cb"}

// mesh is what pods were sent, and which agents do not answer.
type mesh struct {
	*Allocator
	pods  map[string]bool // whether the CircuitBreaker selects them
	away  map[string]bool
	sent  map[types.UID]compile.Policy
	force map[types.UID]compile.Policy
}

func newMesh(s v1alpha1.CircuitBreakerStatus) *mesh {
	m := &mesh{Allocator: &Allocator{}, pods: map[string]bool{}, away: map[string]bool{}, force: map[types.UID]compile.Policy{}}
	m.Open(cb, s)
	return m
}

// push sends all pods their policies, and lets the agents that answer apply them.
func (m *mesh) push() {
	m.sent = map[types.UID]compile.Policy{}
	for pod, selected := range m.pods {
		uid := types.UID(pod)
		p := &meshv1.PodPolicy{Uid: pod, Namespace: "ns", Name: pod, Workload: "w"}
		if selected {
			p.Traffic = &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{
				{Name: "own"}, {Name: "r", Share: m.Share(cb, "r", pod, uid)},
			}}}}
		}
		m.sent[uid] = sealed(p)
		if !m.away[pod] {
			m.force[uid] = m.sent[uid]
		}
	}
}

// sealed is a policy with its version.
func sealed(p *meshv1.PodPolicy) compile.Policy {
	var version []byte
	for _, b := range p.GetTraffic().GetBreakers() {
		for _, r := range b.Rules {
			version = append(version, r.Name...)
			if r.Share == nil {
				continue
			}
			version = binary.AppendUvarint(binary.AppendUvarint(version, uint64(r.Share.GetIndex())), uint64(r.Share.GetOf()))
		}
	}
	p.Version = string(version)
	return compile.Policy{Node: "n", PodPolicy: p}
}

// record is what is to be recorded.
func record(t require.TestingT, b *Allocator) []v1alpha1.RuleShares {
	out, ok := b.Record((&fixture{}).breaker())
	require.True(t, ok)
	return out
}

// round also records, if it is asked to.
func (m *mesh) round(t *testing.T) bool {
	inForce := func(p compile.Policy) bool { return m.force[types.UID(p.Name)].PodPolicy == p.PodPolicy }
	send, waits := m.Round(m.sent, inForce)
	if waits {
		m.Recorded(cb, record(t, m.Allocator))
	}
	return send || waits
}

func (m *mesh) settle(t *testing.T) map[string]string {
	for range 20 {
		if m.push(); !m.round(t) {
			out := map[string]string{}
			for pod := range m.pods {
				if s := m.force[types.UID(pod)].GetTraffic().GetBreakers(); s != nil {
					out[pod] = Share{s[0].Rules[1].Share.Index, s[0].Rules[1].Share.Of}.String()
				}
			}
			return out
		}
	}
	t.Fatal("it does not end")
	return nil
}

func TestAllocator(t *testing.T) {
	m := newMesh(v1alpha1.CircuitBreakerStatus{})
	m.pods["a"], m.pods["b"] = true, true
	require.Equal(t, map[string]string{"a": "1/2", "b": "2/2"}, m.settle(t))
	require.Equal(t, []v1alpha1.RuleShares{{Rules: []string{"r"}, Pods: map[string]string{"a": "1/2", "b": "2/2"}}}, record(t, m.Allocator))

	// One does not answer: who comes waits.
	m.away["b"], m.pods["c"] = true, true
	require.Equal(t, map[string]string{"a": "1/3", "b": "2/2", "c": "-"}, m.settle(t))
	delete(m.away, "b")
	require.Equal(t, map[string]string{"a": "1/3", "b": "2/3", "c": "3/3"}, m.settle(t))

	// One is selected no more, but its agent does not answer: it keeps its share.
	m.away["b"], m.pods["b"] = true, false
	require.Equal(t, map[string]string{"a": "1/3", "b": "2/3", "c": "3/3"}, m.settle(t))
	require.Equal(t, "2/3", record(t, m.Allocator)[0].Pods["b"])
	m.Recorded(cb, record(t, m.Allocator))
	delete(m.away, "b")
	require.Equal(t, map[string]string{"a": "1/2", "c": "2/2"}, m.settle(t))

	// One is gone.
	delete(m.pods, "a")
	require.Equal(t, map[string]string{"c": "1/1"}, m.settle(t))
	delete(m.pods, "c")
	m.settle(t)
	m.Close(func(types.NamespacedName) bool { return true })
	require.Contains(t, m.breakers, cb)
	m.Close(func(types.NamespacedName) bool { return false })
	require.Empty(t, m.breakers)
}

// A new leader sends what is on record, and goes on from there.
func TestANewLeader(t *testing.T) {
	m := newMesh(v1alpha1.CircuitBreakerStatus{Shares: []v1alpha1.RuleShares{{
		Rules: []string{"before", "r"}, Pods: map[string]string{"a": "1/3", "b": "2/3", "c": "-", "d": "3/3", "gone": "3/3"},
	}}})
	m.pods["a"], m.pods["b"], m.pods["c"], m.pods["d"] = true, true, true, false
	m.away["b"], m.away["d"] = true, true
	require.Equal(t, &meshv1.Share{Index: 1, Of: 3}, m.Share(cb, "r", "b", "b"))
	require.Equal(t, map[string]string{"a": "1/4", "c": "-"}, m.settle(t))
	delete(m.away, "d") // it is not selected any more
	require.Equal(t, map[string]string{"a": "1/3", "c": "3/3"}, m.settle(t), "b has what it had")
	delete(m.away, "b")
	require.Equal(t, map[string]string{"a": "1/3", "b": "2/3", "c": "3/3"}, m.settle(t))
}

// What is on record stays there until it is known which pods there are.
func TestARecordStandsUntilPodsAreKnown(t *testing.T) {
	found := []v1alpha1.RuleShares{{Rules: []string{"r"}, Pods: map[string]string{"a": "1/2", "gone": "2/2"}}}
	m := newMesh(v1alpha1.CircuitBreakerStatus{Shares: found})
	require.Equal(t, found, record(t, m.Allocator))
	m.Recorded(cb, found)
	m.pods["a"] = true
	require.Equal(t, map[string]string{"a": "1/1"}, m.settle(t))
	require.Equal(t, map[string]string{"a": "1/1"}, record(t, m.Allocator)[0].Pods)

	m = newMesh(v1alpha1.CircuitBreakerStatus{Shares: found})
	m.settle(t)
	require.Empty(t, record(t, m.Allocator), "there are none")
}

// Until it is recorded what a pod may have, it is not sent.
func TestFirstRecordThenSend(t *testing.T) {
	m := newMesh(v1alpha1.CircuitBreakerStatus{})
	m.pods["a"] = true
	for range 3 {
		m.push()
		_, waits := m.Round(m.sent, func(compile.Policy) bool { return true })
		require.True(t, waits)
		require.True(t, m.Unrecorded(cb))
		require.Zero(t, m.Share(cb, "r", "a", "a").Of)
	}
	m.Recorded(cb, record(t, m.Allocator))
	require.False(t, m.Unrecorded(cb))
	require.Equal(t, map[string]string{"a": "1/1"}, m.settle(t))

	// While a lesser one is being recorded, the greater that is on record is not sent.
	m.pods["b"] = true
	require.Equal(t, map[string]string{"a": "1/2", "b": "2/2"}, m.settle(t))
	record(t, m.Allocator)
	delete(m.pods, "b")
	m.push()
	m.Round(m.sent, func(compile.Policy) bool { return true })
	require.EqualValues(t, 2, m.Share(cb, "r", "a", "a").Of)
}

// Rules of the same pods are recorded once, also one that is written when the pods have
// come and gone.
func TestEqualRulesAreRecordedTogether(t *testing.T) {
	w := &fixture{shares: &Allocator{}, rules: 2}
	w.lead()
	for i := range 4 {
		w.join(fmt.Sprint(9-i), []bool{true, true, false})
		w.settle(t)
	}
	w.rules = 3
	for _, p := range w.pods {
		p.selected[2] = true
	}
	w.settle(t)
	require.Equal(t, []v1alpha1.RuleShares{{Rules: []string{"r0", "r1", "r2"}, Pods: map[string]string{"9": "1/4", "8": "2/4", "7": "3/4", "6": "4/4"}}}, w.status)
}

// Who was to have more, and is not any more before it was sent, still has what it has, and
// that is known without his policy being another.
func TestMoreThatWasNeverSent(t *testing.T) {
	w := &fixture{shares: &Allocator{}, rules: 1}
	w.lead()
	w.join("a", []bool{true})
	w.join("b", []bool{true})
	w.settle(t)
	version := w.pods[0].force.Version
	w.pods[1].selected[0] = false
	w.compile()
	w.arrive()
	_, waits := w.shares.Round(w.compiled, w.inForce)
	require.True(t, waits, "a may have all, once it is recorded")
	w.pods[1].selected[0] = true
	w.settle(t)
	require.Equal(t, version, w.pods[0].force.Version)
	require.Equal(t, "2/2", w.pods[1].share(0).String())
}

// A CircuitBreaker of which the pods' policies named shares before the Allocator was opened with it.
func TestOpenedLate(t *testing.T) {
	w := &fixture{shares: &Allocator{}, rules: 1}
	w.shares.Open(types.NamespacedName{Namespace: "ns", Name: "another"}, v1alpha1.CircuitBreakerStatus{})
	w.join("a", []bool{true})
	for range 2 {
		w.compile()
		w.arrive()
		_, waits := w.shares.Round(w.compiled, w.inForce)
		require.False(t, waits)
	}
	w.shares.Open(cb, v1alpha1.CircuitBreakerStatus{})
	_, waits := w.shares.Round(w.compiled, w.inForce)
	require.True(t, waits)
	w.settle(t)
	require.Equal(t, "1/1", w.pods[0].share(0).String())
}

// What a status has no room for is not recorded, and no pod is sent it. What was goes on.
func TestTooManyShares(t *testing.T) {
	w := &fixture{shares: &Allocator{}, rules: 1}
	w.lead()
	name := func(i int) string { return fmt.Sprint(strings.Repeat("x", maxRecord/10), i) }
	for i := range 9 {
		w.join(name(i), []bool{true})
	}
	w.settle(t)
	text, err := json.Marshal(w.status)
	require.NoError(t, err)
	require.Less(t, len(text), maxRecord+maxRecord/50)
	before := w.status

	w.join(name(9), []bool{true})
	w.join(name(10), []bool{true})
	for n := range 6 {
		w.compile()
		w.arrive()
		_, waits := w.shares.Round(w.compiled, w.inForce)
		if n > 1 { // who had all has less
			require.True(t, waits)
			_, ok := w.shares.Record(w.breaker())
			require.False(t, ok)
			w.shares.Recorded(cb, before) // the rest of the status was written
		}
		w.check(t)
	}
	require.Equal(t, "9/11", w.pods[8].share(0).String())
	require.True(t, w.pods[9].share(0).None())

	w.pods = w.pods[2:]
	w.settle(t)
	require.EqualValues(t, 9, w.pods[8].share(0).Of)
}

// fixture is a CircuitBreaker with rules, of scope Workload at times, and the mesh around it.
// Everything in it may happen in any order, and be late.
type fixture struct {
	rules    int
	apart    bool // its rules are of scope Pod
	pods     []*bookPod
	shares   *Allocator
	status   []v1alpha1.RuleShares
	compiled map[types.UID]compile.Policy
}

type bookPod struct {
	name, workload string
	selected       []bool // by rule
	force          *meshv1.PodPolicy
	sent           []*meshv1.PodPolicy // which arrive in order
}

func (p *bookPod) share(rule int) Share {
	for _, b := range p.force.GetTraffic().GetBreakers() {
		for _, r := range b.Rules {
			if r.Name == fmt.Sprint("r", rule) {
				return Share{r.Share.GetIndex(), r.Share.GetOf()}
			}
		}
	}
	return Share{}
}

func (w *fixture) join(name string, selected []bool) {
	w.pods = append(w.pods, &bookPod{name: name, workload: "w", selected: selected})
}

// breaker is the CircuitBreaker as it is now.
func (w *fixture) breaker() *v1alpha1.CircuitBreaker {
	c := &v1alpha1.CircuitBreaker{Status: v1alpha1.CircuitBreakerStatus{Shares: w.status}}
	c.Namespace, c.Name = cb.Namespace, cb.Name
	scope := v1alpha1.LimitScopeWorkload
	if w.apart {
		scope = v1alpha1.LimitScopePod
	}
	for rule := range w.rules {
		c.Spec.RateLimitings = append(c.Spec.RateLimitings, v1alpha1.Limiting{Name: fmt.Sprint("r", rule), Scope: scope})
	}
	return c
}

// open opens the Allocator if that is needed.
func (w *fixture) open() {
	if c := w.breaker(); w.shares.Lacks(c) {
		w.shares.Open(cb, c.Status)
	}
}

// record is what is to be recorded.
func (w *fixture) record(t require.TestingT) []v1alpha1.RuleShares {
	out, ok := w.shares.Record(w.breaker())
	require.True(t, ok)
	return out
}

// compile sends all pods what they are to have.
func (w *fixture) compile() {
	w.compiled = map[types.UID]compile.Policy{}
	for _, p := range w.pods {
		b := &meshv1.Breaker{Name: cb.Name}
		for rule := range w.rules {
			if name := fmt.Sprint("r", rule); p.selected[rule] {
				r := &meshv1.LimitRule{Name: name}
				if !w.apart {
					r.Share = w.shares.Share(cb, name, p.name, types.UID(p.name))
				}
				b.Rules = append(b.Rules, r)
			}
		}
		policy := sealed(&meshv1.PodPolicy{Uid: p.name, Namespace: cb.Namespace, Name: p.name, Workload: p.workload, Traffic: &meshv1.Traffic{Breakers: []*meshv1.Breaker{b}}})
		w.compiled[types.UID(p.name)] = policy
		last := p.force
		if len(p.sent) > 0 {
			last = p.sent[len(p.sent)-1]
		}
		if last.GetVersion() != policy.Version {
			p.sent = append(p.sent, policy.PodPolicy)
		}
	}
}

// arrive lets everything that was sent arrive.
func (w *fixture) arrive() {
	for _, p := range w.pods {
		p.arrive()
	}
}

func (p *bookPod) arrive() {
	for _, policy := range p.sent {
		p.force = policy
	}
	p.sent = nil
}

func (w *fixture) inForce(policy compile.Policy) bool {
	i := slices.IndexFunc(w.pods, func(p *bookPod) bool { return p.name == policy.Name })
	return i >= 0 && len(w.pods[i].sent) == 0 && w.pods[i].force.GetVersion() == policy.Version
}

// lead lets another take the lead, who knows only what is recorded.
func (w *fixture) lead() {
	w.shares = &Allocator{}
	w.open()
	w.compile()
}

// turn is one of each of the manager's loops. It reports whether there is more to do.
func (w *fixture) turn(t require.TestingT) bool {
	send, waits := w.shares.Round(w.compiled, w.inForce)
	if w.status = w.record(t); waits {
		w.shares.Recorded(cb, w.status)
	}
	w.open()
	w.compile()
	return send || waits
}

func (w *fixture) settle(t require.TestingT) {
	w.open()
	w.compile()
	for range 30 {
		w.arrive()
		w.check(t)
		if !w.turn(t) {
			return
		}
	}
	require.Fail(t, "it does not end")
}

func (w *fixture) check(t require.TestingT) {
	for rule := range w.rules {
		force := map[string][]Share{}
		for _, p := range w.pods {
			force[p.workload] = append(force[p.workload], p.share(rule))
		}
		for _, all := range force {
			notMoreThanOne(t, all)
		}
	}
}

// checkRecord checks that what is in force is on record, and nothing else.
func (w *fixture) checkRecord(t require.TestingT) {
	have := shares{}
	for rule := range w.rules {
		for _, p := range w.pods {
			if s := p.share(rule); !s.None() {
				name := fmt.Sprint("r", rule)
				if have[name] == nil {
					have[name] = map[string]Share{}
				}
				have[name][p.name] = s
			}
		}
	}
	require.Equal(t, have, sharesOf(w.status))
}

// Pods come, go, and change their rules, agents are slow, what is recorded is late or
// is not known to be, leaders change: no rule is ever had more than once, and in the end
// all have the same of it, and nothing changes any more.
func TestInterleavingsOfAnAllocator(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &fixture{shares: &Allocator{}, rules: 3}
		w.lead()
		for n := range rapid.IntRange(1, 150).Draw(t, "steps") {
			one := func() *bookPod {
				if len(w.pods) == 0 {
					return &bookPod{selected: make([]bool, w.rules)}
				}
				return w.pods[rapid.IntRange(0, len(w.pods)-1).Draw(t, "pod")]
			}
			switch rapid.SampledFrom([]string{"join", "gone", "select", "arrive", "arrive", "arrive", "compile", "compile", "round", "round", "record", "record", "lose", "lead", "scope"}).Draw(t, "what") {
			case "join":
				if len(w.pods) < 6 {
					w.pods = append(w.pods, &bookPod{name: fmt.Sprint("p", n), workload: rapid.SampledFrom([]string{"v", "w"}).Draw(t, "workload"),
						selected: rapid.SliceOfN(rapid.Bool(), w.rules, w.rules).Draw(t, "selected")})
				}
			case "gone":
				p := one()
				w.pods = slices.DeleteFunc(w.pods, func(q *bookPod) bool { return p == q })
			case "select":
				p, rule := one(), rapid.IntRange(0, w.rules-1).Draw(t, "rule")
				p.selected[rule] = !p.selected[rule]
			case "arrive":
				if p := one(); len(p.sent) > 0 {
					p.force, p.sent = p.sent[0], p.sent[1:]
				}
			case "compile":
				w.open()
				w.compile()
			case "round":
				w.shares.Round(w.compiled, w.inForce)
			case "record":
				w.status = w.record(t)
				w.shares.Recorded(cb, w.status)
			case "lose": // what became of a write
				if now := w.record(t); rapid.Bool().Draw(t, "written") {
					w.status = now
				}
			case "lead":
				w.lead()
			case "scope":
				w.apart = !w.apart
			}
			w.check(t)
		}

		w.settle(t)
		w.checkRecord(t)
		for rule := range w.rules {
			have := map[string][]Share{}
			for _, p := range w.pods {
				if s := p.share(rule); p.selected[rule] && !w.apart {
					have[p.workload] = append(have[p.workload], s)
				} else {
					require.True(t, s.None())
				}
			}
			for _, all := range have {
				slices.SortFunc(all, func(a, b Share) int { return cmp.Compare(a.Index, b.Index) })
				for i, s := range all {
					require.Equal(t, Share{uint32(i), uint32(len(all))}, s)
				}
			}
		}
		for _, br := range w.shares.breakers {
			for g := range maps.Values(br.groups) {
				require.False(t, g.changed)
			}
		}
	})
}

// Rules change their scope and change it back, with agents that are slow and leaders that
// come between: what pods may still have of when they shared, they have on record, and
// nothing stays there that they have no more.
func TestScopesThatChange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &fixture{shares: &Allocator{}, rules: 1}
		w.lead()
		w.join("p", []bool{true})
		w.settle(t)
		for n := range 50 {
			switch rapid.SampledFrom([]string{"join", "gone", "scope", "lead", "arrive", "arrive", "turn", "turn", "turn"}).Draw(t, "what") {
			case "join":
				if len(w.pods) < 3 {
					w.join(fmt.Sprint("p", n), []bool{true})
				}
			case "gone":
				if len(w.pods) > 0 {
					i := rapid.IntRange(0, len(w.pods)-1).Draw(t, "pod")
					w.pods = slices.Delete(w.pods, i, i+1)
				}
			case "scope":
				w.apart = !w.apart
			case "lead":
				w.lead()
			case "arrive":
				if len(w.pods) > 0 {
					w.pods[rapid.IntRange(0, len(w.pods)-1).Draw(t, "pod")].arrive()
				}
			case "turn":
				w.turn(t)
			}
			w.check(t)
		}
		w.settle(t)
		w.checkRecord(t)
	})
}

// BenchmarkRound is of 2000 pods that share 100 rules.
func BenchmarkRound(b *testing.B) {
	w := &fixture{shares: &Allocator{}, rules: 100}
	w.lead()
	all := slices.Repeat([]bool{true}, w.rules)
	for i := range 2000 {
		w.join(fmt.Sprintf("a-workload-of-some-length-%04d", i), all)
	}
	w.compile()
	force := w.compiled
	inForce := func(p compile.Policy) bool { return force[types.UID(p.Uid)].GetVersion() == p.Version }
	round := func() { w.shares.Round(w.compiled, inForce) }
	settle := func() {
		for going := true; going; {
			w.compile()
			force = w.compiled
			send, waits := w.shares.Round(w.compiled, inForce)
			w.shares.Recorded(cb, record(b, w.shares))
			going = send || waits
		}
	}
	settle()
	b.Run("idle", func(b *testing.B) {
		for b.Loop() {
			round()
		}
	})
	b.Run("confirmed", func(b *testing.B) { // by one of those that have less now
		for b.Loop() {
			b.StopTimer()
			w.join(fmt.Sprint("another", b.N), all)
			w.compile()
			force = maps.Clone(w.compiled)
			round()
			w.shares.Recorded(cb, record(b, w.shares))
			round()
			w.compile()
			round()
			one := types.UID(w.pods[0].name)
			force[one] = w.compiled[one]
			b.StartTimer()
			round()
			b.StopTimer()
			w.pods = w.pods[:2000]
			settle()
			b.StartTimer()
		}
	})
	b.Run("gone", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			gone := w.pods[1000]
			w.pods = append(slices.Delete(slices.Clone(w.pods), 1000, 1001), gone)
			delete(w.compiled, types.UID(gone.name))
			b.StartTimer()
			round()
			b.StopTimer()
			settle()
			b.StartTimer()
		}
	})
	b.Run("new leader", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			restored := &Allocator{}
			restored.Open(cb, v1alpha1.CircuitBreakerStatus{Shares: record(b, w.shares)})
			b.StartTimer()
			restored.Round(w.compiled, inForce)
		}
	})
	b.Run("record", func(b *testing.B) {
		for b.Loop() {
			w.shares.breakers[cb].known = false
			w.shares.Recorded(cb, record(b, w.shares))
		}
	})
}
