package decide

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
)

const (
	// leastSample is the least number of requests, or writes, that an analysis judges.
	leastSample = 50
	// leastTrial is how long a shard is analyzed at least: agents report counts every ten
	// seconds, each at a time of its own.
	leastTrial = 30 * time.Second
)

// counts are what agents have counted of a pod, or of a shard.
type counts struct {
	requests, errors, conflicts, writes uint64
	answered, micros                    uint64 // micros is the latency of the answered requests, in total
}

func (c counts) plus(d counts) counts {
	return counts{c.requests + d.requests, c.errors + d.errors, c.conflicts + d.conflicts, c.writes + d.writes, c.answered + d.answered, c.micros + d.micros}
}

// since returns what was counted after before. Writes are counted for a time, and then anew.
func (c counts) since(before counts) counts {
	if c.writes < before.writes {
		before.writes = 0
	}
	return counts{c.requests - before.requests, c.errors - before.errors, c.conflicts - before.conflicts, c.writes - before.writes, c.answered - before.answered, c.micros - before.micros}
}

// restarted reports whether an agent that had counted before has started anew. Its first counts may
// exceed some of those before.
func (c counts) restarted(before counts) bool {
	return c.requests < before.requests || c.errors < before.errors || c.conflicts < before.conflicts || c.answered < before.answered || c.micros < before.micros
}

// latency returns the mean latency of the answered requests; 0 if they are too few.
func (c counts) latency() time.Duration {
	if c.answered < leastSample {
		return 0
	}
	return time.Duration(c.micros/c.answered) * time.Microsecond
}

// trial is what an analysis compares with: the counts of the pods, by uid, when a shard began to
// soak, and in the last round.
type trial struct {
	revision, shard string
	before, last    map[string]counts
}

// tries reports whether the analysis of a shard goes on. It begins anew with another leader, and
// after an agent has restarted, which does not know what pods did before.
func (d *deciding) tries(shard string, now map[string]counts) bool {
	t := d.memory.trial
	return t.revision == d.v.Revision.Update && t.shard == shard &&
		!collect.Any(now, func(uid string, c counts) bool { return c.restarted(t.last[uid]) })
}

// counted returns what agents have counted of each member on which they have reported, by uid.
func (d *deciding) counted() map[string]counts {
	out := map[string]counts{}
	for uid, m := range d.next.Members {
		if d.v.exists(m) && d.v.observe(m.Node, uid).Known {
			out[uid] = d.v.countsOf(m)
		}
	}
	return out
}

// analyze returns why a shard that has soaked for a time must not be followed by others; empty if
// nothing is wrong so far. It is compared with other shards once agents have reported on all of
// them.
func (d *deciding) analyze(spec *v1alpha1.RolloutAnalysis, shard string, now map[string]counts, served time.Duration) string {
	sums := map[string]counts{}
	before := maps.Clone(now) // of pods on which agents have just reported
	maps.Copy(before, d.memory.trial.before)
	d.memory.trial.before, d.memory.trial.last = before, now
	for uid, c := range now {
		of := d.next.Members[uid].Shard
		sums[of] = sums[of].plus(c.since(before[uid]))
	}
	if why := exceeded(spec, sums[shard]); why != "" || served < leastTrial || !d.v.reported(d.next.Members) {
		return why
	}
	return cmp.Or(writesTooMuch(spec, shard, sums, d.sizes()), answeredTooLate(spec, shard, sums))
}

// countsOf returns what agents have counted of a member. Only its writes of divided resources count.
func (v *view) countsOf(m handover.Member) (c counts) {
	o := v.observe(m.Node, m.UID)
	c = counts{
		requests: o.Outcomes.Requests, errors: o.Outcomes.Errors, conflicts: o.Outcomes.Conflicts,
		answered: o.Outcomes.Answered, micros: o.Outcomes.LatencyMicros,
	}
	for _, a := range o.Activity {
		if a.GetDivided() {
			c.writes += a.GetWrites()
		}
	}
	return c
}

// exceeded returns which bound of an analysis the requests of a shard exceed; empty if none.
func exceeded(spec *v1alpha1.RolloutAnalysis, c counts) string {
	for _, bound := range []struct {
		most *v1alpha1.Percent
		n    uint64
		what string
	}{{spec.MaxErrors, c.errors, "failed"}, {spec.MaxConflicts, c.conflicts, "met a conflict"}} {
		if bound.most == nil || c.requests < leastSample {
			continue
		}
		most, err := strconv.ParseFloat(string(*bound.most), 64)
		if percent := 100 * float64(bound.n) / float64(c.requests); err == nil && percent > most {
			return fmt.Sprintf("%d of %d requests (%.1f %%) %s, and %s %% may", bound.n, c.requests, percent, bound.what, *bound.most)
		}
	}
	return ""
}

// writesTooMuch returns why a shard writes too much, compared with the others; empty if it does not.
// sums are what the pods of the shards did meanwhile.
func writesTooMuch(spec *v1alpha1.RolloutAnalysis, shard string, sums map[string]counts, sizes map[string]size) string {
	c := sums[shard]
	if spec.MaxWritesRatio == nil || c.writes < leastSample {
		return ""
	}
	perObject := func(name string) float64 {
		return float64(max(1, sums[name].writes)) / float64(max(1, sizes[name].weight))
	}
	most, of := 0.0, ""
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		if rate := perObject(name); name != shard && rate > most {
			most, of = rate, name
		}
	}
	if of == "" || perObject(shard) <= float64(*spec.MaxWritesRatio)*most {
		return ""
	}
	return fmt.Sprintf("%d writes of %d objects, more than %d times as many for each as in shard %s: %d of %d",
		c.writes, sizes[shard].weight, *spec.MaxWritesRatio, of, sums[of].writes, sizes[of].weight)
}

// answeredTooLate returns why the requests of a shard take too long, compared with those of the
// others; empty if they do not, or if earlier agents do not report it.
func answeredTooLate(spec *v1alpha1.RolloutAnalysis, shard string, sums map[string]counts) string {
	if spec.MaxLatencyRatio == nil {
		return ""
	}
	most, of := time.Duration(0), ""
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		if latency := sums[name].latency(); name != shard && latency > most {
			most, of = latency, name
		}
	}
	latency := sums[shard].latency()
	if of == "" || latency <= time.Duration(*spec.MaxLatencyRatio)*most {
		return ""
	}
	return fmt.Sprintf("%d requests took %s on average, more than %d times as long as in shard %s: %s", sums[shard].answered, latency, *spec.MaxLatencyRatio, of, most)
}
