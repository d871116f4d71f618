package traffic

import (
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
)

// Bounds of what an agent may use more in the end than at the start.
const (
	maxGoroutines = 5    // of requests that are in flight in all readings
	maxSockets    = 5    // of their connections
	maxRSS        = 16e6 // of about 57 MB; garbage makes runs differ by -0.5 to 4.3 MB
)

// counts are the counts of the suite, in addition to those of its operator.
type counts struct {
	injected  map[string]int // faults by kind
	restarts  int            // of the operator's processes that lost their locks
	limited   map[string]int // requests by CircuitBreaker
	converged int            // objects, of so many
	objects   int
	took      time.Duration // to converge
	more      usage         // than at the start: the highest of all comparisons
	compares  int
	panics    map[types.UID]int // and crashes, by agent
	takeovers int               // of agents, under faults and under rules
	asked     int               // requests to other hosts
	leaked    int               // of those that arrived at a host while it was denied
	refused   int               // of those to a host that was allowed
	denied    int               // of those to a host that was denied, as they should be
}

// addComparison counts what agents used more than at the start.
func (c *counts) addComparison(more usage) {
	if c.compares++; c.compares > 1 {
		more = more.highest(c.more)
	}
	c.more = more
}

// addInjected counts injected faults by kind.
func (c *counts) addInjected(by map[string]int) {
	if c.injected == nil {
		c.injected = map[string]int{}
	}
	for kind, n := range by {
		c.injected[kind] += n
	}
}

// kinds returns how many kinds of faults were injected.
func (c *counts) kinds() (n int) {
	for _, kind := range faultKinds {
		if c.injected[kind] > 0 {
			n++
		}
	}
	return n
}

// list returns the counts with those of the operator.
func (c *counts) list(o *operator.Counts) []harness.Count {
	faults, kinds, limited, panics := sum(c.injected), c.kinds(), sum(c.limited), sum(c.panics)
	refusing := !slices.ContainsFunc(breakers, func(name string) bool { return c.limited[name] == 0 })
	compared := c.compares > 0
	return []harness.Count{
		harness.Number("faults", faults, faults > 0, "faults"),
		harness.Text("converged", fmt.Sprintf("%d/%d", c.converged, c.objects), c.objects > 0 && c.converged == c.objects, "faults"),
		harness.Text("goroutines_delta", fmt.Sprintf("%.0f", c.more.goroutines), compared && c.more.goroutines <= maxGoroutines, "faults", "egress"),
		harness.Text("rss_delta_mb", fmt.Sprintf("%.1f", c.more.bytes/1e6), compared && c.more.bytes <= maxRSS, "faults", "egress"),
		harness.Text("descriptors_delta", fmt.Sprintf("%.0f", c.more.sockets), compared && c.more.sockets <= maxSockets, "faults", "egress"),
		harness.Text("kinds", fmt.Sprintf("%d/%d", kinds, len(faultKinds)), kinds == len(faultKinds), "faults"),
		harness.Milliseconds("converged_ms", c.took, c.took > 0, "faults"),
		harness.Exactly("double_writes", o.DoubleWrites, 0, "faults"),
		harness.Exactly("lost_objects", o.Lost, 0, "faults"),
		harness.Number("locks_lost", c.restarts, c.restarts > 0, "faults"),
		harness.Number("limited", limited, refusing, "faults"),
		harness.Number("agent_handovers", c.takeovers, c.takeovers > 0, "faults", "egress"),
		harness.Number("egress_asked", c.asked, c.asked > 0, "egress"),
		harness.Number("egress_denied", c.denied, c.denied > 0, "egress"),
		harness.Exactly("egress_leaked", c.leaked, 0, "egress"),
		harness.Exactly("egress_refused", c.refused, 0, "egress"),
		harness.Number("panics", panics, panics == 0 && len(c.panics) > 0, "faults", "egress"),
	}
}

func sum[K comparable](counts map[K]int) (n int) {
	for _, count := range counts {
		n += count
	}
	return n
}
