package main

import (
	"fmt"
	"slices"
	"strconv"
	"time"
)

const shardingSuite = "sharding"

// handoversOf are the least that parts must come to. The sum is 200.
var handoversOf = map[string]int{"scale": 30, "canary": 120, "restart": 10, "storm": 40}

const (
	minKills      = 20 // of operator pods, agents and managers
	minPartitions = 4
	minAdoptions  = 100
	minRestores   = 20
	maxHandover   = 30 * time.Second // the slowest of a hundred, where nothing was broken
	maxSkew       = 1.25             // at rest, with a few dozen namespaces of very different weight
	maxFailover   = 5 * time.Second
)

// shardingCounts are those of suite sharding.
type shardingCounts struct {
	handovers    int
	took         []time.Duration // of those where nothing was broken
	doubleWrites int
	lost         int // objects that nobody has reconciled in the end
	orphans      int // namespaces without an owner in the end, or without one at work for too long
	kills        int
	partitions   int
	skew         float64
	failovers    []time.Duration
	explored     int
	adoptions    int // each with the removal
	outside      int // writes by pods outside the mesh of what a shard owned
	restores     int // of etcd
}

func (c *shardingCounts) fields(ran []string) []field {
	owned := []string{"scale", "canary", "restart", "storm", "balance", "failover", "adoption", "restore"}
	enough := 0
	for _, part := range ran {
		enough += handoversOf[part]
	}
	count := func(parts []string, name string, n int, holds bool) field {
		return field{name, parts, strconv.Itoa(n), holds}
	}
	millis := func(parts []string, name string, d time.Duration, holds bool) field {
		return field{name, parts, strconv.FormatInt(d.Milliseconds(), 10), holds}
	}
	moving := []string{"scale", "canary", "restart", "storm"}
	quiet := moving[:3]
	p99, failover := percentile(c.took, 0.99), percentile(c.failovers, 0.99)
	return []field{
		count(moving, "handovers", c.handovers, c.handovers >= enough),
		count(owned, "double_writes", c.doubleWrites, c.doubleWrites == 0),
		count(owned, "lost_objects", c.lost, c.lost == 0),
		count(owned, "orphan_ranges", c.orphans, c.orphans == 0),
		count([]string{"storm"}, "kills", c.kills, c.kills >= minKills),
		count([]string{"storm"}, "partitions", c.partitions, c.partitions >= minPartitions),
		millis(quiet, "handover_p50_ms", percentile(c.took, 0.5), len(c.took) > 0),
		millis(quiet, "handover_p99_ms", p99, len(c.took) > 0 && p99 <= maxHandover),
		{"skew_max", []string{"balance"}, fmt.Sprintf("%.2f", c.skew), c.skew >= 1 && c.skew <= maxSkew},
		millis([]string{"failover"}, "failover_p99_ms", failover, len(c.failovers) > 0 && failover <= maxFailover),
		count([]string{"explore"}, "states_explored", c.explored, c.explored > 0),
		count([]string{"adoption"}, "adoptions", c.adoptions, c.adoptions >= minAdoptions),
		count([]string{"restore"}, "restores", c.restores, c.restores >= minRestores),
		count([]string{"adoption"}, "outside_writes", c.outside, c.outside == 0),
	}
}

// undisturbed says whether nothing is broken in a part.
func undisturbed(part string) bool {
	return slices.Contains([]string{"scale", "canary", "restart"}, part)
}
