package main

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// sample is the result of one turn of one subject.
type sample struct {
	count     int
	bytes     int64
	elapsed   time.Duration
	latencies []time.Duration
	cpu       time.Duration // of the proxy
	rss       int64         // of the proxy, after
}

// metric returns one number of a sample.
type metric func(sample) float64

func perSecond(s sample) float64   { return float64(s.count) / s.elapsed.Seconds() }
func timeEach(s sample) float64    { return 1 / perSecond(s) }
func megabytes(s sample) float64   { return float64(s.bytes) / 1e6 / s.elapsed.Seconds() }
func cpuEach(s sample) float64     { return s.cpu.Seconds() * 1e6 / float64(s.count) }
func cpuMegabyte(s sample) float64 { return s.cpu.Seconds() * 1e6 / (float64(s.bytes) / 1e6) }
func memory(s sample) float64      { return float64(s.rss) / 1e6 }

// percentile returns a percentile of the latencies in milliseconds.
func percentile(p int) metric {
	return func(s sample) float64 { return stats.Percentile(s.latencies, float64(p)/100).Seconds() * 1e3 }
}

// of returns the median of the rounds.
func (m metric) of(rounds []sample) float64 {
	values := make([]float64, len(rounds))
	for i, s := range rounds {
		values[i] = m(s)
	}
	return stats.Median(values)
}

// ratio returns the median of the ratios.
func (m metric) ratio(a, b []sample) float64 { return stats.Median(m.ratios(a, b)) }

// ratios returns the ratios of a to b in the same round: other load of the machine changes less within a round than
// between rounds.
func (m metric) ratios(a, b []sample) []float64 {
	values := make([]float64, len(a))
	for i := range a {
		values[i] = m(a[i]) / m(b[i])
	}
	return values
}
