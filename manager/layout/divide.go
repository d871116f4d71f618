package layout

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Weights are the numbers of objects by key: by namespace, 1 for each cluster, or empty for key
// Object.
type Weights map[string]int64

const (
	// Threshold is the skew above which a correction begins.
	Threshold = 1.25
	// Hysteresis is the skew at which a correction that has begun ends.
	Hysteresis = 1.10
	// goal is the skew that a move of keys should reach.
	goal = 1.05
	// step is the part of a shard's mean weight that crosses one bound in a round.
	step = 0.25
	// maxNamed bounds the pairs of shards that a message names.
	maxNamed = 4
)

// run is a part of the key space up to the next run, without the keys that are pinned. Each
// automatic shard has one.
type run struct {
	shard string
	first uint64 // 0 for the first run
}

// First returns the first scopes of the shards of a root. They are disjoint and complete, and
// every shard has at least one of the existing keys if there are enough.
func First(root *v1alpha1.RootConfig, w Weights) map[string]sharding.Scope {
	names := normals(root)
	if len(names) == 0 {
		return nil
	}
	l := newLine(w, takenBy(root), len(names))
	return scopes(root, l.runs(names, l.cut(len(names), l.lightest(len(names)), l.evenly(len(names))), nil))
}

// Next returns the scopes of the shards of a root, given the last ones. As few keys move as
// possible: a canary that grows takes only its own keys, and one that shrinks returns them to the
// surrounding shard. Skew alone moves no keys. When the number of shards changes, new shards take
// keys from the heaviest, removed ones give theirs to their neighbours, and more keys move only
// to even the weights.
func Next(root *v1alpha1.RootConfig, last map[string]sharding.Scope, w Weights) map[string]sharding.Scope {
	names := normals(root)
	was := runsOf(names, last)
	switch {
	case len(was) == 0:
		return First(root, w)
	case len(was) == len(names) && !gone(root, names, last):
		return scopes(root, was)
	}
	l := newLine(w, takenBy(root), len(names))
	order, wishes := l.join(was, names, last)
	wish := func(i, before int) int {
		return min(max(l.evenly(len(order))(i, before), wishes[i].low), wishes[i].high)
	}
	return scopes(root, l.runs(order, l.cut(len(order), l.even(len(order)), wish), was))
}

// Pace says when Balance moves keys, and how many at once.
type Pace struct {
	// Above is the skew above which keys move: Threshold, or Hysteresis to finish
	// a correction that has begun.
	Above float64
	// AtOnce moves all keys in one round, because each round restarts pods.
	// Otherwise at most a quarter of a shard's mean weight crosses each bound.
	AtOnce bool
}

// Balance returns the scopes after one round of handovers towards even weights. It returns last
// if the skew is not above pace.Above. what describes the moves. The rounds terminate: while the
// weights do not change, each gets nearer to the same division.
func Balance(root *v1alpha1.RootConfig, last map[string]sharding.Scope, w Weights, pace Pace) (next map[string]sharding.Scope, what string) {
	next = Next(root, last, w)
	runs := runsOf(normals(root), next)
	n := len(runs)
	if n < 2 {
		return next, ""
	}
	l := newLine(w, takenBy(root), n)
	if !l.weighed {
		return next, ""
	}
	cuts := l.cuts(runs)
	most := l.even(n)
	mean := float64(l.total()) / float64(n)
	// If even weights are impossible, a small improvement is not worth a handover.
	bearable := max(pace.Above*mean, float64(most))
	if float64(most) > pace.Above*mean {
		bearable = float64(most) * goal
	}
	if float64(l.heaviest(cuts)) <= bearable && l.populated(cuts) {
		return next, ""
	}
	aim := l.cut(n, most, func(i, _ int) int { return cuts[i] })
	limit := int64(step * mean)
	if pace.AtOnce {
		limit = l.total()
	}
	after := l.round(cuts, aim, limit)
	if slices.Equal(after, cuts) {
		return next, ""
	}
	what = l.moves(runs, cuts, after)
	for i, k := range after {
		if k != cuts[i] {
			runs[i+1].first = l.bound(k)
		}
	}
	return scopes(root, runs), what
}

// moves describes which keys move between shards when cuts move.
func (l line) moves(runs []run, before, after []int) string {
	keys, weight := 0, int64(0)
	var pairs []string
	for i, k := range after {
		low, high := min(before[i], k), max(before[i], k)
		from, to := runs[i+1].shard, runs[i].shard
		switch {
		case low == high:
			continue
		case k < before[i]:
			from, to = to, from
		}
		keys += high - low
		weight += l.weight(low, high)
		pairs = append(pairs, fmt.Sprintf("from %s to %s", from, to))
	}
	if more := len(pairs) - maxNamed; more > 0 {
		pairs = append(pairs[:maxNamed], fmt.Sprintf("and between %d more pairs", more))
	}
	return fmt.Sprintf("%d of %d namespaces, with %d of %d objects, go %s; the heaviest shard has %d then, of a mean of %d (now %d)",
		keys, l.keys(), weight, l.total(), strings.Join(pairs, ", "), l.heaviest(after), l.total()/int64(len(runs)), l.heaviest(before))
}

// Skew is the weight of the heaviest automatic shard over the mean; 1 when there
// is nothing to weigh.
func Skew(owned map[string]sharding.Scope, root *v1alpha1.RootConfig, w Weights) float64 {
	names := normals(root)
	weights := make([]int64, len(names))
	total := int64(0)
	for key, weight := range w {
		h := sharding.Hash(key)
		for i, name := range names {
			if owned[name].OwnsHash(h) {
				weights[i] += max(weight, 0)
				total += max(weight, 0)
				break
			}
		}
	}
	if total == 0 {
		return 1
	}
	return float64(slices.Max(weights)) * float64(len(names)) / float64(total)
}

// normals returns the names of the shards that divide the keys without a pinned shard.
func normals(root *v1alpha1.RootConfig) []string {
	shards := collect.Filter(Shards(root), func(s Shard) bool { return !s.Pinned })
	return collect.Map(shards, func(s Shard) string { return s.Name })
}

// gone reports whether a shard that owned keys last, and was not pinned, no longer exists.
func gone(root *v1alpha1.RootConfig, names []string, last map[string]sharding.Scope) bool {
	exist := Shards(root)
	return collect.Any(last, func(name string, s sharding.Scope) bool {
		pinned := slices.ContainsFunc(exist, func(s Shard) bool { return s.Pinned && s.Name == name })
		return !pinned && name != canaryName(root) && !s.Empty() && !slices.Contains(names, name)
	})
}

// Repinned reports whether other keys are pinned to the shards of a root than last, as after a
// namespace got other labels.
func Repinned(root *v1alpha1.RootConfig, last map[string]sharding.Scope) bool {
	now := scopes(root, runsOf(normals(root), last))
	return collect.Any(now, func(name string, s sharding.Scope) bool { return !s.Equal(last[name]) })
}

// scopes returns what the pinned shards and the runs of the others own.
func scopes(root *v1alpha1.RootConfig, runs []run) map[string]sharding.Scope {
	out, taken := pinned(root)
	for i, r := range runs {
		whole := sharding.Range{First: r.first, Last: sharding.Whole.Last}
		if i+1 < len(runs) {
			whole.Last = runs[i+1].first - 1
		}
		out[r.shard] = sharding.Union(out[r.shard], sharding.Of(whole).Minus(taken))
	}
	return out
}

// runsOf finds the runs of the named shards in what they were to hold. What lies
// between two, a canary's keys or another shard's, is the first's. It finds none
// where shards are not in runs.
func runsOf(names []string, last map[string]sharding.Scope) []run {
	type interval struct {
		shard string
		sharding.Range
	}
	var hulls []interval
	for _, name := range names {
		if hull, ok := last[name].WithoutPoints().Hull(); ok {
			hulls = append(hulls, interval{name, hull})
		}
	}
	slices.SortFunc(hulls, func(a, b interval) int { return cmp.Compare(a.First, b.First) })
	var runs []run
	for i, h := range hulls {
		if i == 0 {
			h.First = 0
		} else if h.First <= hulls[i-1].Last {
			return nil
		}
		runs = append(runs, run{h.shard, h.First})
	}
	return runs
}

// cuts are the cuts that runs make.
func (l line) cuts(runs []run) []int {
	out := make([]int, len(runs)-1)
	for i := range out {
		out[i] = l.index(runs[i+1].first)
	}
	return out
}

// runs are those of the named shards between cuts. A bound of old that makes the
// same cut is kept.
func (l line) runs(names []string, cuts []int, old []run) []run {
	out := []run{{shard: names[0]}}
	for i, k := range cuts {
		r := run{names[i+1], l.bound(k)}
		for _, o := range old {
			if o.first > 0 && l.index(o.first) == k {
				r.first = o.first
			}
		}
		out = append(out, r)
	}
	return out
}

// even is the weight that no run must exceed if that can be: the goal over the
// mean, or else as little as can be.
func (l line) even(n int) int64 {
	return max(l.lightest(n), int64(goal*float64(l.total())/float64(n)))
}

// window is where a cut would move no more keys than need be.
type window struct{ low, high int }

// join is the order of runs when some of the named shards have none yet, or some
// that had are gone, and where the cuts between them would best be.
func (l line) join(was []run, names []string, last map[string]sharding.Scope) (order []string, wishes []window) {
	parts := make([]int, len(was))
	for i := range parts {
		parts[i] = 1
	}
	cuts := l.cuts(was)
	for range len(names) - len(was) {
		most := 0
		for i := range was {
			if l.run(cuts, i)*int64(parts[most]) > l.run(cuts, most)*int64(parts[i]) {
				most = i
			}
		}
		parts[most]++
	}
	fresh := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return slices.ContainsFunc(was, func(r run) bool { return r.shard == name })
	})
	for i, r := range was {
		// The new ones come on the side of the middle, where their neighbours on both
		// sides can make room for them.
		came := fresh[:parts[i]-1]
		fresh = fresh[len(came):]
		if i < (len(was)+1)/2 {
			order = append(append(order, r.shard), came...)
		} else {
			order = append(append(order, came...), r.shard)
		}
		from, to := l.ends(cuts, i)
		for p := 1; p < parts[i]; p++ {
			k := l.nearest(l.before[from] + l.weight(from, to)*int64(p)/int64(parts[i]))
			wishes = append(wishes, window{k, k})
		}
		if i < len(cuts) {
			hull, _ := last[r.shard].WithoutPoints().Hull()
			// What was between the two is nobody's, and may go to either.
			low := cuts[i]
			if hull.Last < sharding.Whole.Last {
				low = min(low, l.index(hull.Last+1))
			}
			wishes = append(wishes, window{low, cuts[i]})
		}
	}
	return order, wishes
}
