package decide

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

const (
	// leastSample is the least number of requests, or writes, that an analysis evaluates.
	leastSample = 50
	// leastTrial is how long a shard is analyzed at least: agents report counts every ten
	// seconds, each at a time of its own.
	leastTrial = 30 * time.Second
	// settling is how long the leader of a shard works before it is compared with other shards: a
	// new leader may write all of its objects once.
	settling = 30 * time.Second
)

// counts are what agents have counted of a pod, or of a shard.
type counts struct {
	requests, errors, conflicts, writes uint64
	answered, micros                    uint64 // micros is the latency of the answered requests, in total
}

func (c counts) plus(d counts) counts {
	return counts{c.requests + d.requests, c.errors + d.errors, c.conflicts + d.conflicts, c.writes + d.writes, c.answered + d.answered, c.micros + d.micros}
}

// since returns what was counted after before.
func (c counts) since(before counts) counts {
	return counts{c.requests - before.requests, c.errors - before.errors, c.conflicts - before.conflicts, c.writes - before.writes, c.answered - before.answered, c.micros - before.micros}
}

// restarted reports whether an agent that had counted before has started anew. Its first counts may
// exceed some of those before.
func (c counts) restarted(before counts) bool {
	return c.requests < before.requests || c.errors < before.errors || c.conflicts < before.conflicts ||
		c.writes < before.writes || c.answered < before.answered || c.micros < before.micros
}

// latency returns the mean latency of the answered requests; 0 if they are too few.
func (c counts) latency() time.Duration {
	if c.answered < leastSample {
		return 0
	}
	return time.Duration(c.micros/c.answered) * time.Microsecond
}

// trial is the analysis of one shard.
type trial struct {
	revision, shard string
	// Counts of the pods, by uid: when the shard began to soak, once it had settled, and as they
	// were reported last.
	begun, settled, last snapshot
}

// newTrial returns a trial that begins now. Without an analysis, counted is nil.
func newTrial(revision, shard string, counted snapshot) trial {
	return trial{revision, shard, maps.Clone(counted), snapshot{}, maps.Clone(counted)}
}

// snapshot are counts of pods, by uid.
type snapshot map[string]counts

// add adds the counts of pods that it lacks.
func (s snapshot) add(now snapshot) {
	for uid, c := range now {
		if _, ok := s[uid]; !ok {
			s[uid] = c
		}
	}
}

// since returns what was counted after s, by shard.
func (s snapshot) since(now snapshot, members map[string]handover.Member) map[string]counts {
	out := map[string]counts{}
	for uid, c := range now {
		of := members[uid].Shard
		out[of] = out[of].plus(c.since(s[uid]))
	}
	return out
}

// compares reports whether an analysis compares a shard with the others.
func compares(spec *v1alpha1.RolloutAnalysis) bool {
	return spec.MaxWritesRatio != nil || spec.MaxLatencyRatio != nil
}

// duration returns how long an analysis takes at least.
func duration(spec *v1alpha1.RolloutAnalysis) time.Duration {
	if compares(spec) {
		return settling + leastTrial
	}
	return leastTrial
}

// tries reports whether the analysis of a shard goes on. It begins anew with another manager, if
// there was no analysis before, and after an agent has restarted, which does not know what pods did
// before.
func (d *deciding) tries(shard string, now snapshot) bool {
	t := d.memory.trial
	return t.begun != nil && t.revision == d.v.Revision.Update && t.shard == shard &&
		!collect.Any(now, func(uid string, c counts) bool { return c.restarted(t.last[uid]) })
}

// counted returns what agents have counted of each member on which they have reported, by uid.
func (d *deciding) counted() snapshot {
	out := snapshot{}
	for uid, m := range d.next.Members {
		if d.v.exists(m) && d.v.observe(m.Node, uid).Reported {
			out[uid] = d.v.countsOf(m)
		}
	}
	return out
}

// analyze returns why a shard that has soaked for a time must not be followed by others; empty if
// nothing is wrong so far. It is compared with other shards once it has settled, and agents have
// reported on all of them.
func (d *deciding) analyze(spec *v1alpha1.RolloutAnalysis, shard string, now snapshot, served time.Duration) string {
	t := &d.memory.trial
	t.begun.add(now)
	maps.Copy(t.last, now)
	if why := exceeded(spec, t.begun.since(now, d.next.Members)[shard]); why != "" || !compares(spec) || served < settling {
		return why
	}
	t.settled.add(now)
	if served < duration(spec) || !d.v.reported(d.next.Members) {
		return ""
	}
	sums := t.settled.since(now, d.next.Members)
	return cmp.Or(writesTooMuch(spec, shard, sums, d.sizes()), answeredTooLate(spec, shard, sums))
}

// countsOf returns what agents have counted of a member.
func (v *view) countsOf(m handover.Member) counts {
	o := v.observe(m.Node, m.UID).Outcomes
	return counts{
		requests: o.Requests, errors: o.Errors, conflicts: o.Conflicts, writes: o.Writes,
		answered: o.Answered, micros: o.LatencyMicros,
	}
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
