package push

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

// An agent may report what a pod made it count, or make up all of it.
func TestReportedActivityIsBounded(t *testing.T) {
	one := func(group, resource string) *meshv1.ResourceActivity {
		return &meshv1.ResourceActivity{Group: group, Resource: resource, Writes: math.MaxUint64, ForeignWrites: math.MaxUint64}
	}
	all := []*meshv1.ResourceActivity{
		one("", "secrets"), one("apps", "deployments"), one("", ""), one("", "no resource"), one("bad group", "pods"),
		one("", strings.Repeat("x", 64)), one(strings.Repeat("x", 254), "pods"), nil,
	}
	require.Len(t, activity(all), 2)
	for i := range 1000 {
		all = append(all, one("example.com", fmt.Sprintf("kind-%d", i)))
	}
	for i := range uint64(1000) {
		all[0].Keys = append(all[0].Keys, 1000-i)
	}
	out := activity(all)
	require.LessOrEqual(t, len(out), 2*meshv1.MaxActivity)
	require.Len(t, out[0].GetKeys(), sample.Size)
	require.IsIncreasing(t, out[0].GetKeys())
	require.EqualValues(t, maxWrites, out[0].GetWrites())
	require.EqualValues(t, maxWrites, out[0].GetForeignWrites())
}

// Counts change with each report: the rounds of roots do not follow them.
func TestActivityAloneIsNoChange(t *testing.T) {
	changed, counted := 0, 0
	s := &Server{Changed: func() { changed++ }, Counted: func() { counted++ }}
	s.Set(cluster1, policies("a@n1=1"))
	st := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
	report := func(writes uint64) {
		s.report("n1", st, &meshv1.Report{Pods: []*meshv1.PodReport{{
			Uid: "a", Capture: "ebpf", Version: "1", Activity: []*meshv1.ResourceActivity{{Resource: "secrets", Writes: writes}},
		}}})
	}
	report(1)
	before := changed
	report(2)
	require.Equal(t, before, changed)
	require.Equal(t, 1, counted)
	require.EqualValues(t, 2, s.Observe("n1", "a").Activity[0].GetWrites())
}

func TestReportedOutcomesAreBounded(t *testing.T) {
	most := uint64(math.MaxUint64)
	require.Equal(t, Outcomes{maxWrites, maxWrites, maxWrites, maxWrites, maxMicros, maxWrites},
		outcomes(&meshv1.Outcomes{Requests: most, Errors: most, Conflicts: most, Answered: most, LatencyMicros: most, Writes: most}))
	require.Equal(t, Outcomes{}, outcomes(nil))
}
