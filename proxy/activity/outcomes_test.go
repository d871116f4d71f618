package activity

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOutcomes(t *testing.T) {
	var o Outcomes
	for _, code := range []int{200, 201, 404, 409, 409, 410, 429, 499, 403, 500, 503} {
		o.Count(code)
	}
	got := o.Report()
	require.Equal(t, []uint64{11, 3, 2}, []uint64{got.GetRequests(), got.GetErrors(), got.GetConflicts()})
}
