package trial

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
)

func TestChangeIsDoneWhenObserved(t *testing.T) {
	object := types.NamespacedName{Namespace: "amber-adopted", Name: trackedName}
	for name, test := range map[string]struct {
		generation   int64
		seen         map[types.NamespacedName]int64
		done, counts bool
	}{
		"observed":                {generation: 3, seen: map[types.NamespacedName]int64{object: 3}, done: true, counts: true},
		"a later one observed":    {generation: 3, seen: map[types.NamespacedName]int64{object: 4}, done: true, counts: true},
		"not yet":                 {generation: 3, seen: map[types.NamespacedName]int64{object: 2}, counts: true},
		"deleted by the trial":    {generation: 3, done: true},
		"evicted by the operator": {done: true, counts: true},
		"still to be evicted":     {seen: map[types.NamespacedName]int64{object: 0}, counts: true},
	} {
		t.Run(name, func(t *testing.T) {
			done, counts := change{object: object, generation: test.generation}.done(test.seen)
			require.Equal(t, test.done, done)
			require.Equal(t, test.counts, counts)
		})
	}
}

func TestPercentileIsOfOnePhase(t *testing.T) {
	samples := []sample{{"other", time.Hour}}
	require.Zero(t, percentile(samples, phaseAdoption, 0.99))
	for i := range 100 {
		samples = append(samples, sample{phaseAdoption, time.Duration(100-i) * time.Millisecond})
	}
	require.EqualValues(t, 50, percentile(samples, phaseAdoption, 0.5))
	require.EqualValues(t, 99, percentile(samples, phaseAdoption, 0.99))
}
