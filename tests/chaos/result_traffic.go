package main

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

const trafficSuite = "traffic"

// What an agent may hold more in the end than at the start.
const (
	maxGoroutines = 5    // of requests that happen to be under way in all readings
	maxSockets    = 5    // of their connections
	maxRSS        = 16e6 // of about 57 MB: runs differ by -0.5 to 4.3 MB, by how much garbage the collector last left
)

// trafficCounts are those of suite traffic.
type trafficCounts struct {
	injected  map[string]int // by kind
	restarts  int            // of the operator's processes that lost their locks
	limited   map[string]int // by CircuitBreaker
	converged int            // objects, of so many
	objects   int
	took      time.Duration // to converge
	more      holding       // than at the start: the most of all comparisons
	compares  int
	panics    map[types.UID]int // and crashes, by agent
	handovers int               // of agents, under faults and under rules
	asked     int               // requests to other hosts
	leaked    int               // of those that came to a host that was denied then
	refused   int               // of those to a host that was allowed
	denied    int               // of those to a host that was denied, as they should be
}

// compared notes what agents held more than at the start.
func (c *trafficCounts) compared(more holding) {
	if c.compares++; c.compares > 1 {
		more = more.most(c.more)
	}
	c.more = more
}

// inject notes injected faults, by kind.
func (c *trafficCounts) inject(by map[string]int) {
	if c.injected == nil {
		c.injected = map[string]int{}
	}
	for kind, n := range by {
		c.injected[kind] += n
	}
}

// met counts the kinds of faults that there were.
func (c *trafficCounts) met() (n int) {
	for _, kind := range faultKinds {
		if c.injected[kind] > 0 {
			n++
		}
	}
	return n
}

// fields has what judges of operators counted beside.
func (c *trafficCounts) fields(o *shardingCounts) []field {
	sum := func(of map[string]int) (n int) {
		for _, of := range of {
			n += of
		}
		return n
	}
	panics := 0
	for _, n := range c.panics {
		panics += n
	}
	faults, kinds := sum(c.injected), c.met()
	refusing := !slices.ContainsFunc(limiting, func(name string) bool { return c.limited[name] == 0 })
	under, all := []string{"faults"}, []string{"faults", "egress"}
	count := func(parts []string, name string, n int, holds bool) field {
		return field{name, parts, strconv.Itoa(n), holds}
	}
	whole := c.compares > 0
	return []field{
		count(under, "faults", faults, faults > 0),
		{"converged", under, fmt.Sprintf("%d/%d", c.converged, c.objects), c.objects > 0 && c.converged == c.objects},
		{"goroutines_delta", all, fmt.Sprintf("%.0f", c.more.goroutines), whole && c.more.goroutines <= maxGoroutines},
		{"rss_delta_mb", all, fmt.Sprintf("%.1f", c.more.bytes/1e6), whole && c.more.bytes <= maxRSS},
		{"descriptors_delta", all, fmt.Sprintf("%.0f", c.more.sockets), whole && c.more.sockets <= maxSockets},
		{"kinds", under, fmt.Sprintf("%d/%d", kinds, len(faultKinds)), kinds == len(faultKinds)},
		{"converged_ms", under, strconv.FormatInt(c.took.Milliseconds(), 10), c.took > 0},
		number("faults", "double_writes", o.doubleWrites, 0),
		number("faults", "lost_objects", o.lost, 0),
		count(under, "locks_lost", c.restarts, c.restarts > 0),
		count(under, "limited", sum(c.limited), refusing),
		count(all, "agent_handovers", c.handovers, c.handovers > 0),
		count([]string{"egress"}, "egress_asked", c.asked, c.asked > 0),
		count([]string{"egress"}, "egress_denied", c.denied, c.denied > 0),
		number("egress", "egress_leaked", c.leaked, 0),
		number("egress", "egress_refused", c.refused, 0),
		{"panics", all, strconv.Itoa(panics), panics == 0 && len(c.panics) > 0},
	}
}
