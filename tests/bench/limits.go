package main

import (
	"errors"
	"fmt"
	"io"
	"math/big"

	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// beside are limits of what ctrlmesh takes, of what HAProxy takes with its default of a thread for each processor.
var beside = []struct {
	row, what string
	of        metric
	most      float64
}{
	{oneGet, "CPU", cpuEach, 0.9},
	{manyGets, "CPU", cpuEach, 0.8},
	{manyGets, "time for each", timeEach, 1},
	{manyGets, "p99", percentile(99), 1},
	{listJSON, "CPU", cpuEach, 0.7},
	{listProtobuf, "CPU", cpuEach, 0.7},
	{listGzip, "CPU", cpuEach, 1},
	{oneWatch, "CPU", cpuEach, 0.75},
	{manyWatches, "CPU", cpuEach, 0.95}, // see the README for what an event costs
}

// reportLimits prints the limits of the rows that were measured, and fails if one is exceeded.
func reportLimits(w io.Writer, results map[string]map[string][]sample) (missed error) {
	_, _ = fmt.Fprintf(w, "\n| ctrlmesh, of HAProxy | | seen | limit |\n|---|---|--:|---|\n")
	for _, l := range beside {
		mesh, other := results[l.row][ctrlmesh], results[l.row][haproxy]
		if len(mesh) == 0 || len(other) == 0 {
			continue
		}
		text, over := limited(l.of.ratios(mesh, other), l.most)
		if over {
			missed = errors.Join(missed, fmt.Errorf("%s: %s is not within %g of HAProxy's", l.row, l.what, l.most))
		}
		_, _ = fmt.Fprintf(w, "| %s | %s | %.2f | %s |\n", l.row, l.what, l.of.ratio(mesh, other), text)
	}
	return missed
}

// rare is how seldom chance may give a result that counts as one.
const rare = 0.05

// limited returns how a limit of the ratios of all rounds is printed, and whether they exceed it: the median does, and
// so do more rounds than chance explains (a sign test).
func limited(ratios []float64, most float64) (text string, over bool) {
	above := 0
	for _, r := range ratios {
		if r > most {
			above++
		}
	}
	switch {
	case stats.Median(ratios) <= most:
		return fmt.Sprintf("<= %g ok", most), false
	case chance(above, len(ratios)) > rare:
		return fmt.Sprintf("<= %g within noise: above it in %d of %d rounds", most, above, len(ratios)), false
	}
	return fmt.Sprintf("<= %g MISSED", most), true
}

// chance returns the probability that at least k of n coins show heads.
func chance(k, n int) float64 {
	outcomes := new(big.Int)
	for i := k; i <= n; i++ {
		outcomes.Add(outcomes, new(big.Int).Binomial(int64(n), int64(i)))
	}
	all := new(big.Int).Lsh(big.NewInt(1), uint(n))
	p, _ := new(big.Rat).SetFrac(outcomes, all).Float64()
	return p
}
