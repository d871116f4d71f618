// Package stats measures processes, and summarizes what tests and benchmarks measure.
package stats

import (
	"cmp"
	"math"
	"slices"
)

// Percentile returns a percentile by the nearest-rank method. share is between 0 and 1. It
// returns zero if there are no values.
func Percentile[T cmp.Ordered](values []T, share float64) (zero T) {
	if len(values) == 0 {
		return zero
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(share*float64(len(sorted)) - 1e-6))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Median returns the median, the mean of the middle two of an even number of values. It
// returns 0 if there are no values.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}
