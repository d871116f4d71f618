package limit

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/keep"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

var start = time.Unix(1_800_000_000, 123)

func bucketOf(burst, limit uint32, interval time.Duration) *meshv1.Bucket {
	return &meshv1.Bucket{Burst: burst, Limit: limit, IntervalNs: int64(interval)}
}

func everything() []*meshv1.ResourceMatch { return []*meshv1.ResourceMatch{{}} }

func traffic(rules ...*meshv1.LimitRule) *meshv1.Traffic {
	for i, r := range rules {
		if r.Key == "" {
			r.Key = fmt.Sprintf("key-%d", i)
		}
		if r.Name == "" {
			r.Name = fmt.Sprintf("rule-%d", i)
		}
		if r.Resources == nil && r.Paths == nil && r.Http == nil {
			r.Resources = everything()
		}
	}
	return &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "breaker", Rules: rules}}}
}

// pod is one that asks for one kind of thing.
type pod struct {
	*Store
	*Resources
	rules *Rules
}

func newPod(t testing.TB, rules ...*meshv1.LimitRule) *pod {
	p := &pod{Store: NewStore()}
	p.put(t, start, rules...)
	return p
}

func (p *pod) put(t testing.TB, now time.Time, rules ...*meshv1.LimitRule) {
	t.Helper()
	compiled, err := Compile(traffic(rules...), p.Store, now)
	require.NoError(t, err)
	compiled.Enforce(now)
	p.rules, p.Resources = compiled, compiled.OfKind(match.Kind{Verb: "get", Resource: "pods"})
}

func (p *pod) ask(now time.Time) (Ticket, *Refusal) { return p.Take(now, &match.Object{}, "") }

// passes reports whether a request passes that succeeds at once.
func (p *pod) passes(now time.Time) bool {
	ticket, refusal := p.ask(now)
	if refusal == nil {
		ticket.Done(now, Outcome{})
	}
	return refusal == nil
}

func only() meshv1.Trigger { return meshv1.Trigger_TRIGGER_LIMITER_ONLY }

// atMost fails if more than burst + limit*time/interval passed between any two moments.
func atMost(t *testing.T, passed []time.Time, burst, limit uint32, interval time.Duration) {
	t.Helper()
	slices.SortFunc(passed, time.Time.Compare)
	for i := range passed {
		for j := i; j < len(passed); j++ {
			n, took := int64(j-i+1), passed[j].Sub(passed[i])
			if (n-int64(burst))*int64(interval) > int64(took)*int64(limit) {
				t.Fatalf("%d requests within %s, of %d and %d in %s", n, took, burst, limit, interval)
			}
		}
	}
}

func TestBucketNeverExceedsItsRate(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		burst, limit := 1+random.Uint32N(5), random.Uint32N(7)
		interval := time.Duration(1 + random.Int64N(int64(3*time.Second)))
		p := newPod(t, &meshv1.LimitRule{Bucket: bucketOf(burst, limit, interval), Trigger: only()})
		now, latest := start, time.Time{}
		var passed []time.Time
		for range 150 {
			now = now.Add(time.Duration(random.Int64N(int64(interval) / 2 * 3 / int64(limit+1))))
			asked := now
			if random.IntN(10) == 0 {
				asked = now.Add(-interval) // reported late
			}
			if asked.After(latest) {
				latest = asked
			}
			if _, refusal := p.ask(asked); refusal == nil {
				passed = append(passed, latest)
			} else if limit > 0 {
				require.Positive(t, refusal.RetryAfter)
			}
		}
		atMost(t, passed, burst, limit, interval)
		require.GreaterOrEqual(t, len(passed), int(burst))
	}
}

func TestRetryAfterIsWhenNextRequestPasses(t *testing.T) {
	p := newPod(t, &meshv1.LimitRule{Bucket: bucketOf(1, 3, 10*time.Second), Trigger: only()})
	require.True(t, p.passes(start))
	_, refusal := p.ask(start)
	require.Equal(t, "bucket", refusal.Reason)
	require.Equal(t, "breaker", refusal.Breaker)
	require.False(t, refusal.Opened)
	for range 10 { // and asking takes nothing
		require.False(t, p.passes(start.Add(refusal.RetryAfter-1)))
	}
	require.True(t, p.passes(start.Add(refusal.RetryAfter)))
}

func TestMembersTogetherNeverExceedTheBucket(t *testing.T) {
	turns := 0
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 2))
		burst, limit := 1+random.Uint32N(6), 1+random.Uint32N(5)
		interval := time.Duration(1+random.Int64N(20)) * time.Second
		n := 1 + random.Uint32N(7)
		if burst < n {
			turns++
		}
		members := make([]*pod, n)
		for i := range members {
			members[i] = newPod(t, &meshv1.LimitRule{
				Bucket: bucketOf(burst, limit, interval), Trigger: only(),
				Share: &meshv1.Share{Index: uint32(i), Of: n},
			})
		}
		now := start
		var passed []time.Time
		for range 600 {
			now = now.Add(time.Duration(random.Int64N(int64(interval) / int64(limit) / 4)))
			if members[random.Uint32N(n)].passes(now) {
				passed = append(passed, now)
			}
		}
		atMost(t, passed, burst, limit, interval)
		require.NotEmpty(t, passed)
	}
	require.Greater(t, turns, 50)
}

// Members come and go as the manager has it: those who must have less first.
func TestChangingSharesNeverExceedTheBucket(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 3))
		const most = 5
		burst, limit, interval := most+random.Uint32N(6), 1+random.Uint32N(5), time.Duration(1+random.Int64N(10))*time.Second
		rule := func(i int, of uint32) *meshv1.LimitRule {
			s := &meshv1.Share{Of: of, Index: uint32(i)}
			if of == 0 {
				s.Index = 0
			}
			return &meshv1.LimitRule{Bucket: bucketOf(burst, limit, interval), Trigger: only(), Share: s}
		}
		n := 1
		members := []*pod{newPod(t, rule(0, 1))}
		now := start
		var passed []time.Time
		for range 400 {
			now = now.Add(time.Duration(random.Int64N(int64(interval) / int64(limit))))
			switch random.IntN(20) {
			case 0:
				if n < most {
					members = append(members, newPod(t, rule(0, 0)))
					n++
					for i, m := range members {
						m.put(t, now, rule(i, uint32(n)))
					}
				}
			case 1:
				if n > 1 {
					members = members[:n-1]
					n--
					for i, m := range members {
						m.put(t, now, rule(i, uint32(n)))
					}
				}
			default:
				if members[random.IntN(n)].passes(now) {
					passed = append(passed, now)
				}
			}
		}
		atMost(t, passed, burst, limit, interval)
	}
}

func TestClientThatWaitsGetsItsTurn(t *testing.T) {
	for _, c := range []struct {
		burst, limit, of uint32
		interval         time.Duration
	}{{1, 1, 4, 10 * time.Second}, {1, 1, 3, time.Second}, {2, 6, 5, time.Minute}, {3, 1, 4, time.Hour}} {
		for index := range c.of {
			p := newPod(t, &meshv1.LimitRule{
				Bucket: bucketOf(c.burst, c.limit, c.interval), Trigger: only(), Share: &meshv1.Share{Index: index, Of: c.of},
			})
			now, passed := start, 0
			for range 20 {
				_, refusal := p.ask(now)
				if refusal == nil {
					passed++
					now = now.Add(time.Millisecond)
					continue
				}
				require.Positive(t, refusal.RetryAfter)
				// As clients do: whole seconds, and some way to go.
				now = now.Add((refusal.RetryAfter + time.Second - 1).Truncate(time.Second) + 2*time.Millisecond)
			}
			require.GreaterOrEqual(t, passed, 9, "%+v", c)
			spent := now.Sub(start)
			require.LessOrEqual(t, float64(passed), 1+float64(c.limit)/float64(c.of)*spent.Seconds()/c.interval.Seconds()+1)
		}
	}
}

func TestTurnsSurviveClockChanges(t *testing.T) {
	// A clock without a monotonic one stands still when it is set back, and goes on.
	p := newPod(t, &meshv1.LimitRule{Bucket: bucketOf(1, 1, time.Second), Trigger: only(), Share: &meshv1.Share{Of: 2}})
	find := func(from time.Time) time.Time {
		for now := from; now.Before(from.Add(time.Minute)); now = now.Add(100 * time.Millisecond) {
			if p.passes(now) {
				return now
			}
		}
		t.Fatal("no turn")
		return from
	}
	find(find(start).Add(time.Second))
}

func TestMemberWithoutShareIsRefused(t *testing.T) {
	p := newPod(t, &meshv1.LimitRule{Bucket: bucketOf(10, 10, time.Second), Share: &meshv1.Share{}})
	_, refusal := p.ask(start)
	require.Equal(t, &Refusal{Breaker: "breaker", Rule: "rule-0", Reason: "bucket", RetryAfter: time.Second}, refusal)
	require.Equal(t, closed, p.States()[0].GetState(), "it is not the pod that asks too much")
}

func TestInFlight(t *testing.T) {
	p := newPod(t, &meshv1.LimitRule{MaxInFlight: 2})
	a, refusal := p.ask(start)
	require.Nil(t, refusal)
	_, refusal = p.ask(start)
	require.Nil(t, refusal)
	_, refusal = p.ask(start)
	require.Equal(t, "in_flight", refusal.Reason)
	watch := p.rules.OfKind(match.Kind{Verb: "watch", Resource: "pods"})
	_, refusal = watch.Take(start, &match.Object{}, "")
	require.Nil(t, refusal, "watches do not count")
	a.Answered(start, Outcome{})
	_, refusal = p.ask(start)
	require.NotNil(t, refusal, "it goes on")
	a.Leave()
	require.True(t, p.passes(start))
	require.Equal(t, closed, p.States()[0].GetState())
}

func TestEachMemberHasOneInFlight(t *testing.T) {
	for together, each := range map[uint32][]int{2: {1, 1, 1}, 3: {1, 1, 1}, 5: {2, 2, 1}} {
		for i, n := range each {
			p := newPod(t, &meshv1.LimitRule{MaxInFlight: together, Share: &meshv1.Share{Index: uint32(i), Of: 3}})
			for range n {
				_, refusal := p.ask(start)
				require.Nil(t, refusal)
			}
			_, refusal := p.ask(start)
			require.Equal(t, "in_flight", refusal.Reason)
		}
	}
	p := newPod(t, &meshv1.LimitRule{MaxInFlight: 2, Share: &meshv1.Share{}})
	require.False(t, p.passes(start), "nobody knows yet how many they are")
}

func TestBackoff(t *testing.T) {
	p := newPod(t, &meshv1.LimitRule{Backoff: &meshv1.Backoff{Failures: 2, BaseNs: int64(time.Second), MaxNs: int64(3 * time.Second)}})
	now := start
	fail := func() {
		ticket, refusal := p.ask(now)
		require.Nil(t, refusal)
		now = now.Add(time.Millisecond)
		ticket.Done(now, Outcome{Failed: true})
	}
	fail()
	others := make([]Ticket, 5)
	for i := range others {
		others[i], _ = p.ask(now)
	}
	fail()
	for _, wait := range []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, 3 * time.Second} {
		for _, o := range others { // of before: they say nothing new
			o.Done(now, Outcome{Failed: true})
		}
		others = nil
		_, refusal := p.ask(now)
		require.Equal(t, "backoff", refusal.Reason)
		require.Equal(t, wait, refusal.RetryAfter)
		now = now.Add(wait)
		fail()
	}
	now = now.Add(3 * time.Second)
	require.True(t, p.passes(now))
	fail()
	require.True(t, p.passes(now), "one failure alone")
}

func TestMostSpecificRuleApplies(t *testing.T) {
	one := bucketOf(1, 0, time.Second)
	rules := []*meshv1.LimitRule{
		{Name: "any", Bucket: one},
		{Name: "pods", Bucket: one, Resources: []*meshv1.ResourceMatch{{ApiGroups: []string{""}, Resources: []string{"pods"}}}},
		{Name: "pods too", Bucket: one, Resources: []*meshv1.ResourceMatch{{ApiGroups: []string{""}, Resources: []string{"pods"}}}},
		{Name: "here", Bucket: one, Resources: []*meshv1.ResourceMatch{{ApiGroups: []string{""}, Resources: []string{"pods"}, Namespaces: []string{"here"}}}},
		{Name: "agent", Bucket: one, UserAgents: []string{"kubectl/*"}, Resources: []*meshv1.ResourceMatch{{ApiGroups: []string{""}, Resources: []string{"pods"}, Namespaces: []string{"here"}}}},
	}
	for range 50 {
		// The order matters among equals alone, and so do labels' and maps' never.
		shuffled := slices.Clone(rules)
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		equals := slices.IndexFunc(shuffled, func(r *meshv1.LimitRule) bool { return r.Name == "pods" || r.Name == "pods too" })
		for i, r := range shuffled {
			shuffled[i] = proto.CloneOf(r)
			shuffled[i].Trigger = meshv1.Trigger_TRIGGER_FORCE_OPENED
			slices.Reverse(shuffled[i].GetResources())
		}
		p := newPod(t, shuffled...)
		for _, c := range []struct{ namespace, agent, want string }{
			{"here", "kubectl/v1", "agent"},
			{"here", "curl", "here"},
			{"there", "kubectl/v1", shuffled[equals].Name},
		} {
			_, refusal := p.Take(start, &match.Object{Namespace: c.namespace}, c.agent)
			require.Equal(t, c.want, refusal.Rule)
		}
		secrets := p.rules.OfKind(match.Kind{Verb: "get", Resource: "secrets"})
		_, refusal := secrets.Take(start, &match.Object{Namespace: "here"}, "kubectl/v1")
		require.Equal(t, "any", refusal.Rule)
	}
}

func TestRuleForSomePodsIsMoreSpecific(t *testing.T) {
	rules := []*meshv1.LimitRule{{Name: "all"}, {Name: "some", SomePods: true}, {Name: "agents", UserAgents: []string{"kubectl/*"}}, {Name: "both", SomePods: true, UserAgents: []string{"curl/*"}}}
	for _, r := range rules {
		r.Trigger = meshv1.Trigger_TRIGGER_FORCE_OPENED
	}
	p := newPod(t, rules...)
	for agent, want := range map[string]string{"go": "some", "kubectl/v1": "some", "curl/8": "both"} {
		_, refusal := p.Take(start, &match.Object{}, agent)
		require.Equal(t, want, refusal.Rule, agent)
	}
}

func TestAllCircuitBreakersMustAllow(t *testing.T) {
	store := NewStore()
	m := &meshv1.Traffic{}
	for i, burst := range []uint32{5, 2, 9, 4, 7, 3} {
		name := string(rune('a' + i))
		m.Breakers = append(m.Breakers, &meshv1.Breaker{Name: name, Rules: []*meshv1.LimitRule{
			{Name: "r", Key: name, Resources: everything(), Bucket: bucketOf(burst, 0, time.Second), Trigger: only()},
		}})
	}
	rules, err := Compile(m, store, start)
	require.NoError(t, err)
	rules.Enforce(start)
	pods := rules.OfKind(match.Kind{Verb: "get", Resource: "pods"})
	for i := range 10 {
		ticket, refusal := pods.Take(start, &match.Object{}, "")
		if i < 2 {
			require.Nil(t, refusal)
			ticket.Done(start, Outcome{})
			continue
		}
		require.Equal(t, "b", refusal.Breaker)
	}
	for _, s := range store.States() {
		require.EqualValues(t, 2, s.GetPassed(), "who is refused by one takes no token of another")
	}
}

func TestUnchangedRuleKeepsItsState(t *testing.T) {
	rule := func() *meshv1.LimitRule {
		return &meshv1.LimitRule{Key: "kept", Bucket: bucketOf(1, 0, time.Second)}
	}
	p := newPod(t, rule())
	require.True(t, p.passes(start))
	require.False(t, p.passes(start))
	p.put(t, start, rule(), &meshv1.LimitRule{Key: "other", Bucket: bucketOf(1, 0, time.Second)})
	require.False(t, p.passes(start))
	require.EqualValues(t, 2, p.States()[0].GetRefused())
	require.Equal(t, opened, p.States()[0].GetState())

	changed := rule()
	changed.Bucket.Burst, changed.Key = 2, "another"
	p.put(t, start, changed)
	require.True(t, p.passes(start))
	require.Len(t, p.States(), 1)
	p.put(t, start)
	p.put(t, start, rule())
	require.Equal(t, opened, p.States()[0].GetState(), "it was away for a moment")
	require.EqualValues(t, 2, p.States()[0].GetRefused())
	p.put(t, start)
	p.put(t, start.Add(keep.For), rule())
	require.Equal(t, closed, p.States()[0].GetState(), "and for long: it is forgotten")
	require.Zero(t, p.States()[0].GetRefused())
	p.put(t, start, rule())
	require.True(t, p.passes(start))
	recovered := rule()
	require.False(t, p.passes(start))
	recovered.Recover = "2026-01-01"
	p.put(t, start, recovered)
	require.Equal(t, closed, p.States()[0].GetState())
	_, refusal := p.ask(start)
	require.False(t, refusal.Opened, "closing fills nothing")
}

func TestRequestsToOtherHosts(t *testing.T) {
	exact := func(s string) *meshv1.TextMatch { return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: s}} }
	p := newPod(t,
		&meshv1.LimitRule{Name: "path", Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED, Http: []*meshv1.HttpMatch{{Host: exact("a.example"), Path: exact("/x")}}},
		&meshv1.LimitRule{Name: "host", Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED, Http: []*meshv1.HttpMatch{{Host: exact("b.example")}}},
		&meshv1.LimitRule{Name: "counts", MaxInFlight: 9, Http: []*meshv1.HttpMatch{{Host: exact("d.example")}}},
		&meshv1.LimitRule{Name: "agent", Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED, UserAgents: []string{"curl*"}, Http: []*meshv1.HttpMatch{{Host: exact("c.example")}}},
	)
	take := func(r match.HTTP) string {
		r.Header = http.Header{}
		_, refusal := p.rules.TakeHTTP(start, Ticket{}, "curl/8", r)
		if refusal == nil {
			return ""
		}
		return refusal.Rule
	}
	require.Equal(t, "path", take(match.HTTP{Host: "a.example", Path: "/x"}))
	require.Empty(t, take(match.HTTP{Host: "a.example", Opaque: true}), "what cannot be seen is left out")
	require.Equal(t, "host", take(match.HTTP{Host: "b.example", Opaque: true}))
	require.Empty(t, take(match.HTTP{Host: "c.example", Opaque: true}))
	require.Equal(t, "agent", take(match.HTTP{Host: "c.example"}))
	require.True(t, p.rules.Hosts().Deep("a.example"))
	require.False(t, p.rules.Hosts().Deep("b.example"))
	require.False(t, p.rules.Hosts().Deep("c.example"))
	for host, decrypted := range map[string]bool{"a.example": true, "b.example": false, "c.example": true, "d.example": true, "e.example": false} {
		require.Equal(t, decrypted, p.rules.Decrypts(&match.HTTP{Host: host, Opaque: true}), host)
	}
	for host, shut := range map[string]bool{"a.example": false, "b.example": true, "c.example": false, "d.example": false} {
		require.Equal(t, shut, p.rules.Shut("curl/8", match.HTTP{Host: host, Opaque: true}), host)
	}
	require.True(t, p.rules.Shut("curl/8", match.HTTP{Host: "c.example"}))
	require.False(t, (*Rules)(nil).Shut("", match.HTTP{Host: "b.example"}))
	require.False(t, (*Rules)(nil).Decrypts(&match.HTTP{Host: "a.example", Opaque: true}))
	require.Nil(t, p.rules.OfKind(match.Kind{Verb: "get", Resource: "pods"}))
}

func TestRulesForNonResourcePaths(t *testing.T) {
	p := newPod(t, &meshv1.LimitRule{Bucket: bucketOf(1, 0, time.Second), Paths: []*meshv1.PathMatch{{Paths: []string{"/metrics*"}, Verbs: []string{"get"}}}})
	_, refusal := p.rules.TakePath(start, "get", "/metrics/cadvisor", "")
	require.Nil(t, refusal)
	_, refusal = p.rules.TakePath(start, "get", "/metrics", "")
	require.NotNil(t, refusal)
	_, refusal = p.rules.TakePath(start, "get", "/healthz", "")
	require.Nil(t, refusal)
}

func TestLocksAreExemptUnlessNamed(t *testing.T) {
	p := newPod(t,
		&meshv1.LimitRule{Name: "all", Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED},
		&meshv1.LimitRule{Name: "lock", Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED, Resources: []*meshv1.ResourceMatch{{Names: []string{"named"}}}},
	)
	_, refusal := p.Take(start, &match.Object{Name: "other", Lock: true}, "")
	require.Nil(t, refusal)
	_, refusal = p.Take(start, &match.Object{Name: "named", Lock: true}, "")
	require.Equal(t, "lock", refusal.Rule)
}

func TestStateMovesToAnotherStore(t *testing.T) {
	rules := func() []*meshv1.LimitRule {
		return []*meshv1.LimitRule{
			{Key: "bucket", Bucket: bucketOf(5, 1, 10*time.Second), Trigger: only()},
		}
	}
	old := newPod(t, rules()...)
	for range 3 {
		require.True(t, old.passes(start))
	}
	data, err := old.Export(start.Add(5 * time.Second))
	require.NoError(t, err)

	count := func(p *pod, now time.Time) (n int) {
		for p.passes(now) {
			n++
		}
		return n
	}
	later := start.Add(10 * time.Second)
	early := &pod{Store: NewStore()}
	require.NoError(t, early.Import(data, start.Add(6*time.Second)))
	early.put(t, start.Add(6*time.Second), rules()...)
	require.Equal(t, 3, count(early, later), "2 were left and 1 came")
	require.EqualValues(t, 6, early.States()[0].GetPassed())

	late := newPod(t, rules()...)
	require.True(t, late.passes(start.Add(5*time.Second)))
	for range 2 { // the last word counts
		require.NoError(t, late.Import(data, start.Add(6*time.Second)))
	}
	require.Equal(t, 2, count(late, later))
	require.EqualValues(t, 6, late.States()[0].GetPassed())
	again, err := late.Export(later)
	require.NoError(t, err)
	require.NoError(t, NewStore().Import(again, later))
}

func TestOpenBreakerMovesToAnotherStore(t *testing.T) {
	rule := func() *meshv1.LimitRule {
		return &meshv1.LimitRule{Bucket: bucketOf(1, 1, time.Millisecond), Recovery: &meshv1.Recovery{SleepingWindowNs: int64(10 * time.Second)}}
	}
	old := newPod(t, rule())
	require.True(t, old.passes(start))
	require.False(t, old.passes(start))
	data, err := old.Export(start.Add(4 * time.Second))
	require.NoError(t, err)
	p := newPod(t, rule())
	require.NoError(t, p.Import(data, start.Add(4*time.Second)))
	_, refusal := p.ask(start.Add(4 * time.Second))
	require.Equal(t, "opened", refusal.Reason)
	require.Equal(t, 6*time.Second, refusal.RetryAfter)
	require.True(t, p.passes(start.Add(10*time.Second)))
	require.Equal(t, closed, p.States()[0].GetState())
}

// An upgrade, and a downgrade, must not close what is open.
func TestOpenBreakerSurvivesOtherVersion(t *testing.T) {
	rule := func() *meshv1.LimitRule {
		return &meshv1.LimitRule{Key: "k", Bucket: bucketOf(1, 1, time.Millisecond), Recovery: &meshv1.Recovery{SleepingWindowNs: int64(10 * time.Second)}}
	}
	opened := int(opened)
	since := int64(4 * time.Second)
	for name, data := range map[string]string{
		"version 1": fmt.Sprintf(`{"version":1,"wall":%d,"states":[{"key":"k","passed":1,"refused":1,"breaker":%d,"since":%d}]}`,
			start.UnixNano(), opened, since),
		"newer": fmt.Sprintf(`{"version":3,"oldest":2,"wall":%d,"states":[{"key":"k","of":{"passed":1,"refused":1,"breaker":%d,"since":%d,"probes":[1,2]},"new":1}],"new":{}}`,
			start.UnixNano(), opened, since),
		"beside a rule of another that is new": fmt.Sprintf(`{"version":3,"oldest":2,"wall":%d,"states":[{"key":"other","of":{"breaker":99}},{"key":"k","of":{"passed":1,"refused":1,"breaker":%d,"since":%d}}]}`,
			start.UnixNano(), opened, since),
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t, rule())
			err := p.Import([]byte(data), start)
			if strings.Contains(data, "other") {
				require.ErrorContains(t, err, `"other"`)
			} else {
				require.NoError(t, err)
			}
			_, refusal := p.ask(start)
			require.NotNil(t, refusal)
			require.Equal(t, "opened", refusal.Reason)
			require.Equal(t, 6*time.Second, refusal.RetryAfter)
			require.EqualValues(t, 1, p.States()[0].GetPassed())
		})
	}
}

// A pod has no rules while it is refused, and its agent may be replaced meanwhile, once
// or twice.
func TestStateOfAbsentRulesMovesToAnotherStore(t *testing.T) {
	rules := func() []*meshv1.LimitRule {
		return []*meshv1.LimitRule{
			{Key: "bucket", Bucket: bucketOf(5, 1, 10*time.Second), Trigger: only()},
			{Key: "breaker", Bucket: bucketOf(1, 0, time.Second)},
		}
	}
	old := newPod(t, rules()[1])
	require.True(t, old.passes(start))
	require.False(t, old.passes(start))
	old.put(t, start, rules()[0])
	for range 5 {
		require.True(t, old.passes(start))
	}
	old.put(t, start)
	for n := range time.Duration(2) {
		at := start.Add((5 + 5*n) * time.Second)
		data, err := old.Export(at)
		require.NoError(t, err)
		next := &pod{Store: NewStore()}
		next.put(t, at, rules()...)
		next.put(t, at) // it is refused still
		if n == 1 {
			next.Store = NewStore()
		}
		for range 2 {
			require.NoError(t, next.Import(data, at))
			next.put(t, at)
		}
		old = next
	}
	now := start.Add(20 * time.Second)
	old.put(t, now, rules()...)
	require.Equal(t, opened, old.States()[0].GetState())
	require.EqualValues(t, 1, old.States()[0].GetRefused())
	old.put(t, now, rules()[0])
	require.True(t, old.passes(now))
	require.True(t, old.passes(now))
	require.False(t, old.passes(now), "2 came in 20 s")

	data, err := old.Export(now)
	require.NoError(t, err)
	next := &pod{Store: NewStore()}
	require.NoError(t, next.Import(data, now))
	next.put(t, now.Add(keep.For))
	next.put(t, now.Add(keep.For), rules()...)
	require.True(t, next.passes(now.Add(keep.For)), "what is away for long is forgotten")
}

// Whose slots are as short as can be has had more of them since 1970 than there are counts.
func TestTurnsMoveToAnotherStore(t *testing.T) {
	rule := func() *meshv1.LimitRule {
		return &meshv1.LimitRule{Bucket: bucketOf(2, 1, 1), Trigger: only(), Share: &meshv1.Share{Of: 3}}
	}
	old, now := newPod(t, rule()), start
	for !old.passes(now) {
		now = now.Add(1)
	}
	data, err := old.Export(now)
	require.NoError(t, err)
	p := newPod(t, rule())
	require.NoError(t, p.Import(data, now))
	require.False(t, p.passes(now), "the turn is spent")
	require.True(t, p.passes(now.Add(3)))
}

func TestOutcomesMoveToAnotherStore(t *testing.T) {
	rule := func() *meshv1.LimitRule {
		return &meshv1.LimitRule{Trip: &meshv1.Trip{WindowNs: int64(10 * time.Second), MinRequests: 4, ErrorPercent: 100}}
	}
	fail := func(p *pod, now time.Time) {
		ticket, refusal := p.ask(now)
		require.Nil(t, refusal)
		ticket.Done(now, Outcome{Failed: true})
	}
	old := newPod(t, rule())
	for i := range 3 {
		fail(old, start.Add(time.Duration(i)*time.Second))
	}
	data, err := old.Export(start.Add(3 * time.Second))
	require.NoError(t, err)
	for after, want := range map[time.Duration]meshv1.BreakerState{4 * time.Second: opened, 14 * time.Second: closed} {
		p := newPod(t, rule())
		require.NoError(t, p.Import(data, start.Add(3*time.Second)))
		fail(p, start.Add(after))
		require.Equal(t, want, p.States()[0].GetState(), after)
	}
}

// At a takeover the old process reports twice: when the next begins, and when it has ended.
func TestOutcomesOfBothProcessesCount(t *testing.T) {
	rule := func() *meshv1.LimitRule {
		return &meshv1.LimitRule{Trip: &meshv1.Trip{WindowNs: int64(10 * time.Second), MinRequests: 4, ErrorPercent: 100}}
	}
	fail := func(p *pod) {
		ticket, refusal := p.ask(start)
		require.Nil(t, refusal)
		ticket.Done(start, Outcome{Failed: true})
	}
	old, p := newPod(t, rule()), newPod(t, rule())
	fail(old)
	fail(p)
	for range 2 {
		data, err := old.Export(start)
		require.NoError(t, err)
		require.NoError(t, p.Import(data, start))
	}
	fail(p)
	require.Equal(t, closed, p.States()[0].GetState(), "three failed")
	again, err := p.Export(start)
	require.NoError(t, err)
	next := newPod(t, rule())
	require.NoError(t, next.Import(again, start))
	for _, of := range []*pod{p, next} {
		fail(of)
		require.Equal(t, opened, of.States()[0].GetState())
	}
}

func TestBreakerClosedByProbeStaysClosed(t *testing.T) {
	rule := func() *meshv1.LimitRule {
		return &meshv1.LimitRule{Bucket: bucketOf(1, 1, time.Millisecond), Recovery: &meshv1.Recovery{SleepingWindowNs: int64(10 * time.Second)}}
	}
	old, p := newPod(t, rule()), newPod(t, rule())
	require.True(t, old.passes(start))
	require.False(t, old.passes(start))
	report := func(now time.Time) {
		data, err := old.Export(now)
		require.NoError(t, err)
		require.NoError(t, p.Import(data, now))
	}
	report(start)
	require.False(t, p.passes(start))
	require.True(t, p.passes(start.Add(11*time.Second)))
	report(start.Add(12 * time.Second))
	require.Equal(t, closed, p.States()[0].GetState())

	require.True(t, old.passes(start.Add(13*time.Second)))
	require.False(t, old.passes(start.Add(13*time.Second)))
	report(start.Add(14 * time.Second))
	require.Equal(t, opened, p.States()[0].GetState(), "it opened anew")
}

func TestAbandonedSlowRequestCountsAsSlow(t *testing.T) {
	rule := func() *meshv1.LimitRule {
		return &meshv1.LimitRule{
			Trip:     &meshv1.Trip{WindowNs: int64(time.Minute), MinRequests: 2, ErrorPercent: 1, SlowPercent: 100, SlowNs: int64(time.Second)},
			Recovery: &meshv1.Recovery{SleepingWindowNs: int64(time.Second)},
		}
	}
	leaves := func(p *pod, now time.Time, after time.Duration) {
		ticket, refusal := p.ask(now)
		require.Nil(t, refusal)
		ticket.Done(now, Outcome{Failed: true, Unknown: true, Took: after})
	}
	p := newPod(t, rule())
	for range 3 {
		leaves(p, start, time.Second)
	}
	require.Equal(t, closed, p.States()[0].GetState(), "so long is not slow")
	for range 2 {
		leaves(p, start, time.Second+1)
	}
	require.Equal(t, opened, p.States()[0].GetState())
	leaves(p, start.Add(2*time.Second), time.Minute)
	require.Equal(t, opened, p.States()[0].GetState(), "a probe that came to nothing")
}

func TestInvalidRulesAreErrors(t *testing.T) {
	for name, m := range map[string]*meshv1.LimitRule{
		"interval": {Bucket: bucketOf(1, 1, 0)},
		"burst":    {Bucket: bucketOf(0, 1, time.Second), Share: &meshv1.Share{Index: 1, Of: 3}},
		"share":    {Share: &meshv1.Share{Index: 3, Of: 3}},
		"window":   {Trip: &meshv1.Trip{WindowNs: 0}},
		"percent":  {Trip: &meshv1.Trip{WindowNs: 1, ErrorPercent: 101}},
		"backoff":  {Backoff: &meshv1.Backoff{}},
		"recovery": {Recovery: &meshv1.Recovery{SleepingWindowNs: -1}},
		"trigger":  {Trigger: 17},
		"resource": {Resources: []*meshv1.ResourceMatch{{Resources: []string{"/x"}}}},
		"url":      {Http: []*meshv1.HttpMatch{{Host: &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: "("}}}}},
	} {
		_, err := Compile(traffic(m), NewStore(), start)
		require.Error(t, err, name)
	}
	_, err := Compile(traffic(&meshv1.LimitRule{Key: "same"}, &meshv1.LimitRule{Key: "same"}), NewStore(), start)
	require.Error(t, err)
	var none *Rules
	none.Enforce(start)
	require.Nil(t, none.OfKind(match.Kind{}))
	_, refusal := none.TakePath(start, "get", "/", "")
	require.Nil(t, refusal)
}

func FuzzImport(f *testing.F) {
	rules := func() []*meshv1.LimitRule {
		return []*meshv1.LimitRule{
			{Bucket: bucketOf(3, 1, time.Second), Trip: &meshv1.Trip{WindowNs: 1e9, ErrorPercent: 50}, Backoff: &meshv1.Backoff{Failures: 1, BaseNs: 1e9, MaxNs: 1e10}},
			{Bucket: bucketOf(2, 1, time.Second), Share: &meshv1.Share{Index: 1, Of: 3}, Recovery: &meshv1.Recovery{SleepingWindowNs: 1e9}},
		}
	}
	p := newPod(f, rules()...)
	for range 5 {
		p.passes(start)
	}
	data, err := p.Export(start)
	require.NoError(f, err)
	f.Add(data)
	for key, s := range map[string]saved{
		"key-0": {savedRate: savedRate{Tokens: keep.MaxCount, Frac: 1<<64 - 1}, savedCircuit: savedCircuit{Since: 1<<63 - 1, WindowIn: 1<<63 - 1, Window: []counts{{Ended: 5}}}},
		"key-1": {savedRate: savedRate{Shared: true, Index: 1, Of: 2, Spent: keep.MaxCount, SpentAgo: 1<<63 - 1, Quiet: 1<<63 - 1}, savedCircuit: savedCircuit{Breaker: 2}},
	} {
		of, err := json.Marshal(s)
		require.NoError(f, err)
		f.Add(fmt.Appendf(nil, `{"version":2,"wall":1,"states":[{"key":%q,"of":%s}]}`, key, of))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p := newPod(t, rules()...)
		if p.Import(data, start) != nil {
			return
		}
		now := start
		for i := range 20 {
			if ticket, refusal := p.ask(now); refusal == nil {
				ticket.Done(now, Outcome{Failed: i%2 == 0, Took: time.Second})
			}
			now = now.Add(time.Duration(i) * time.Second)
		}
		again, err := p.Export(now)
		require.NoError(t, err)
		require.NoError(t, NewStore().Import(again, now), "%s", again)
	})
}
