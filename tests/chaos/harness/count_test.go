package harness

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
	require.Zero(t, Percentile(nil, 0.99))
}
