package sharding

import (
	"fmt"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// minHandovers is the minimum of each part. The sum is 200.
var minHandovers = map[string]int{"scale": 30, "canary": 120, "restart": 10, "storm": 40}

// undisturbed are the parts that break nothing.
var undisturbed = []string{"scale", "canary", "restart"}

// The minimum work of a full run, and its bounds.
const (
	minKills       = 20 // of operator pods, agents and managers
	minPartitions  = 4
	minRelabelled  = 50
	minTenantMoves = 200
	minEdits       = 200
	minAdoptions   = 100
	minRestores    = 20
	minShadowed    = 100
	minCutOff      = 5
	minWritten     = 1000             // in members
	maxHandover    = 30 * time.Second // the 99th percentile of the undisturbed parts
	maxSkew        = 1.25             // at rest, with a few dozen namespaces of very different weight
	maxFailover    = 5 * time.Second
)

// counts are the counts of the suite, in addition to those of its operators.
type counts struct {
	kills      int
	partitions int
	skew       float64
	failovers  []time.Duration
	explored   int
	relabelled int // moves of tenants from one subset to another
	moves      int // of tenants from one hand-written shard to another
	edits      int // of a root's spec
	adoptions  int // each with a removal
	rollouts   int // complete ones
	stopped    int // bad versions that halted
	rolledBack int
	escaped    int // readings that saw a bad version in another shard than the canary
	// Writes of a shadow that agreed, that did not although they should, and that took effect.
	shadowAgreed, shadowFalse, shadowPersisted int
	shadowFound                                int // planted differences
	outside                                    int // writes by pods outside the mesh of keys that a shard owned
	restores                                   int // of etcd
	// Other clusters that were cut off for a while, writes in them, and those by pods that did not own them.
	cutOff, clusterWrites, clusterDoubles int
}

// list returns the counts with those of the operators, after the given parts ran.
func (c *counts) list(o *operator.Counts, ran []string) []harness.Count {
	owned := []string{"scale", "canary", "restart", "storm", "subsets", "written", "edits", "rollout", "shadow", "balance", "failover", "adoption", "restore"}
	moving := append(slices.Clone(undisturbed), "storm")
	enough := 0
	for _, part := range ran {
		enough += minHandovers[part]
	}
	var took []time.Duration
	for _, part := range undisturbed {
		took = append(took, o.Took[part]...)
	}
	p50, p99, failover := stats.Percentile(took, 0.5), stats.Percentile(took, 0.99), stats.Percentile(c.failovers, 0.99)
	return []harness.Count{
		harness.Number("handovers", o.Handovers, o.Handovers >= enough, moving...),
		harness.Exactly("double_writes", o.DoubleWrites, 0, owned...),
		harness.Exactly("lost_objects", o.Lost, 0, owned...),
		harness.Exactly("orphan_ranges", o.Orphans, 0, owned...),
		harness.Number("kills", c.kills, c.kills >= minKills, "storm"),
		harness.Number("partitions", c.partitions, c.partitions >= minPartitions, "storm"),
		harness.Milliseconds("handover_p50_ms", p50, len(took) > 0, undisturbed...),
		harness.Milliseconds("handover_p99_ms", p99, len(took) > 0 && p99 <= maxHandover, undisturbed...),
		harness.Text("skew_max", fmt.Sprintf("%.2f", c.skew), c.skew >= 1 && c.skew <= maxSkew, "balance"),
		harness.Milliseconds("failover_p99_ms", failover, len(c.failovers) > 0 && failover <= maxFailover, "failover"),
		harness.Number("states_explored", c.explored, c.explored > 0, "explore"),
		harness.Number("subset_moves", c.relabelled, c.relabelled >= minRelabelled, "subsets"),
		harness.Number("written_moves", c.moves, c.moves >= minTenantMoves, "written"),
		harness.Number("edits", c.edits, c.edits >= minEdits, "edits"),
		harness.Number("rollouts", c.rollouts, c.rollouts >= 1, "rollout"),
		harness.Number("stopped_at_canary", c.stopped, c.stopped == len(badVersions), "rollout"),
		harness.Number("rolled_back", c.rolledBack, c.rolledBack == len(badVersions), "rollout"),
		harness.Exactly("escaped", c.escaped, 0, "rollout"),
		harness.Number("shadow_agreed", c.shadowAgreed, c.shadowAgreed >= minShadowed, "shadow"),
		harness.Exactly("shadow_false", c.shadowFalse, 0, "shadow"),
		harness.Exactly("shadow_found", c.shadowFound, 1, "shadow"),
		harness.Exactly("shadow_writes_persisted", c.shadowPersisted, 0, "shadow"),
		harness.Number("clusters_cut_off", c.cutOff, c.cutOff >= minCutOff, "clusters"),
		harness.Number("clusters_writes", c.clusterWrites, c.clusterWrites >= minWritten, "clusters"),
		harness.Exactly("clusters_double_writes", c.clusterDoubles, 0, "clusters"),
		harness.Number("adoptions", c.adoptions, c.adoptions >= minAdoptions, "adoption"),
		harness.Number("restores", c.restores, c.restores >= minRestores, "restore"),
		harness.Exactly("outside_writes", c.outside, 0, "adoption"),
	}
}
