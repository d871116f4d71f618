package layout

import (
	"maps"
	"math"
	"slices"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// line is the list of keys that automatic shards divide, sorted by hash, with their
// weights. A cut is the number of keys before it; n runs of keys have n-1 cuts between
// them, ascending.
type line struct {
	hashes  []uint64
	before  []int64 // before[k] is the weight of the first k keys
	weighed bool    // otherwise each key weighs one: too few keys exist, or all weights are 0
}

// pieces is the number of keys per shard that represent the key space if too few exist.
const pieces = 64

// newLine returns a line of the existing keys that are not taken. If there are fewer than
// n, it returns keys spread evenly over the key space.
func newLine(w Weights, taken sharding.Scope, n int) line {
	weights := make(map[uint64]int64, len(w))
	total := int64(0)
	for key, weight := range w {
		if h := sharding.Hash(key); !taken.OwnsHash(h) {
			weights[h] += max(weight, 0)
			total += max(weight, 0)
		}
	}
	enough := len(weights) >= n
	l := line{weighed: enough && total > 0}
	if !enough {
		clear(weights)
		step := math.MaxUint64/uint64(n*pieces) + 1
		for i := range uint64(n * pieces) {
			weights[i*step+step/2] = 1
		}
	}
	l.before = []int64{0}
	l.hashes = slices.Sorted(maps.Keys(weights))
	for _, h := range l.hashes {
		weight := weights[h]
		if !l.weighed {
			weight = 1
		}
		l.before = append(l.before, l.before[len(l.before)-1]+weight)
	}
	return l
}

func (l line) keys() int    { return len(l.hashes) }
func (l line) total() int64 { return l.before[l.keys()] }

// weight returns the weight of the keys from one cut to another.
func (l line) weight(from, to int) int64 { return l.before[to] - l.before[from] }

// run returns the weight of the i-th run between cuts.
func (l line) run(cuts []int, i int) int64 {
	return l.weight(l.ends(cuts, i))
}

// ends returns the cuts at which the i-th run begins and ends.
func (l line) ends(cuts []int, i int) (from, to int) {
	from, to = 0, l.keys()
	if i > 0 {
		from = cuts[i-1]
	}
	if i < len(cuts) {
		to = cuts[i]
	}
	return from, to
}

// heaviest returns the weight of the heaviest run.
func (l line) heaviest(cuts []int) int64 {
	most := int64(0)
	for i := range len(cuts) + 1 {
		most = max(most, l.run(cuts, i))
	}
	return most
}

// at returns the last cut with at most the given weight before it.
func (l line) at(weight int64) int {
	i, _ := slices.BinarySearch(l.before, weight+1)
	return max(i-1, 0)
}

// fits returns the leftmost and rightmost position of each cut such that each of n runs can
// have a key and weigh at most most. ok is false if that is impossible.
func (l line) fits(n int, most int64) (first, last []int, ok bool) {
	first, last = make([]int, n-1), make([]int, n-1)
	end := 0
	for i := range last {
		end = min(l.at(l.before[end]+most), l.keys()-(n-1-i))
		last[i] = end
	}
	if l.weight(end, l.keys()) > most {
		return nil, nil, false
	}
	start := l.keys()
	for i := n - 2; i >= 0; i-- {
		k, _ := slices.BinarySearch(l.before, l.before[start]-most)
		start = max(k, i+1)
		first[i] = start
	}
	return first, last, true
}

// lightest returns the minimum weight that the heaviest of n runs can have.
func (l line) lightest(n int) int64 {
	low, high := l.total()/int64(n), l.total()
	for low < high {
		mid := low + (high-low)/2
		if _, _, feasible := l.fits(n, mid); feasible {
			high = mid
		} else {
			low = mid + 1
		}
	}
	return low
}

// cut divides the line into n runs that weigh at most most, which must be feasible. Each
// cut is as near as possible to the position that wish returns, given the previous cut.
func (l line) cut(n int, most int64, wish func(i, before int) int) []int {
	first, last, _ := l.fits(n, most)
	cuts := make([]int, n-1)
	before := 0
	for i := range cuts {
		low := max(first[i], before+1)
		high := min(last[i], l.at(l.before[before]+most))
		cuts[i] = min(max(wish(i, before), low), high)
		before = cuts[i]
	}
	return cuts
}

// evenly returns a wish for runs of equal weight: it divides the remaining weight by the
// number of remaining runs.
func (l line) evenly(n int) func(i, before int) int {
	return func(i, before int) int {
		return l.nearest(l.before[before] + l.weight(before, l.keys())/int64(n-i))
	}
}

// nearest returns the cut for which the weight before it is nearest to the given weight.
func (l line) nearest(weight int64) int {
	k := l.at(weight)
	if k < l.keys() && l.before[k+1]-weight < weight-l.before[k] {
		k++
	}
	return k
}

// index returns the cut at the hash with which a range begins.
func (l line) index(first uint64) int {
	k, _ := slices.BinarySearch(l.hashes, first)
	return k
}

// bound returns the hash at a cut, midway between its neighbours.
func (l line) bound(k int) uint64 {
	a, b := l.hashes[k-1], l.hashes[k]
	return a + (b-a)/2 + (b-a)%2
}

// populated reports whether every run has a key.
func (l line) populated(cuts []int) bool {
	before := 0
	for _, k := range append(slices.Clone(cuts), l.keys()) {
		if k <= before {
			return false
		}
		before = k
	}
	return true
}

// round returns the cuts moved towards aim, each by at most the weight most or by one key, so
// that every run that had a key keeps one. Each cut stays between its position and its aim, so
// that the next round has the same aim.
func (l line) round(cuts, aim []int, most int64) []int {
	next := slices.Clone(cuts)
	// Of neighbours that go the same way, the one ahead makes room first.
	for i, k := range cuts {
		if aim[i] < k {
			low := 1
			if i > 0 {
				low = next[i-1] + 1
			}
			first, _ := slices.BinarySearch(l.before, l.before[k]-most)
			next[i] = min(k, max(aim[i], low, min(first, k-1)))
		}
	}
	for i, k := range slices.Backward(cuts) {
		if aim[i] > k {
			high := l.keys() - 1
			if i+1 < len(next) {
				high = next[i+1] - 1
			}
			next[i] = max(k, min(aim[i], high, max(l.at(l.before[k]+most), k+1)))
		}
	}
	return next
}
