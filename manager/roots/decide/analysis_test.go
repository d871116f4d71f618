package decide

import (
	"cmp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func TestBoundsOfAnalysis(t *testing.T) {
	judge := func(spec *v1alpha1.RolloutAnalysis, shard string, sums map[string]counts, sizes map[string]size) string {
		return cmp.Or(exceeded(spec, sums[shard]), writesTooMuch(spec, shard, sums, sizes))
	}
	spec := &v1alpha1.RolloutAnalysis{MaxErrors: new(v1alpha1.Percent("1")), MaxConflicts: new(v1alpha1.Percent("10")), MaxWritesRatio: new(int32(3))}
	sizes := map[string]size{"canary": {weight: 10}, "a": {weight: 100}, "b": {weight: 1000}}
	for name, test := range map[string]struct {
		canary counts
		want   string
	}{
		"nothing":           {counts{}, ""},
		"few requests":      {counts{requests: 49, errors: 49, conflicts: 49, writes: 49}, ""},
		"within all bounds": {counts{requests: 1000, errors: 10, conflicts: 100, writes: 120}, ""},
		"errors":            {counts{requests: 1000, errors: 11}, "11 of 1000 requests (1.1 %) failed, and 1 % may"},
		"conflicts":         {counts{requests: 1000, conflicts: 101}, "101 of 1000 requests (10.1 %) met a conflict, and 10 % may"},
		"a hot loop":        {counts{requests: 1000, writes: 121}, "121 writes of 10 objects, more than 3 times as many for each as in shard a: 400 of 100"},
	} {
		t.Run(name, func(t *testing.T) {
			sums := map[string]counts{"canary": test.canary, "a": {requests: 1e6, errors: 1e6, writes: 400}, "b": {}}
			require.Equal(t, test.want, judge(spec, "canary", sums, sizes))
		})
	}
	require.Empty(t, judge(spec, "canary", map[string]counts{"canary": {requests: 1000, writes: 1000}}, sizes), "nothing to compare with")
	require.Empty(t, judge(&v1alpha1.RolloutAnalysis{}, "canary", map[string]counts{"canary": {requests: 100, errors: 100, conflicts: 100, writes: 100}, "a": {}}, sizes))
}

func TestCountsSince(t *testing.T) {
	before := counts{requests: 10, errors: 5, conflicts: 2, writes: 8}
	require.Equal(t, counts{requests: 10, errors: 1, conflicts: 1, writes: 2}, counts{requests: 20, errors: 6, conflicts: 3, writes: 10}.since(before))
	require.Equal(t, counts{requests: 10, errors: 0, conflicts: 0, writes: 1}, counts{requests: 20, errors: 5, conflicts: 2, writes: 1}.since(before), "another period")
}
