package egress

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// hundred returns a policy with 100 rules that intercept, 100 that limit and 100 that
// inject faults, each about a path of a host.
func hundred(t testing.TB, host func(i int) *meshv1.TextMatch) *Policy {
	t.Helper()
	cap, chaos := &meshv1.Breaker{Name: "cap"}, &meshv1.Injection{Name: "chaos"}
	for i := range 100 {
		if host == nil {
			break
		}
		key, of := fmt.Sprint(i), []*meshv1.HttpMatch{{Host: host(i), Path: exactly("/x")}}
		cap.Intercepts = append(cap.Intercepts, &meshv1.InterceptRule{Name: key, Deny: true, Http: of})
		cap.Rules = append(cap.Rules, &meshv1.LimitRule{Key: key, Name: key, Http: of, Bucket: &meshv1.Bucket{Burst: 1, IntervalNs: int64(time.Hour)}})
		chaos.Rules = append(chaos.Rules, &meshv1.FaultRule{Key: key, Name: key, Http: of, Abort: &meshv1.Abort{Status: 500, Percent: 100}})
	}
	m := &meshv1.Traffic{Breakers: []*meshv1.Breaker{cap}, Injections: []*meshv1.Injection{chaos}, Egress: &meshv1.Egress{}}
	limits, err := limit.Compile(m, limit.NewStore(), time.Now())
	require.NoError(t, err)
	faults, err := fault.Compile(m, fault.NewStore("pod"), time.Now())
	require.NoError(t, err)
	p, err := Compile(m, limits, faults)
	require.NoError(t, err)
	return p
}

// otherHosts are hosts of rules that do not match askedOfOthers.
var otherHosts = []struct {
	name string
	host func(i int) *meshv1.TextMatch
}{
	{"no rules", nil},
	{"other hosts", func(i int) *meshv1.TextMatch {
		return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: fmt.Sprintf("a%02d.example.com", i)}}
	}},
	{"other prefixes", func(i int) *meshv1.TextMatch {
		return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Prefix{Prefix: fmt.Sprintf("api-%d.", i)}}
	}},
	{"other suffixes", func(i int) *meshv1.TextMatch {
		return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Suffix{Suffix: fmt.Sprintf(".%d.com", i)}}
	}},
	{"other expressions", func(i int) *meshv1.TextMatch {
		return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: fmt.Sprintf(`(api|www)\.region-%d\..*\.com`, i)}}
	}},
	{"other expressions with an end", func(i int) *meshv1.TextMatch {
		return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: fmt.Sprintf(`[a-z0-9-]+\.region-%d\.example\.com`, i)}}
	}},
}

func decideAbout(p *Policy, asked *match.HTTP) bool {
	if p.deep(asked.Host) || p.denied(asked) != nil || p.faults.DecideHTTP(time.Now(), nil, *asked) != nil {
		return false
	}
	_, refused := p.limits.TakeHTTP(time.Now(), limit.Ticket{}, "benchmark/1.0", *asked)
	return refused == nil
}

func askedOfOthers() *match.HTTP {
	return &match.HTTP{Scheme: "http", Host: "api.region-x.services.example.com", Port: 80, Method: "GET", Path: "/v1/things"}
}

// BenchmarkRules measures the cost of rules about other hosts.
func BenchmarkRules(b *testing.B) {
	for _, of := range otherHosts {
		b.Run(of.name, func(b *testing.B) {
			p, asked := hundred(b, of.host), askedOfOthers()
			b.ReportAllocs()
			for b.Loop() {
				if !decideAbout(p, asked) {
					b.Fatal("refused")
				}
			}
		})
	}
}

// A decision about a host that was seen before allocates nothing, for any rules about
// others.
func TestRulesOfOtherHostsAllocateNothing(t *testing.T) {
	for _, of := range otherHosts {
		p, asked := hundred(t, of.host), askedOfOthers()
		require.Zero(t, testing.AllocsPerRun(100, func() { require.True(t, decideAbout(p, asked)) }), of.name)
	}
}

// A host is looked up once for all its rules.
func TestDeepnessOfHostsIsIndexed(t *testing.T) {
	for _, of := range otherHosts {
		var policies []*Policy
		for range 2 {
			p := hundred(t, of.host)
			require.False(t, p.deep(askedOfOthers().Host))
			policies = append(policies, p)
		}
		asked := askedOfOthers()
		require.Zero(t, testing.AllocsPerRun(1, func() {
			require.True(t, decideAbout(policies[0], asked))
			policies = policies[1:]
		}), of.name)
	}
}

// refuse_unseen of a CircuitBreaker has no effect on others.
func TestRefuseUnseenIsPerCircuitBreaker(t *testing.T) {
	m := &meshv1.Traffic{Egress: &meshv1.Egress{}, Breakers: []*meshv1.Breaker{
		{Name: "lenient", Intercepts: []*meshv1.InterceptRule{deny(&meshv1.HttpMatch{Path: exactly("/x")}), allow(host("a"), host("b"))}},
		{Name: "strict", RefuseUnseen: true, Intercepts: []*meshv1.InterceptRule{deny(&meshv1.HttpMatch{Host: exactly("b"), Path: exactly("/x")})}},
	}}
	p, err := Compile(m, nil, nil)
	require.NoError(t, err)
	require.Nil(t, p.denied(&match.HTTP{Scheme: "https", Host: "a", Opaque: true}))
	require.Equal(t, "strict", p.denied(&match.HTTP{Scheme: "https", Host: "b", Opaque: true}).breaker)
	require.Equal(t, "strict", p.blind(&match.HTTP{Port: 443, Opaque: true}).breaker)
	m.Breakers = m.Breakers[:1]
	p, err = Compile(m, nil, nil)
	require.NoError(t, err)
	require.Nil(t, p.blind(&match.HTTP{Port: 443, Opaque: true}))
}

// A change of one pod's policy does not delay those of others: Changed returns before the policy
// is applied to everything that is under way.
func TestChangedDoesNotWait(t *testing.T) {
	w := newWorld(t)
	cut := make(chan struct{})
	w.server.flows.Add(&flow{cut: func() { close(cut) }})
	w.mu.Lock() // the policy cannot be read
	for range 3 {
		w.server.Changed()
	}
	w.mu.Unlock()
	select {
	case <-cut:
	case <-time.After(soon):
		require.Fail(t, "the flow was not cut")
	}
}
