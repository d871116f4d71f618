package activity

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOutcomes(t *testing.T) {
	var o Outcomes
	for _, code := range []int{200, 201, 404, 409, 409, 410, 429, 499, 403, 500, 503} {
		o.Count(code)
	}
	got := o.Report()
	require.Equal(t, []uint64{11, 3, 2}, []uint64{got.GetRequests(), got.GetErrors(), got.GetConflicts()})
	for _, after := range []time.Duration{600 * time.Nanosecond, 900 * time.Nanosecond, time.Millisecond} {
		o.Answered(after)
	}
	got = o.Report()
	require.Equal(t, []uint64{3, 1001}, []uint64{got.GetAnswered(), got.GetLatencyMicros()})
	o.Wrote()
	require.EqualValues(t, 1, o.Report().GetWrites())
}
