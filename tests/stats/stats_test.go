package stats

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPercentileByNearestRank(t *testing.T) {
	var all []time.Duration
	for i := range 100 {
		all = append(all, time.Duration(100-i))
	}
	require.Equal(t, time.Duration(99), Percentile(all, 0.99))
	require.Equal(t, time.Duration(50), Percentile(all[50:], 0.99))
	require.Equal(t, time.Duration(7), Percentile([]time.Duration{7}, 0.99))
	require.Zero(t, Percentile[time.Duration](nil, 0.99))
}

func TestMedianOfAnEvenNumberOfValues(t *testing.T) {
	require.Equal(t, 2.5, Median([]float64{4, 1, 3, 2}))
	require.Equal(t, 2.0, Median([]float64{3, 1, 2}))
	require.Zero(t, Median(nil))
}
