package cost

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Costs are what operators cost the apiserver per second, over some time.
type Costs struct {
	Seconds float64 `json:"seconds"`
	// Shards are the costs of workloads, by shard.
	Shards []Cost `json:"shards"`
	// Resources are those of workloads, by resource; the greatest first.
	Resources []Cost `json:"resources"`
}

// Cost is what a workload costs, in one shard, or for one resource.
type Cost struct {
	Namespace string `json:"namespace"`
	Workload  string `json:"workload"`
	// Shard is empty for a resource, and for pods without one.
	Shard string `json:"shard,omitempty"`
	// Resource is empty for a shard. Subresources count with their resource.
	Resource string  `json:"resource,omitempty"`
	Requests float64 `json:"requestsPerSecond"`
	Writes   float64 `json:"writesPerSecond"`
	// Conflicts and Throttled are answers 409 and 429 per second.
	Conflicts float64 `json:"conflictsPerSecond"`
	Throttled float64 `json:"throttledPerSecond"`
	// Bytes are those of bodies of responses.
	Bytes float64 `json:"bytesPerSecond"`
	// InFlight is the mean number of requests that the apiserver works on at a time, without watches.
	InFlight float64 `json:"inFlight"`
	Watches  float64 `json:"watches"`
	// AddedSeconds is the mean time that a request of the shard spent in the proxy; nil if there was none.
	AddedSeconds *float64 `json:"addedSeconds,omitempty"`
}

// Between returns the costs between two readings, of the pods in a namespace; of all if it is empty. Agents count that
// are in both: the counts of others may be of any age.
func Between(before, after Reading, namespace string) Costs {
	seconds := max(after.At.Sub(before.At), time.Millisecond).Seconds()
	shards, resources := map[subject]count{}, map[subject]count{}
	for agent, counts := range after.Agents {
		earlier, known := before.Agents[agent]
		if !known {
			continue
		}
		for of, c := range counts {
			if namespace != "" && of.namespace != namespace {
				continue
			}
			c = c.since(earlier[of])
			shard := subject{namespace: of.namespace, workload: of.workload, shard: of.shard}
			shards[shard] = shards[shard].plus(c)
			if of.resource != "" {
				resource := subject{namespace: of.namespace, workload: of.workload, resource: of.resource}
				resources[resource] = resources[resource].plus(c)
			}
		}
	}
	out := Costs{Seconds: seconds, Shards: list(shards, seconds), Resources: list(resources, seconds)}
	slices.SortFunc(out.Shards, func(a, b Cost) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Workload, b.Workload), strings.Compare(a.Shard, b.Shard))
	})
	slices.SortFunc(out.Resources, func(a, b Cost) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(b.Watches, a.Watches), strings.Compare(a.Namespace, b.Namespace),
			strings.Compare(a.Workload, b.Workload), strings.Compare(a.Resource, b.Resource))
	})
	return out
}

func list(of map[subject]count, seconds float64) []Cost {
	out := []Cost{}
	for s, c := range of {
		cost := Cost{
			Namespace: s.namespace, Workload: s.workload, Shard: s.shard, Resource: s.resource,
			Requests: c.requests / seconds, Writes: c.writes / seconds, Conflicts: c.conflicts / seconds, Throttled: c.throttled / seconds,
			Bytes: c.bytes / seconds, InFlight: c.apiserver / seconds, Watches: c.watches,
		}
		if c.timed > 0 {
			cost.AddedSeconds = new(c.added / c.timed)
		}
		if s.resource == "" || c.requests > 0 || c.watches > 0 {
			out = append(out, cost)
		}
	}
	return out
}

// WriteText implements render.Report.
func (c Costs) WriteText(t *render.Text) {
	if len(c.Shards) == 0 {
		t.Line("no pod on the mesh has sent requests: label a pod template, delete labelled pods that are older than the mesh, or name another namespace by -n")
		return
	}
	t.Line("over %.0f s, per second:", c.Seconds)
	rows := collect.Map(c.Shards, func(s Cost) []string {
		return append([]string{s.Namespace, s.Workload, s.Shard}, append(s.rates(), s.Added())...)
	})
	t.Table([]string{"NAMESPACE", "WORKLOAD", "SHARD", "REQUESTS", "WRITES", "409", "429", "BYTES", "IN FLIGHT", "WATCHES", "ADDED"}, rows)
	rows = nil
	for _, r := range c.Resources {
		rows = append(rows, append([]string{r.Namespace, r.Workload, r.Resource}, r.rates()...))
	}
	t.Table([]string{"NAMESPACE", "WORKLOAD", "RESOURCE", "REQUESTS", "WRITES", "409", "429", "BYTES", "IN FLIGHT", "WATCHES"}, rows)
}

func (c Cost) rates() []string {
	return []string{Rate(c.Requests), Rate(c.Writes), Rate(c.Conflicts), Rate(c.Throttled), render.Size(c.Bytes), Rate(c.InFlight), fmt.Sprintf("%.0f", c.Watches)}
}

// Added returns the mean time in the proxy as text; empty if it is unknown.
func (c Cost) Added() string {
	if c.AddedSeconds == nil {
		return ""
	}
	return time.Duration(*c.AddedSeconds * float64(time.Second)).Round(time.Microsecond).String()
}

// Rate returns a number per second, or a mean, as text.
func Rate(n float64) string {
	switch {
	case n == 0:
		return "0"
	case n < 0.05:
		return "<0.1"
	}
	return fmt.Sprintf("%.1f", n)
}
