package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
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

// result is what a run has counted.
type result struct {
	ran    []string // the parts
	doubts []string // what spoils the result and is in no count

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

func (r *result) doubt(format string, args ...any) {
	r.doubts = append(r.doubts, fmt.Sprintf(format, args...))
}

// captured notes a way of capture that works.
func (r *result) captured(way string) {
	if !slices.Contains(r.modes, way) {
		r.modes = append(r.modes, way)
	}
}

// field is one count of the last line.
type field struct {
	name  string
	parts []string // that take it
	value string
	holds bool
}

func (r *result) fields() []field {
	number := func(part, name string, got, want int) field {
		return field{name, []string{part}, strconv.Itoa(got), got == want}
	}
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

// taken says whether a part that takes the count has run.
func (r *result) taken(f field) bool {
	return slices.ContainsFunc(f.parts, func(part string) bool { return slices.Contains(r.ran, part) })
}

// line is the last line. A count that no part took is "-".
func (r *result) line(suite string) string {
	out := []string{suite + ":"}
	for _, f := range r.fields() {
		if !r.taken(f) {
			f.value = "-"
		}
		out = append(out, f.name+"="+f.value)
	}
	return strings.Join(out, " ")
}

// wrong says what keeps the result from being good: of all parts that ran.
func (r *result) wrong(suite string) []string {
	out := slices.Clone(r.doubts)
	for _, f := range r.fields() {
		if r.taken(f) && !f.holds {
			out = append(out, f.name+"="+f.value)
		}
	}
	for _, what := range r.left {
		out = append(out, "left: "+what)
	}
	if len(r.ran) == 0 {
		out = append(out, "no part of "+suite+" ran")
	}
	return out
}

// percentile of some times, by the nearest rank; 0 without any.
func percentile(all []time.Duration, share float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	all = slices.Sorted(slices.Values(all))
	rank := int(share*float64(len(all)) + 0.999999)
	return all[min(max(rank, 1), len(all))-1]
}

// doubtErr notes what went wrong in a part, if anything did.
func (r *result) doubtErr(part string, err error) {
	if err != nil {
		r.doubt("%s: %v", part, err)
	}
}
