package v1

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRecordCountsEachPodAndGenerationOnce(t *testing.T) {
	obj := &Tally{}
	obj.Generation = 1
	obj.Spec.Say = "one"

	require.True(t, obj.Record("a"))
	require.False(t, obj.Record("a"), "the same generation counts once")
	require.True(t, obj.Record("b"), "a second pod shows, although the generation is observed")

	obj.Generation, obj.Spec.Say = 2, "two"
	require.True(t, obj.Record("a"))

	require.Equal(t, TallyStatus{
		ObservedGeneration: 2,
		Said:               "two",
		ReconciledBy:       []string{"a", "b"},
		Reconciles:         map[string]int64{"a": 2, "b": 1},
		Generations:        map[string]int64{"a": 2, "b": 1},
	}, obj.Status)
}

func TestRefreshIsDueAfterItsInterval(t *testing.T) {
	obj, now := &Tally{}, time.Now()
	require.True(t, obj.Refresh(now, time.Second))
	require.False(t, obj.Refresh(now.Add(time.Second-1), time.Second))
	require.True(t, obj.Refresh(now.Add(time.Second), time.Second))
	require.True(t, obj.Status.Refreshed.Time.Equal(now.Add(time.Second)))
}

func TestDeepCopySharesNothing(t *testing.T) {
	obj := &Tally{}
	obj.Generation = 1
	obj.Record("a")
	obj.Refresh(time.Now(), 0)
	list := &TallyList{Items: []Tally{*obj}}

	c := list.DeepCopyObject().(*TallyList)
	require.Equal(t, list, c)
	c.Items[0].Generation = 2
	c.Items[0].Record("a")
	c.Items[0].Record("b")
	require.Equal(t, int64(1), obj.Status.Reconciles["a"])
	require.Equal(t, []string{"a"}, list.Items[0].Status.ReconciledBy)
	require.NotSame(t, obj.Status.Refreshed, c.Items[0].Status.Refreshed)
}
