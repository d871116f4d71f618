package decide

import (
	"cmp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func TestBoundsOfAnalysis(t *testing.T) {
	judge := func(spec *v1alpha1.RolloutAnalysis, shard string, sums map[string]counts, sizes map[string]size) string {
		return cmp.Or(exceeded(spec, sums[shard]), writesTooMuch(spec, shard, sums, sizes), answeredTooLate(spec, shard, sums))
	}
	spec := &v1alpha1.RolloutAnalysis{MaxErrors: new(v1alpha1.Percent("1")), MaxConflicts: new(v1alpha1.Percent("10")), MaxWritesRatio: new(int32(3)), MaxLatencyRatio: new(int32(2))}
	sizes := map[string]size{"canary": {weight: 10}, "a": {weight: 100}, "b": {weight: 1000}}
	for name, test := range map[string]struct {
		canary counts
		want   string
	}{
		"nothing":           {counts{}, ""},
		"few requests":      {counts{requests: 49, errors: 49, conflicts: 49, writes: 49, answered: 49, micros: 1e9}, ""},
		"within all bounds": {counts{requests: 1000, errors: 10, conflicts: 100, writes: 120, answered: 1000, micros: 6e6}, ""},
		"slow requests": {counts{requests: 1000, answered: 1000, micros: 6.1e6},
			"1000 requests took 6.1ms on average, more than 2 times as long as in shard a: 3ms"},
		"errors":     {counts{requests: 1000, errors: 11}, "11 of 1000 requests (1.1 %) failed, and 1 % may"},
		"conflicts":  {counts{requests: 1000, conflicts: 101}, "101 of 1000 requests (10.1 %) met a conflict, and 10 % may"},
		"a hot loop": {counts{requests: 1000, writes: 121}, "121 writes of 10 objects, more than 3 times as many for each as in shard a: 400 of 100"},
	} {
		t.Run(name, func(t *testing.T) {
			sums := map[string]counts{"canary": test.canary, "a": {requests: 1e6, errors: 1e6, writes: 400, answered: 1e6, micros: 3e9}, "b": {answered: 10, micros: 1e9}}
			require.Equal(t, test.want, judge(spec, "canary", sums, sizes))
		})
	}
	require.Empty(t, judge(spec, "canary", map[string]counts{"canary": {requests: 1000, writes: 1000, answered: 1000, micros: 1e9}}, sizes), "nothing to compare with")
	require.Empty(t, judge(&v1alpha1.RolloutAnalysis{}, "canary", map[string]counts{"canary": {requests: 100, errors: 100, conflicts: 100, writes: 100, answered: 100, micros: 1e9}, "a": {answered: 100, micros: 1}}, sizes))
}

func TestAnyLowerCountShowsAnAgentsRestart(t *testing.T) {
	before := counts{requests: 10, errors: 5, conflicts: 2, writes: 8, answered: 9, micros: 100}
	require.False(t, before.restarted(before))
	for _, after := range []counts{
		{9, 5, 2, 8, 9, 100}, {20, 4, 2, 8, 9, 100}, {20, 5, 1, 8, 9, 100}, {20, 5, 2, 7, 9, 100}, {20, 5, 2, 8, 8, 100}, {20, 5, 2, 8, 9, 99},
	} {
		require.True(t, after.restarted(before), "%+v", after)
	}
}

func TestCountsSince(t *testing.T) {
	before := counts{requests: 10, errors: 5, conflicts: 2, writes: 8, answered: 4, micros: 30}
	require.Equal(t, counts{requests: 10, errors: 1, conflicts: 1, writes: 2, answered: 3, micros: 20}, counts{requests: 20, errors: 6, conflicts: 3, writes: 10, answered: 7, micros: 50}.since(before))
}
