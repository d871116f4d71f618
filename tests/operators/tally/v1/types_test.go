package v1

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRecord(t *testing.T) {
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

func TestDeepCopySharesNothing(t *testing.T) {
	obj := &Tally{}
	obj.Generation = 1
	obj.Record("a")
	list := &TallyList{Items: []Tally{*obj}}

	c := list.DeepCopyObject().(*TallyList)
	require.Equal(t, list, c)
	c.Items[0].Generation = 2
	c.Items[0].Record("a")
	c.Items[0].Record("b")
	require.Equal(t, int64(1), obj.Status.Reconciles["a"])
	require.Equal(t, []string{"a"}, list.Items[0].Status.ReconciledBy)
}
