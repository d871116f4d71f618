package proxy

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

const rulesEach = 100

// limitsAbout are so many rules with all that a rule can count.
func limitsAbout(n int, of func(i int, r *meshv1.LimitRule)) (rules []*meshv1.LimitRule) {
	for i := range n {
		r := &meshv1.LimitRule{
			Key: fmt.Sprint("limit ", i), Name: fmt.Sprint(i), Trigger: onlyLimits(),
			Bucket: &meshv1.Bucket{Burst: 1 << 30, Limit: 1 << 30, IntervalNs: 1}, MaxInFlight: 10,
			Trip: &meshv1.Trip{WindowNs: 1e10, MinRequests: 20, ErrorPercent: 50},
		}
		of(i, r)
		rules = append(rules, r)
	}
	return rules
}

func faultsAbout(n int, of func(i int, r *meshv1.FaultRule)) (rules []*meshv1.FaultRule) {
	for i := range n {
		r := &meshv1.FaultRule{Key: fmt.Sprint("fault ", i), Name: fmt.Sprint(i), Abort: &meshv1.Abort{Status: 500, Percent: 100}}
		of(i, r)
		rules = append(rules, r)
	}
	return rules
}

type decided struct {
	name   string
	limits []*meshv1.LimitRule
	faults []*meshv1.FaultRule
}

func (d decided) traffic() *meshv1.Traffic {
	return &meshv1.Traffic{
		Breakers:   []*meshv1.Breaker{{Name: "cap", Rules: d.limits}},
		Injections: []*meshv1.Injection{{Name: "chaos", Rules: d.faults}},
	}
}

func podsIn(namespaces ...string) *meshv1.ResourceMatch {
	return &meshv1.ResourceMatch{ApiGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}, Namespaces: namespaces}
}

// decisions are rules beside a request for pod x in namespace ns.
func decisions() (out []decided) {
	about := func(name string, of func(i int) *meshv1.ResourceMatch) {
		out = append(out, decided{
			name,
			limitsAbout(rulesEach, func(i int, r *meshv1.LimitRule) { r.Resources = []*meshv1.ResourceMatch{of(i)} }),
			faultsAbout(rulesEach, func(i int, r *meshv1.FaultRule) { r.Resources = []*meshv1.ResourceMatch{of(i)} }),
		})
	}
	out = append(out, decided{name: "no rules"})
	about("other kinds", func(i int) *meshv1.ResourceMatch {
		m := podsIn()
		m.Resources = []string{fmt.Sprint("kind", i)}
		return m
	})
	namespaces := func(i int) *meshv1.ResourceMatch { return podsIn(fmt.Sprint("namespace-", i)) }
	about("other namespaces", namespaces)
	about("other names", func(i int) *meshv1.ResourceMatch {
		m := podsIn("ns")
		m.Names = []string{fmt.Sprint("pod-", i)}
		return m
	})
	about("other headers", func(i int) *meshv1.ResourceMatch {
		m := podsIn()
		m.Headers = []*meshv1.HeaderMatch{{Name: "X-Tenant", Value: fmt.Sprint("tenant-", i)}}
		return m
	})
	out = append(out, decided{"other user agents", limitsAbout(rulesEach, func(i int, r *meshv1.LimitRule) {
		r.Resources, r.UserAgents = []*meshv1.ResourceMatch{podsIn()}, []string{fmt.Sprint("client-", i, "/*")}
	}), nil})
	about("a limit matches", namespaces)
	out[len(out)-1].limits[rulesEach-1].Resources = []*meshv1.ResourceMatch{podsIn()}
	about("a fault matches", namespaces)
	rarely := func(r *meshv1.FaultRule) { // as good as never
		r.Resources, r.Abort.Percent = []*meshv1.ResourceMatch{podsIn()}, 1e-9
		r.EffectiveTime = &meshv1.EffectiveTime{TimeZone: "Europe/Berlin", Start: 3600, End: 3600}
	}
	rarely(out[len(out)-1].faults[rulesEach-1])
	about("both match", namespaces)
	out[len(out)-1].limits[rulesEach-1].Resources = []*meshv1.ResourceMatch{podsIn()}
	rarely(out[len(out)-1].faults[rulesEach-1])
	return out
}

// decider has the rules decide about a request, as often as it is called.
func decider(t testing.TB, d decided) func() {
	m := newMesh(t, &recorder{})
	m.traffic(d.traffic())
	r, err := http.NewRequest("GET", "https://kubernetes.default.svc/api/v1/namespaces/ns/pods/x", nil)
	require.NoError(t, err)
	r.Header.Set("User-Agent", "benchmark/1.0")
	r.Header.Set("X-Tenant", "tenant")
	info := &pipeline.RequestInfo{IsResourceRequest: true, Verb: "get", APIVersion: "v1", Resource: "pods", Namespace: "ns", Name: "x"}
	asked := newRequest(r)
	asked.Info = info
	out := asked.Outgoing()
	pol, x := m.pod.env.Policy.Load(), &pipeline.State{}
	var rules pipeline.Stages
	for _, s := range pol.Plan(&asked).Stages {
		switch fmt.Sprintf("%T", s) {
		case "*stages.limitStage", "*stages.faultStage":
			rules = append(rules, s)
		}
	}
	return func() {
		*x = pipeline.State{Req: asked, Decision: pipeline.Decision{Plan: pol.Plan(&asked), Out: out}}
		if rules.Apply(x) != nil {
			t.Fatal("refused")
		}
		pol.CountInjected(&x.Injection, x.Stale.Version != "")
		x.ReportResult(200, time.Time{})
		x.Allowed.Ticket.Leave()
	}
}

// The cost of all that rules add to a request: the plan, limits, faults, and what became
// of it.
func BenchmarkRules(b *testing.B) {
	for _, d := range decisions() {
		b.Run(d.name, func(b *testing.B) {
			decide := decider(b, d)
			b.ReportAllocs()
			for b.Loop() {
				decide()
			}
		})
	}
}

// Whatever rules there are, deciding allocates nothing for a request that they let pass.
func TestRulesThatAllowAllocateNothing(t *testing.T) {
	for _, d := range decisions() {
		t.Run(d.name, func(t *testing.T) { require.Zero(t, testing.AllocsPerRun(100, decider(t, d))) })
	}
}
