package main

import (
	"fmt"
	"slices"
	"strconv"
	"time"
)

// How much of everything a whole run does.
const (
	wantStarts    = 200
	wantKills     = 50
	wantUpgrades  = 10
	wantHookLoss  = 20
	maxRecovery   = 5 * time.Second         // of the last of an agent's members, from its return: by address, a Service comes back too
	maxDirect     = 2500 * time.Millisecond // until members that fail open go direct
	maxRepair     = 5 * time.Second         // of a lost redirection
	recoveryShare = 0.99
)

// ways of capture, by the names of the annotation.
var ways = []string{"ebpf", "iptables", "address"}

// captureCounts are those of suite capture.
type captureCounts struct {
	modes      []string // ways by which members were captured, by their status
	starts     int      // pods whose first instruction was a request that was answered
	leaked     int      // requests of members under Closed that went around the mesh
	kills      int
	unsharded  int // requests or answers of members under Closed while agents died that were not their shard's
	recoveries []time.Duration
	upgrades   int
	failed     int // requests during upgrades
	relists    int // of informers during upgrades
	losses     int
	repaired   int
	openDirect string
	looked     bool     // for what is left
	left       []string // on the nodes and in the cluster, after the mesh was removed
	held, of   int      // attacks
}

// captured notes a way of capture that works.
func (r *captureCounts) captured(way string) {
	if !slices.Contains(r.modes, way) {
		r.modes = append(r.modes, way)
	}
}

func (r *captureCounts) fields() []field {
	p99 := percentile(r.recoveries, recoveryShare)
	modes := number("starts", "modes", len(r.modes), len(ways))
	modes.parts = append(modes.parts, "kills", "upgrades", "losses", "failures", "hostile", "cleanup") // wherever members are
	leaked := number("starts", "leaked", r.leaked, 0)
	leaked.parts = append(leaked.parts, "upgrades", "losses", "failures")
	left := number("cleanup", "cleanup_left", len(r.left), 0)
	if !r.looked {
		left.value, left.holds = "unknown", false
	}
	return []field{
		modes,
		number("starts", "starts", r.starts, wantStarts),
		leaked,
		number("kills", "agent_kills", r.kills, wantKills),
		number("kills", "unsharded", r.unsharded, 0),
		{"recover_p99_ms", []string{"kills"}, strconv.FormatInt(p99.Milliseconds(), 10), len(r.recoveries) > 0 && p99 <= maxRecovery},
		number("upgrades", "upgrades", r.upgrades, wantUpgrades),
		number("upgrades", "failed", r.failed, 0),
		number("upgrades", "relists", r.relists, 0),
		number("losses", "hook_losses", r.losses, wantHookLoss),
		number("losses", "repaired", r.repaired, wantHookLoss),
		{"open_direct", []string{"kills"}, r.openDirect, r.openDirect == "ok"},
		left,
		{"hostile", []string{"hostile"}, fmt.Sprintf("%d/%d", r.held, r.of), r.of > 0 && r.held == r.of},
	}
}
