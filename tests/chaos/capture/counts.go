package capture

import (
	"fmt"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/reviews"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// The minimum work of a full run, and its bounds.
const (
	wantStarts    = 200
	wantKills     = 50
	wantUpgrades  = 10
	wantLosses    = 24
	minReviews    = 10_000
	maxRecovery   = 5 * time.Second         // of the slowest member, since its agent restarted: in mode address, a Service is restored too
	maxDirect     = 2500 * time.Millisecond // until members that fail open bypass the mesh
	maxRepair     = 5 * time.Second         // of a lost redirection
	recoveryShare = 0.99
)

// counts are the counts of the suite.
type counts struct {
	modes      []string // capture modes of members, by the status of their configuration
	starts     int      // pods whose first instruction was a request that succeeded
	leaked     int      // requests of members under Closed that bypassed the mesh
	kills      int
	unsharded  int // requests and responses outside the shard, of members under Closed while agents were killed
	recoveries []time.Duration
	upgrades   int
	failed     int // requests during upgrades
	relists    int // of informers during upgrades
	losses     int
	repaired   int
	openDirect string
	left       []string // on the nodes and in the cluster after the mesh was removed; nil if unknown
	hostile
	reviewed reviews.Verdict
}

// hostile counts attacks.
type hostile struct {
	attacks  int
	repelled int // attacks that failed
	// Those among them of tenants, who write what the users of a namespace may.
	tenants, tenantsRepelled int
}

// captured counts a capture mode that works.
func (c *counts) captured(mode string) {
	if !slices.Contains(c.modes, mode) {
		c.modes = append(c.modes, mode)
	}
}

func (c *counts) list() []harness.Count {
	p99 := stats.Percentile(c.recoveries, recoveryShare)
	left := harness.Exactly("cleanup_left", len(c.left), 0, "cleanup")
	if c.left == nil {
		left.Value, left.OK = "unknown", false
	}
	for _, remnant := range c.left {
		left.Details = append(left.Details, "left: "+remnant)
	}
	failedReviews := harness.Exactly("failed", c.reviewed.Failed, 0, "reviews")
	for _, finding := range c.reviewed.Findings {
		failedReviews.Details = append(failedReviews.Details, "reviews: "+finding)
	}
	return []harness.Count{
		harness.Exactly("modes", len(c.modes), len(fleet.Modes), "starts", "kills", "upgrades", "losses", "failures", "hostile", "cleanup"),
		harness.Exactly("starts", c.starts, wantStarts, "starts"),
		harness.Exactly("leaked", c.leaked, 0, "starts", "upgrades", "losses", "failures"),
		harness.Exactly("agent_kills", c.kills, wantKills, "kills"),
		harness.Exactly("unsharded", c.unsharded, 0, "kills"),
		harness.Milliseconds("recover_p99_ms", p99, len(c.recoveries) > 0 && p99 <= maxRecovery, "kills"),
		harness.Exactly("upgrades", c.upgrades, wantUpgrades, "upgrades"),
		harness.Exactly("failed", c.failed, 0, "upgrades"),
		harness.Exactly("relists", c.relists, 0, "upgrades"),
		harness.Exactly("hook_losses", c.losses, wantLosses, "losses"),
		harness.Exactly("repaired", c.repaired, wantLosses, "losses"),
		harness.Text("open_direct", c.openDirect, c.openDirect == "ok", "kills"),
		left,
		harness.Text("hostile", fmt.Sprintf("%d/%d", c.repelled, c.attacks), c.attacks > 0 && c.repelled == c.attacks, "hostile"),
		harness.Text("tenants", fmt.Sprintf("%d/%d", c.tenantsRepelled, c.tenants), c.tenants > 0 && c.tenantsRepelled == c.tenants, "hostile"),
		harness.Number("reviews", c.reviewed.Reviews, c.reviewed.Reviews >= minReviews, "reviews"),
		harness.Exactly("misrouted", c.reviewed.Misrouted, 0, "reviews"),
		failedReviews, // its name is that of the count of part upgrades, which comes before
	}
}
