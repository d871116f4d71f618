package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// Limits of ratios.
const (
	mostCPU     = 1.05 // of 5 shards and that of one, of 5 parts by hand and that of the whole
	mostCache   = 1.15 // of a shard, of its part of the unsharded one
	mostManager = 1.05 // of its memory, with ten times the objects
	mostSkew    = 1.10
)

// limits collects the limits that are exceeded.
type limits []string

func (l *limits) within(what string, value, limit float64) string {
	if value > 0 && value <= limit {
		return fmt.Sprintf("<= %.2f ok", limit)
	}
	*l = append(*l, fmt.Sprintf("%s: %.2f, not within %.2f", what, value, limit))
	return fmt.Sprintf("<= %.2f MISSED", limit)
}

// report prints the results of the operator: first the settings off the mesh, then that of
// one shard, then the others.
func (b *bench) report(results []*result, before string) []string {
	var missed limits
	off, hand, one := results[0], results[1], results[2]
	fmt.Printf("\nload before: %s; after: %s\n", before, stats.Load())

	fmt.Printf("\n| operator, %.0f changes/s | reconciles | p50 ms | p99 ms | CPU ms/reconcile: operator | agents | manager | together | of %s | of off the mesh | limit | apiserver | idle, CPU ms/s |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|\n", b.rate, one)
	for _, r := range results {
		slices.Sort(r.took)
		limit := ""
		if r.shards == 5 {
			// Dividing an operator has a cost without the mesh, too. The limit is on what the mesh adds.
			limit = missed.within(fmt.Sprintf("CPU of %s, less what dividing costs", r), r.costBeside(one)/hand.costBeside(off), mostCPU)
			limit += fmt.Sprintf(" (%.2f)", r.costBeside(one)/hand.costBeside(off))
		}
		fmt.Printf("| %s | %d | %.1f | %.1f | %.3f | %.3f | %.3f | %.3f | %.2f | %.2f | %s | %.3f | %.1f |\n", r, len(r.took),
			ms(r.took.percentile(50)), ms(r.took.percentile(99)),
			median(r.used, func(u usage) time.Duration { return u.operator }), median(r.used, func(u usage) time.Duration { return u.agents }),
			median(r.used, func(u usage) time.Duration { return u.manager }), median(r.used, r.cost), r.costBeside(one), r.costBeside(off), limit,
			median(r.used, func(u usage) time.Duration { return u.apiserver }), median(r.idle, r.cost))
	}

	whole := off.live[0].bytes
	fmt.Printf("\n| cache of %d objects with %d KB | MB, each pod | of its share, at most | limit |\n|---|--:|--:|---|\n", b.namespaces*b.each, padding>>10)
	for _, r := range results {
		worst, each := 0.0, []string{}
		for _, s := range r.live {
			worst = max(worst, s.bytes/(s.of*whole))
			each = append(each, fmt.Sprintf("%.1f", s.bytes/1e6))
		}
		limit := ""
		if r.shards > 0 {
			limit = missed.within(fmt.Sprintf("cache with %s", r), worst, mostCache)
		}
		fmt.Printf("| %s | %s | %.2f | %s |\n", r, strings.Join(each, ", "), worst, limit)
	}

	if !b.has("throughput") {
		return missed
	}
	fmt.Printf("\n| throughput with p90 <= %v | changes/s | p50 ms | p90 ms | of 1 shard | efficiency |\n|---|--:|--:|--:|--:|--:|\n", mostP90)
	for _, r := range results[2:] {
		times := r.throughput / one.throughput
		fmt.Printf("| %s | %.1f | %.0f | %.0f | %.2f | %.0f %% |\n", r, r.throughput,
			ms(r.at.percentile(50)), ms(r.at.percentile(90)), times, 100*times/float64(r.shards))
	}
	return missed
}

// cost is the usage of the operator, and of the mesh if the operator is on it.
func (r *result) cost(u usage) time.Duration {
	if r.shards == 0 {
		return u.operator
	}
	return u.operator + u.agents + u.manager
}

// median of the rounds, in milliseconds.
func median(rounds []usage, of func(usage) time.Duration) float64 {
	var values []float64
	for _, u := range rounds {
		values = append(values, ms(of(u)))
	}
	return stats.Median(values)
}

// costBeside returns the median of the ratios within the same round: other load of the machine
// makes a reconcile more expensive, and changes less within a round.
func (r *result) costBeside(other *result) float64 {
	var values []float64
	for i, u := range r.used {
		values = append(values, ms(r.cost(u))/ms(other.cost(other.used[i])))
	}
	return stats.Median(values)
}

func reportManager(few, many crowd, before string) []string {
	var missed limits
	fmt.Printf("\nload before: %s; after: %s\n", before, stats.Load())
	fmt.Printf("\n| %d namespaces, %d shards | manager's heap MB | of it with few | limit | skew when counted | after balancing | limit |\n|---|--:|--:|---|--:|--:|---|\n", tenants, tenantShards)
	for _, c := range []crowd{few, many} {
		memory := ""
		if c == many {
			memory = missed.within("manager's memory", many.live/few.live, mostManager)
		}
		fmt.Printf("| %d objects | %.1f | %.3f | %s | %.2f | %.2f | %s |\n", c.objects, c.live/1e6, c.live/few.live, memory, c.first, c.skew,
			missed.within(fmt.Sprintf("skew of %d objects", c.objects), c.skew, mostSkew))
	}
	return missed
}

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }
