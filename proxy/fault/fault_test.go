package fault

import (
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/keep"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

var (
	noon    = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	gets    = match.Kind{Verb: "get", Resource: "pods"}
	lists   = match.Kind{Verb: "list", Resource: "pods"}
	watches = match.Kind{Verb: "watch", Resource: "pods"}
	pod     = &match.Object{Namespace: "ns", Name: "a"}
)

func one(rules ...*meshv1.FaultRule) *meshv1.Traffic {
	for i, r := range rules {
		if r.Name == "" {
			r.Name = fmt.Sprintf("r%d", i)
		}
		if r.Key == "" {
			r.Key = "key-" + r.Name
		}
	}
	return &meshv1.Traffic{Injections: []*meshv1.Injection{{Name: "i", Rules: rules}}}
}

func compiled(t testing.TB, m *meshv1.Traffic, s *Store) *Rules {
	t.Helper()
	r, err := Compile(m, s, noon)
	require.NoError(t, err)
	r.Enforce(noon)
	return r
}

func aborts(percent float64) *meshv1.FaultRule {
	return &meshv1.FaultRule{Abort: &meshv1.Abort{Status: 500, Percent: percent}}
}

// run returns an x for each of n requests that gets a fault, and a dot for each other.
func run(r *Resources, n int) string {
	var out strings.Builder
	for range n {
		if r.Decide(noon, pod) != nil {
			out.WriteByte('x')
		} else {
			out.WriteByte('.')
		}
	}
	return out.String()
}

func TestFaultsFollowTheirPercentage(t *testing.T) {
	for percent, injected := range map[float64][2]int{0: {0, 0}, 100: {10000, 10000}, 5: {400, 600}, 0.5: {25, 80}, 99.5: {9900, 9980}} {
		r := compiled(t, one(aborts(percent)), NewStore("pod")).OfKind(gets)
		n := strings.Count(run(r, 10000), "x")
		require.GreaterOrEqual(t, n, injected[0], "%v %%", percent)
		require.LessOrEqual(t, n, injected[1], "%v %%", percent)
	}
}

func TestSeededRunsRepeatExactly(t *testing.T) {
	of := func(seed int64) string {
		rule := aborts(30)
		rule.Seed, rule.Key = &seed, fmt.Sprint("key of ", time.Now())
		return run(compiled(t, one(rule), NewStore("pod")).OfKind(gets), 200)
	}
	require.Equal(t, of(7), of(7))
	require.NotEqual(t, of(7), of(8))
	require.Equal(t, "xx...", of(0)[:5], "all versions must decide equally")
}

// The hash of a rule includes its name: rules with the same seed decide independently.
func TestRulesDecideIndependently(t *testing.T) {
	for _, seed := range []*int64{nil, new(int64(0)), new(int64(7))} {
		conflicts, errs := aborts(20), aborts(20)
		conflicts.Abort.Status = 409
		conflicts.Seed, errs.Seed = seed, seed
		r := compiled(t, one(conflicts, errs), NewStore("pod")).OfKind(gets)
		met := map[int]int{}
		for range 1000 {
			if f := r.Decide(noon, pod); f != nil {
				met[f.Abort.Status]++
			}
		}
		require.InDelta(t, 200, met[409], 40)
		require.InDelta(t, 160, met[500], 40, "of what is left")
	}
}

func TestUnseededPodsDecideIndependently(t *testing.T) {
	of := func(pod string, seed *int64) string {
		rule := aborts(30)
		rule.Seed = seed
		return run(compiled(t, one(rule), NewStore(pod)).OfKind(gets), 200)
	}
	require.Equal(t, of("a", nil), of("a", nil), "also by the next agent")
	require.NotEqual(t, of("a", nil), of("b", nil))
	require.Equal(t, of("a", new(int64(0))), of("b", new(int64(0))))
}

func TestRunsContinueAfterPolicyChangeAndTakeover(t *testing.T) {
	rule := aborts(30)
	whole := run(compiled(t, one(rule), NewStore("pod")).OfKind(gets), 60)

	s := NewStore("pod")
	begun := run(compiled(t, one(rule), s).OfKind(gets), 20)
	none := aborts(0)
	none.Name = "none"
	begun += run(compiled(t, one(none, rule), s).OfKind(gets), 20)
	data, err := s.Export(noon)
	require.NoError(t, err)
	next := NewStore("pod")
	require.NoError(t, next.Import(data, noon))
	begun += run(compiled(t, one(rule), next).OfKind(gets), 20)
	require.Equal(t, whole, begun)
	require.Equal(t, uint64(60), next.States()[0].Matched)
}

func TestKindsDecideIndependently(t *testing.T) {
	r := compiled(t, one(&meshv1.FaultRule{
		Delay: &meshv1.Delay{FixedNs: 1, Percent: 50}, Truncate: &meshv1.Truncate{Percent: 50},
	}), NewStore("pod")).OfKind(gets)
	seen := map[[2]bool]int{}
	for range 1000 {
		f := r.Decide(noon, pod)
		seen[[2]bool{f != nil && f.Delay > 0, f != nil && f.Truncate >= 0}]++
	}
	for what, n := range seen {
		require.InDelta(t, 250, n, 60, "%v", what)
	}
	require.Len(t, seen, 4)
}

func TestCountBoundsInjections(t *testing.T) {
	rule := aborts(100)
	rule.Count = 3
	s := NewStore("pod")
	r := compiled(t, one(rule), s).OfKind(gets)
	var wg sync.WaitGroup
	var mu sync.Mutex
	injected := 0
	for range 50 {
		wg.Go(func() {
			if r.Decide(noon, pod) != nil {
				mu.Lock()
				defer mu.Unlock()
				injected++
			}
		})
	}
	wg.Wait()
	require.Equal(t, 3, injected)
	require.Equal(t, uint64(50), s.States()[0].Matched)
	require.Equal(t, uint64(3), s.States()[0].Injected)
}

func TestMissedFaultsAreNotCounted(t *testing.T) {
	rule := &meshv1.FaultRule{Count: 1, StaleList: &meshv1.StaleList{AgeNs: 5, Percent: 100}}
	s := NewStore("pod")
	r := compiled(t, one(rule), s).OfKind(lists)
	f := r.Decide(noon, pod)
	require.Equal(t, time.Duration(5), f.Stale)
	require.Equal(t, []string{"i/r0"}, f.Rules)
	f.Missed(StaleList)
	require.Empty(t, f.Rules)
	require.Empty(t, f.Injected)
	require.Zero(t, s.States()[0].Injected)
	require.NotNil(t, r.Decide(noon, pod), "the one that counts is yet to come")
	require.Nil(t, r.Decide(noon, pod))
}

func TestExpiredRulesInjectNothing(t *testing.T) {
	m := one(aborts(100))
	m.Injections[0].Expires = noon.Unix()
	r := compiled(t, m, NewStore("pod")).OfKind(gets)
	require.NotNil(t, r.Decide(noon.Add(-time.Nanosecond), pod))
	require.Nil(t, r.Decide(noon, pod))
}

func TestExemptNamespacesHaveNoFaults(t *testing.T) {
	rule := aborts(100)
	rule.Watch = &meshv1.WatchFault{Drop: &meshv1.WatchFault_Drop{Percent: 100}}
	m := one(rule)
	m.NoFaults = []string{"quiet"}
	r := compiled(t, m, NewStore("pod"))
	require.Nil(t, r.OfKind(gets).Decide(noon, &match.Object{Namespace: "quiet"}))
	require.NotNil(t, r.OfKind(gets).Decide(noon, &match.Object{Namespace: "loud"}))

	rule.Abort = nil
	all := compiled(t, m, NewStore("pod")).OfKind(watches).Decide(noon, &match.Object{})
	require.True(t, all.Watch.Exempt("quiet"))
	require.False(t, all.Watch.Exempt("loud"))
}

func TestRulesMatchResourcesAndPaths(t *testing.T) {
	named := aborts(100)
	named.Resources = []*meshv1.ResourceMatch{{Names: []string{"leader"}, Verbs: []string{"get"}}}
	others := aborts(100)
	others.Http = []*meshv1.HttpMatch{{Host: &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: "example.com"}}, Methods: []string{"GET"}}}
	paths := aborts(100)
	paths.Paths = []*meshv1.PathMatch{{Paths: []string{"/openapi/*"}, Verbs: []string{"get"}}}
	for _, c := range []struct {
		what                  string
		rule                  *meshv1.FaultRule
		object, lock          bool
		version, openapi      bool
		http, connection, dig bool
	}{
		{"without matches", aborts(100), true, false, true, true, false, false, false},
		{"a name", named, false, true, false, false, false, false, false},
		{"a path", paths, false, false, false, true, false, false, false},
		{"another host", others, false, false, false, false, true, false, true},
	} {
		t.Run(c.what, func(t *testing.T) {
			r := compiled(t, one(c.rule), NewStore("pod"))
			ofGets := r.OfKind(gets)
			require.Equal(t, c.object, ofGets.Decide(noon, pod) != nil)
			require.Equal(t, c.lock, ofGets.Decide(noon, &match.Object{Namespace: "ns", Name: "leader", Lock: true}) != nil)
			require.Equal(t, c.version, r.DecidePath(noon, "get", "/version") != nil)
			require.Equal(t, c.openapi, r.DecidePath(noon, "get", "/openapi/v3") != nil)
			request := &match.HTTP{Scheme: "https", Host: "example.com", Method: "GET", Path: "/", Header: http.Header{}}
			require.Equal(t, c.http, r.DecideHTTP(noon, nil, *request) != nil)
			require.Equal(t, c.connection, r.DecideHTTP(noon, nil, match.HTTP{Scheme: "https", Host: "example.com", Opaque: true}) != nil)
			require.Equal(t, c.dig, r.Hosts().Deep("example.com"))
			require.False(t, r.Hosts().Deep("example.org"))
		})
	}
}

// Rules about hosts alone need decryption only to inject faults into single requests.
func TestDecryptsWhatRulesMustSee(t *testing.T) {
	asked := &match.HTTP{Scheme: "https", Host: "example.com", Port: 443, Opaque: true}
	for _, c := range []struct {
		rule      *meshv1.FaultRule
		decrypted bool
	}{
		{aborts(100), true},
		{aborts(0), false},
		{&meshv1.FaultRule{Truncate: &meshv1.Truncate{Percent: 1}}, true},
		{&meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 1, Percent: 1}}, true},
		{&meshv1.FaultRule{Reset_: &meshv1.Reset{Percent: 1, AfterAnswer: true}}, true},
		{&meshv1.FaultRule{Reset_: &meshv1.Reset{Percent: 1}}, false},
		{&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: 1, Percent: 1}}, false},
	} {
		exact := &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: "example.com"}}
		for _, m := range []struct {
			*meshv1.HttpMatch
			is bool
		}{
			{&meshv1.HttpMatch{Host: exact}, c.decrypted},
			{&meshv1.HttpMatch{Host: exact, Scheme: "http"}, false},
			{&meshv1.HttpMatch{Host: exact, Port: 8443}, false},
			{&meshv1.HttpMatch{Host: exact, Methods: []string{"GET"}}, !(c.rule.Abort != nil && c.rule.Abort.Percent == 0)},
		} {
			c.rule.Http = []*meshv1.HttpMatch{m.HttpMatch}
			require.Equal(t, m.is, compiled(t, one(c.rule), NewStore("pod")).Decrypts(asked), c.rule)
		}
	}
	require.False(t, (*Rules)(nil).Decrypts(asked))
}

func TestKindsWithoutRulesHaveNoResources(t *testing.T) {
	rule := aborts(100)
	rule.Resources = []*meshv1.ResourceMatch{{Verbs: []string{"list"}}}
	r := compiled(t, one(rule, &meshv1.FaultRule{StaleList: &meshv1.StaleList{Percent: 100}}), NewStore("pod"))
	require.Nil(t, r.OfKind(gets), "a get can meet neither")
	require.NotNil(t, r.OfKind(lists))
	require.Nil(t, (*Rules)(nil).OfKind(gets))
	require.Nil(t, (*Resources)(nil).Decide(noon, pod))
	require.Nil(t, (*Rules)(nil).DecidePath(noon, "get", "/version"))
	require.Nil(t, (*Rules)(nil).DecideHTTP(noon, nil, match.HTTP{}))
	require.False(t, (*Rules)(nil).Hosts().Deep("h"))
	(*Rules)(nil).Enforce(noon)
}

func TestMatchingRulesCombine(t *testing.T) {
	delay := func(d time.Duration) *meshv1.FaultRule {
		return &meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(d), Percent: 100}}
	}
	reset := func(after bool) *meshv1.FaultRule {
		return &meshv1.FaultRule{Reset_: &meshv1.Reset{Percent: 100, AfterAnswer: after}}
	}
	slow := &meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 9, Percent: 100}}
	teapot := &meshv1.FaultRule{Abort: &meshv1.Abort{Status: 418, Reason: "Teapot", Percent: 100}}
	truncate := &meshv1.FaultRule{Truncate: &meshv1.Truncate{AfterBytes: 4, Percent: 100}}
	for _, c := range []struct {
		what  string
		rules []*meshv1.FaultRule
		want  Faults // without Injected
	}{
		{"delays add up", []*meshv1.FaultRule{delay(1), delay(2)}, Faults{Rules: []string{"i/r0", "i/r1"}, Delay: 3}},
		{"and do not run over", []*meshv1.FaultRule{delay(math.MaxInt64), delay(2)}, Faults{Rules: []string{"i/r0", "i/r1"}, Delay: math.MaxInt64}},
		{"the first abort", []*meshv1.FaultRule{teapot, aborts(100), delay(2)},
			Faults{Rules: []string{"i/r0", "i/r2"}, Delay: 2, Abort: &Abort{418, "Teapot", "i/r0"}}},
		{"no reset after an abort", []*meshv1.FaultRule{teapot, reset(false)}, Faults{Rules: []string{"i/r0"}, Abort: &Abort{418, "Teapot", "i/r0"}}},
		{"no abort after a reset", []*meshv1.FaultRule{reset(false), teapot}, Faults{Rules: []string{"i/r0"}, Reset: true}},
		{"no answer to be slow", []*meshv1.FaultRule{reset(true), slow}, Faults{Rules: []string{"i/r0"}, Answer: Answer{ResetAfter: true}}},
		{"no abort of what is to be truncated", []*meshv1.FaultRule{truncate, teapot, slow}, Faults{Rules: []string{"i/r0", "i/r2"}, Answer: Answer{Truncate: 4, Slow: 9}}},
		{"of one rule", []*meshv1.FaultRule{{Abort: teapot.Abort, Reset_: reset(false).Reset_, Delay: delay(1).Delay}},
			Faults{Rules: []string{"i/r0"}, Delay: 1, Abort: &Abort{418, "Teapot", "i/r0"}}},
	} {
		t.Run(c.what, func(t *testing.T) {
			for _, r := range c.rules {
				r.Name, r.Key = "", ""
			}
			s := NewStore("pod")
			f := compiled(t, one(c.rules...), s).OfKind(gets).Decide(noon, pod)
			if c.want.Truncate == 0 {
				c.want.Truncate = -1
			}
			injected := uint64(0)
			for _, state := range s.States() {
				injected += state.Injected
			}
			require.Len(t, c.want.Rules, int(injected), "only what is done counts")
			f.Injected, f.namespace = nil, ""
			require.Equal(t, c.want, *f)
		})
	}
}

func TestWatchEventsAreDecidedInOrder(t *testing.T) {
	m := one(&meshv1.FaultRule{Seed: new(int64(3)), Watch: &meshv1.WatchFault{
		Gone:  &meshv1.WatchFault_Gone{Percent: 100, AfterNs: 5},
		Stall: &meshv1.WatchFault_Stall{Percent: 0},
		Delay: &meshv1.WatchFault_Late{Percent: 50, ByNs: 7},
		Drop:  &meshv1.WatchFault_Drop{Percent: 20, MadeUpAfterNs: 9},
	}}, &meshv1.FaultRule{Watch: &meshv1.WatchFault{Delay: &meshv1.WatchFault_Late{Percent: 100, ByNs: 1}}})
	run := func() (drops string, delays []time.Duration, reported int) {
		r := compiled(t, m, NewStore("pod")).OfKind(watches)
		for range 2 {
			f := r.Decide(noon, pod)
			w := f.Watch
			require.Equal(t, new(time.Duration(5)), w.Gone)
			require.Nil(t, w.Cut)
			require.Nil(t, w.Stall)
			require.Equal(t, time.Duration(9), w.MadeUpAfter)
			require.Nil(t, w.Duplicate)
			require.Nil(t, w.Exempt)
			w.Report = func(Injected) { reported++ }
			for range 100 {
				drop := w.Drop()
				drops += fmt.Sprint(drop)[:1]
				delays = append(delays, w.Delay())
				w.Did(WatchDelay)
				if drop {
					w.Did(WatchDrop)
				}
			}
		}
		return drops, delays, reported
	}
	drops, delays, reported := run()
	require.NotEqual(t, drops[:100], drops[100:], "two watches")
	dropped, late := strings.Count(drops, "t"), 0
	for _, d := range delays {
		require.Contains(t, []time.Duration{1, 8}, d, "delays add up")
		if d == 8 {
			late++
		}
	}
	require.InDelta(t, 40, dropped, 20)
	require.InDelta(t, 100, late, 30)
	require.Equal(t, dropped+late+200, reported)
	again, delaysAgain, _ := run()
	require.Equal(t, drops, again)
	require.Equal(t, delays, delaysAgain)
}

func TestInvalidRulesFailToCompile(t *testing.T) {
	for what, r := range map[string]*meshv1.FaultRule{
		"percentage NaN":     {Delay: &meshv1.Delay{Percent: math.NaN()}},
		"invalid percentage": {Reset_: &meshv1.Reset{Percent: 101}},
		"negative":           {Delay: &meshv1.Delay{FixedNs: -1}},
		"is not between":     {Abort: &meshv1.Abort{Status: 99}},
		"number of bytes 0":  {SlowBody: &meshv1.SlowBody{}},
		"invalid number":     {Truncate: &meshv1.Truncate{AfterBytes: math.MaxUint64}},
		`"Mars/Base"`:        {EffectiveTime: &meshv1.EffectiveTime{TimeZone: "Mars/Base"}},
		`"Local"`:            {EffectiveTime: &meshv1.EffectiveTime{TimeZone: "Local"}},
		"../etc":             {EffectiveTime: &meshv1.EffectiveTime{TimeZone: "../etc/passwd"}},
		"month 13":           {EffectiveTime: &meshv1.EffectiveTime{Months: []uint32{13}}},
		"exceed a day":       {EffectiveTime: &meshv1.EffectiveTime{Start: 86400}},
		"header":             {Resources: []*meshv1.ResourceMatch{{Headers: []*meshv1.HeaderMatch{{}}}}},
		"missing":            {Http: []*meshv1.HttpMatch{{Path: &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: "("}}}}},
	} {
		_, err := Compile(one(r), NewStore("pod"), noon)
		require.ErrorContains(t, err, what)
		require.ErrorContains(t, err, `rule "r0" of FaultInjection "i"`)
	}
}

func TestEnforceForgetsOtherRules(t *testing.T) {
	s := NewStore("pod")
	gone, stays := aborts(100), aborts(100)
	gone.Name, stays.Name = "gone", "stays"
	run(compiled(t, one(gone, stays), s).OfKind(gets), 3)
	_, err := Compile(one(stays), s, noon)
	require.NoError(t, err)
	require.Len(t, s.States(), 2, "not in force yet")
	compiled(t, one(stays), s)
	states := s.States()
	require.Len(t, states, 1)
	require.Equal(t, uint64(3), states[0].Matched)
	later, err := Compile(one(gone), s, noon.Add(keep.For))
	require.NoError(t, err)
	later.Enforce(noon.Add(keep.For))
	require.Zero(t, s.States()[0].Matched, "forgotten")
}

func TestImportReachesCompiledRules(t *testing.T) {
	rule := aborts(100)
	rule.Count = 2
	old := NewStore("pod")
	run(compiled(t, one(rule), old).OfKind(gets), 2)
	data, err := old.Export(noon)
	require.NoError(t, err)

	s := NewStore("pod")
	r := compiled(t, one(rule), s).OfKind(gets)
	require.NoError(t, s.Import(data, noon))
	require.Nil(t, r.Decide(noon, pod))
	require.Error(t, s.Import([]byte("{"), noon))
	require.Nil(t, r.Decide(noon, pod), "as it was")
}

// During a takeover the old agent exports twice: when the new one starts, and at its own end.
func TestSecondImportKeepsNewCounts(t *testing.T) {
	rule := aborts(100)
	rule.Count = 3
	old := NewStore("pod")
	before := compiled(t, one(rule), old).OfKind(gets)
	require.NotNil(t, before.Decide(noon, pod))
	first, err := old.Export(noon)
	require.NoError(t, err)

	s := NewStore("pod")
	r := compiled(t, one(rule), s).OfKind(gets)
	early := r.Decide(noon, pod) // before anything is imported
	require.NotNil(t, early)
	require.NoError(t, s.Import(first, noon))
	early.Missed(Aborted)
	require.Equal(t, uint64(1), s.States()[0].Injected, "not less than the other's")
	require.NotNil(t, r.Decide(noon, pod))

	require.NotNil(t, before.Decide(noon, pod))
	last, err := old.Export(noon)
	require.NoError(t, err)
	require.NoError(t, s.Import(last, noon))
	require.Equal(t, uint64(4), s.States()[0].Matched)
	require.Equal(t, uint64(3), s.States()[0].Injected)
	require.Nil(t, r.Decide(noon, pod), "all are spent")
}

func FuzzImport(f *testing.F) {
	f.Add([]byte(`{"version":2,"wall":1795262400000000000,"states":[{"key":"key-r0","of":{"matched":4,"injected":2}}]}`))
	f.Add([]byte(`{"version":2,"states":[{"key":"","of":null}]}`))
	f.Add([]byte(`[]`))
	f.Add([]byte(`{"key-r0":{"matched":4,"injected":2}}`))
	f.Add([]byte(`{"version":9,"oldest":2,"states":[{"key":"key-r0","of":{"matched":4,"more":1}},{"key":"b","of":1}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := NewStore("pod")
		_ = s.Import(data, noon) // what of it cannot be read is left out
		compiled(t, one(aborts(50)), s).OfKind(gets).Decide(noon, pod)
		once, err := s.Export(noon)
		require.NoError(t, err)
		moved := func(data []byte) []byte {
			next := NewStore("pod")
			require.NoError(t, next.Import(data, noon))
			again, err := next.Export(noon)
			require.NoError(t, err)
			return again
		}
		twice := moved(once) // those in force come first no more
		require.Equal(t, string(twice), string(moved(twice)))
	})
}

// A rule that is removed for a moment keeps its counts.
func TestReturningRulesKeepTheirCounts(t *testing.T) {
	s := NewStore("pod")
	count := aborts(100)
	count.Count = 2
	put := func(at time.Time, rules ...*meshv1.FaultRule) *Resources {
		r, err := Compile(one(rules...), s, at)
		require.NoError(t, err)
		r.Enforce(at)
		return r.OfKind(gets)
	}
	injected := func(r *Resources) bool { return r.Decide(noon, pod) != nil }
	r := put(noon, count)
	require.True(t, injected(r))
	put(noon)
	require.Empty(t, s.States())
	r = put(noon, count)
	require.True(t, injected(r))
	require.False(t, injected(r), "two, and not two again")
	put(noon)
	r = put(noon.Add(keep.For), count)
	require.True(t, injected(r), "it is another run")
}

// Faults of a watch are counted when they are injected, and take nothing of the rule's
// count otherwise.
func TestUninjectedWatchFaultsAreNotCounted(t *testing.T) {
	once := &meshv1.FaultRule{Count: 1, Watch: &meshv1.WatchFault{
		Gone: &meshv1.WatchFault_Gone{Percent: 100},
		Drop: &meshv1.WatchFault_Drop{Percent: 100},
	}}
	s := NewStore("pod")
	r := compiled(t, one(once), s).OfKind(watches)
	reported := []Kind{}
	decide := func() *Faults {
		f := r.Decide(noon, pod)
		if f != nil {
			f.Watch.Report = func(by Injected) { reported = append(reported, by.Kind) }
		}
		return f
	}
	for range 3 {
		f := decide()
		require.NotNil(t, f)
		require.Nil(t, decide(), "it may be done yet")
		f.Over()
		require.Empty(t, f.Injected)
		require.Empty(t, f.Rules)
		require.Zero(t, s.States()[0].Injected)
	}
	lifted := decide()
	(*Rules)(nil).Lift(noon, lifted)
	lifted.Over()
	require.Zero(t, s.States()[0].Injected)
	f := decide()
	f.Watch.Did(WatchDrop)
	f.Over()
	require.Empty(t, f.Injected, "it was reported")
	require.Equal(t, []Kind{WatchDrop}, reported)
	require.Equal(t, []string{"i/r0"}, f.Rules)
	require.Nil(t, decide())
}
