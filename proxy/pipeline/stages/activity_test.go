package stages

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/activity"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// writer is a policy of a root's shard that divides ConfigMaps.
func writer(tb testing.TB) *Policy {
	tb.Helper()
	d, err := isolation.Compile(&meshv1.Sharding{
		Shard: "part-0", Owners: []*meshv1.Owner{{Shard: "part-0"}, {Shard: "part-1"}},
		Limits: []*meshv1.Limit{{
			Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"configmaps"}}}, Scope: sharding.Keys("mine").Proto(),
		}},
	}, "home")
	require.NoError(tb, err)
	e := &Env{}
	e.Observations.Activity.Reset(time.Now().Add(-activity.Grace))
	require.Empty(tb, e.Observations.Activity.Report(time.Now()))
	return &Policy{env: e, Division: d}
}

// BenchmarkActivity is all that counting adds to a write: with one namespace, and with more
// than a sample keeps.
func BenchmarkActivity(b *testing.B) {
	for _, resource := range []string{"secrets", "configmaps"} {
		for _, n := range []int{1, 20, 1000} {
			b.Run(fmt.Sprintf("%s/namespaces=%d", resource, n), func(b *testing.B) {
				a := newActivity(writer(b), match.Kind{Verb: "update", Resource: resource})
				var requests []*pipeline.State
				for i := range n {
					x := &pipeline.State{}
					x.Req.Info = &pipeline.RequestInfo{Verb: "update", Resource: resource, Namespace: fmt.Sprintf("tenant-%04d", i), Name: "settings"}
					x.Out.Query = "fieldManager=operator&timeout=30s"
					requests = append(requests, x)
					a.Written(x)
				}
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					a.Written(requests[i%n])
				}
			})
		}
	}
}

func TestCountingAWriteAllocatesNothing(t *testing.T) {
	a := newActivity(writer(t), match.Kind{Verb: "update", Resource: "secrets"})
	x := &pipeline.State{}
	x.Req.Info = &pipeline.RequestInfo{Verb: "update", Resource: "secrets", Namespace: "mine", Name: "one"}
	require.Zero(t, testing.AllocsPerRun(100, func() { a.Written(x) }))
}

func TestWritesAreCountedByKey(t *testing.T) {
	for name, c := range map[string]struct {
		resource, namespace, object, query, would string
		writes, foreign                           int
		divided                                   bool
		keys                                      []uint64
	}{
		"in a namespace":           {"secrets", "tenant", "a", "", "", 1, 0, false, []uint64{sample.Key("tenant", "")}},
		"in no namespace":          {"nodes", "", "n1", "", "", 1, 0, false, []uint64{sample.Key("", "n1")}},
		"dry run":                  {"secrets", "tenant", "a", "dryRun=All", "", 0, 0, false, nil},
		"divided":                  {"configmaps", "mine", "a", "", "", 1, 0, true, nil},
		"divided, of another":      {"configmaps", "theirs", "a", "", "", 1, 1, true, nil},
		"divided, and is observed": {"configmaps", "mine", "a", "", observedForeign, 1, 1, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			p := writer(t)
			a := newActivity(p, match.Kind{Verb: "update", Resource: c.resource})
			x := &pipeline.State{}
			x.Req.Info = &pipeline.RequestInfo{Verb: "update", Resource: c.resource, Namespace: c.namespace, Name: c.object}
			x.Out.Query, x.Would = c.query, c.would
			a.Written(x)
			report := p.env.Observations.Activity.Report(time.Now())
			if c.writes == 0 {
				require.Empty(t, report)
				return
			}
			require.Len(t, report, 1)
			require.EqualValues(t, c.writes, report[0].GetWrites())
			require.EqualValues(t, c.foreign, report[0].GetForeignWrites())
			require.Equal(t, c.divided, report[0].GetDivided())
			require.Equal(t, c.keys, report[0].GetKeys())
		})
	}
}
