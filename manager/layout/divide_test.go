package layout

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

func auto(n int) *v1alpha1.RootConfig {
	return &v1alpha1.RootConfig{Prefix: "op", TargetStatefulSet: "op", Auto: &v1alpha1.AutoConfig{ShardingSize: int32(n), EveryShardReplicas: 1}}
}

func withCanary(root *v1alpha1.RootConfig, names []string, buckets ...int) *v1alpha1.RootConfig {
	one := int32(1)
	c := &v1alpha1.CanaryConfig{Replicas: &one, InNamespaces: names}
	for _, b := range buckets {
		c.InShardHash = append(c.InShardHash, strconv.Itoa(b))
	}
	root = root.DeepCopy()
	root.Canary = c
	return root
}

// whole checks that scopes are disjoint and complete, and one for each shard.
func whole(t require.TestingT, root *v1alpha1.RootConfig, scopes map[string]sharding.Scope) {
	var names []string
	for _, s := range Shards(root) {
		names = append(names, s.Name)
	}
	require.ElementsMatch(t, names, slices.Collect(maps.Keys(scopes)))
	var all sharding.Scope
	for name, s := range scopes {
		require.False(t, all.Overlaps(s), "%s overlaps", name)
		all = sharding.Union(all, s)
	}
	require.True(t, all.Everything(), "left out: %s", sharding.All().Minus(all))
}

// owners is which shard has each key.
func owners(t require.TestingT, scopes map[string]sharding.Scope, w Weights) map[string]string {
	out := map[string]string{}
	for key := range w {
		n := 0
		for name, s := range scopes {
			if s.Owns(key) {
				out[key] = name
				n++
			}
		}
		if n != 1 {
			require.Equal(t, 1, n, "owners of %s", key)
		}
	}
	return out
}

// moved is the weight that changed hands, of all.
func moved(t require.TestingT, a, b map[string]sharding.Scope, w Weights) float64 {
	was, is := owners(t, a, w), owners(t, b, w)
	var total, changed int64
	for key, weight := range w {
		total += weight
		if was[key] != is[key] {
			changed += weight
		}
	}
	return float64(changed) / float64(total)
}

// names are sets of similar names.
var names = map[string]func(i int) string{
	"tenant-0000":      func(i int) string { return fmt.Sprintf("tenant-%04d", i) },
	"ns-0":             func(i int) string { return fmt.Sprintf("ns-%d", i) },
	"0-prod":           func(i int) string { return fmt.Sprintf("%d-prod", i) },
	"a-very-long-name": func(i int) string { return fmt.Sprintf("a-very-long-name-of-a-team-in-a-region-%03d", i) },
}

// weights are uneven in several ways, of a thousand keys; none above 0.3 of the
// mean of five shards.
var weights = map[string]func(i int) int64{
	"equal":   func(int) int64 { return 50 },
	"zipf":    func(i int) int64 { return min(int64(20000/(i+1))+1, 8000) },
	"steps":   func(i int) int64 { return []int64{1, 10, 100, 1000}[i%4] },
	"crowd":   func(i int) int64 { return map[bool]int64{true: 900, false: 1}[i < 200] },
	"bursts":  func(i int) int64 { return int64(1 + i%97*(i%89)) },
	"uniform": func(i int) int64 { return int64(rand.New(rand.NewPCG(1, uint64(i))).IntN(1000)) },
}

func thousand(name func(int) string, weight func(int) int64) Weights {
	w := Weights{}
	for i := range 1000 {
		w[name(i)] = weight(i)
	}
	return w
}

func TestSimilarNamesWithUnevenWeightsAreDividedEvenly(t *testing.T) {
	for called, name := range names {
		for like, weight := range weights {
			w := thousand(name, weight)
			for _, root := range []*v1alpha1.RootConfig{auto(5), withCanary(auto(5), []string{name(3), name(700)}, 4, 9)} {
				first := First(root, w)
				whole(t, root, first)
				require.LessOrEqual(t, Skew(first, root, w), 1.10, "%s, %s", called, like)
			}
		}
	}
}

// The best division of few keys is found by trying all.
func TestTheHeaviestIsAsLightAsCanBe(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := Weights{}
		for i, weight := range rapid.SliceOfN(rapid.Int64Range(0, 20), 3, 9).Draw(t, "weights") {
			w[strconv.Itoa(i)] = weight
		}
		root := auto(rapid.IntRange(1, 3).Draw(t, "shards"))
		n := int(root.Auto.ShardingSize)
		l := newLine(w, sharding.Scope{}, n)
		best := int64(math.MaxInt64)
		var try func(cuts []int)
		try = func(cuts []int) {
			if len(cuts) == n-1 {
				if l.populated(cuts) {
					best = min(best, l.heaviest(cuts))
				}
				return
			}
			for k := range l.keys() {
				try(append(slices.Clone(cuts), k))
			}
		}
		try(nil)
		cuts := l.cut(n, l.lightest(n), l.evenly(n))
		require.True(t, l.populated(cuts), "%v", cuts)
		require.Equal(t, best, l.heaviest(cuts), "%v of %v", cuts, l.before)
	})
}

func TestNothingToWeigh(t *testing.T) {
	for n := 1; n <= MaxShards; n++ {
		root := auto(n)
		first := First(root, nil)
		whole(t, root, first)
		for name, s := range first {
			hull, ok := s.Hull()
			require.True(t, ok)
			require.InDelta(t, 1/float64(n), float64(hull.Last-hull.First)/math.MaxUint64, 1e-9, name)
		}
		require.InDelta(t, 1, Skew(first, root, nil), 0)
		next, what := Balance(root, first, nil, gradual)
		require.Empty(t, what)
		require.Equal(t, first, next)
	}
	disabled := auto(3)
	yes := true
	disabled.Disable = &yes
	require.Empty(t, First(disabled, nil))
	require.Empty(t, Next(disabled, First(auto(3), nil), nil))
}

func TestWithoutAutoTheRestIsOneShard(t *testing.T) {
	root := withCanary(&v1alpha1.RootConfig{Prefix: "op"}, []string{"a"}, 3)
	first := First(root, Weights{"b": 1})
	whole(t, root, first)
	require.True(t, first["op-0-canary"].Owns("a"))
	require.True(t, first["op-1-normal"].Owns("default"))
}

func TestACanaryMovesItsOwnKeysOnly(t *testing.T) {
	w := thousand(names["tenant-0000"], weights["zipf"])
	before := First(auto(5), w)
	small, large := withCanary(auto(5), []string{"tenant-0007"}), withCanary(auto(5), []string{"tenant-0007", "tenant-0008"}, 3, 17)

	grown := Next(small, before, w)
	whole(t, small, grown)
	for key, owner := range owners(t, grown, w) {
		if key == "tenant-0007" {
			require.Equal(t, "op-0-canary", owner)
		} else {
			require.True(t, before[owner].Owns(key), key)
		}
	}
	more := Next(large, grown, w)
	whole(t, large, more)
	for name, s := range more {
		if name != "op-0-canary" {
			require.True(t, s.Minus(before[name]).Empty(), "%s gained", name)
		}
	}
	require.Equal(t, grown, Next(small, more, w), "what is given back goes to whose it was")
	none := Next(auto(5), more, w)
	whole(t, auto(5), none)
	require.Equal(t, owners(t, before, w), owners(t, none, w))
}

func TestScalingMovesLittleAndIsEven(t *testing.T) {
	for _, c := range []struct {
		from, to int
		most     float64 // of all weight that changes hands
	}{
		{1, 2, 0.55},
		{1, 5, 0.85},
		{2, 3, 0.45},
		{5, 6, 0.35},
		{5, 16, 0.85},
		{16, 3, 0.95},
		{5, 2, 0.85},
		{3, 2, 0.55},
		{64, 63, 0.55},
	} {
		for called, name := range names {
			for like, weight := range map[string]func(int) int64{"equal": weights["equal"], "uniform": weights["uniform"]} {
				w := thousand(name, weight)
				first := First(auto(c.from), w)
				next := Next(auto(c.to), first, w)
				whole(t, auto(c.to), next)
				share := moved(t, first, next, w)
				t.Logf("%d to %d, %s, %s: %.2f moved, skew %.3f", c.from, c.to, called, like, share, Skew(next, auto(c.to), w))
				require.LessOrEqual(t, share, c.most, "%d to %d, %s, %s", c.from, c.to, called, like)
				if c.to <= 16 {
					require.LessOrEqual(t, Skew(next, auto(c.to), w), 1.10, "%d to %d, %s, %s", c.from, c.to, called, like)
				}
			}
		}
	}
}

// rounds balances until nothing is moved, and checks what each round does.
func rounds(t require.TestingT, root *v1alpha1.RootConfig, last map[string]sharding.Scope, w Weights) (map[string]sharding.Scope, int) {
	seen := map[string]bool{}
	n := len(normals(root))
	for i := range 10000 {
		seen[fmt.Sprint(last)] = true
		next, what := Balance(root, last, w, gradual)
		whole(t, root, next)
		if what == "" {
			require.Equal(t, last, next)
			return last, i
		}
		require.False(t, seen[fmt.Sprint(next)], "came back to where it was: %s", what)
		share, heaviest, total := moved(t, last, next, w), int64(0), int64(0)
		for _, weight := range w {
			heaviest, total = max(heaviest, weight), total+weight
		}
		key := float64(heaviest) / float64(total)
		require.LessOrEqual(t, share, float64(n-1)*max(step/float64(n), key)+1e-9, "one round moved too much: %s", what)
		l := newLine(w, takenBy(root), n)
		bearable := max(Skew(last, root, w)*float64(l.total())/float64(n)+float64(heaviest), float64(l.even(n)))
		require.LessOrEqual(t, Skew(next, root, w)*float64(l.total())/float64(n), bearable+1e-3, "one round made it worse: %s", what)
		last = next
	}
	require.Fail(t, "balancing does not end")
	return nil, 0
}

func TestBalanceGetsThereAndStops(t *testing.T) {
	for called, name := range names {
		for like, weight := range weights {
			root := auto(5)
			first := First(root, nil)
			w := thousand(name, weight)
			last, n := rounds(t, root, first, w)
			t.Logf("%s, %s: skew %.2f, %d rounds, then %.3f", called, like, Skew(first, root, w), n, Skew(last, root, w))
			require.LessOrEqual(t, Skew(last, root, w), Hysteresis, "%s, %s", called, like)
			// One that has nearly everything cannot be rid of it sooner, a step a round.
			require.LessOrEqual(t, n, max(10, int((Skew(first, root, w)-1)/step)+2), "%s, %s", called, like)
		}
	}
}

// A pod that was just restarted for a new layout is not restarted again for balance.
func TestALayoutMadeByWeightsIsBalanced(t *testing.T) {
	for _, name := range names {
		for like, weight := range weights {
			w := thousand(name, weight)
			scopes := map[string]sharding.Scope(nil)
			for _, n := range []int{3, 5, 2, 7} {
				scopes = Next(auto(n), scopes, w)
				_, what := Balance(auto(n), scopes, w, gradual)
				require.Empty(t, what, "%s, %d shards", like, n)
			}
		}
	}
}

func TestBalanceSaysWhatItMoves(t *testing.T) {
	w := thousand(names["tenant-0000"], weights["equal"])
	_, what := Balance(auto(4), First(auto(4), nil), w, gradual)
	require.Regexp(t, `^\d+ of 1000 namespaces, with \d+ of 50000 objects, go from op-\d-normal to op-\d-normal(, from op-\d-normal to op-\d-normal)*; the heaviest shard has \d+ then, of a mean of 12500 \(now \d+\)$`, what)
}

// Each round restarts pods there, so that one must do.
func TestBalanceAtOnceTakesOneRound(t *testing.T) {
	for called, name := range names {
		for like, weight := range weights {
			root := auto(5)
			first := First(root, nil)
			w := thousand(name, weight)
			if Skew(first, root, w) <= Threshold {
				continue
			}
			next, what := Balance(root, first, w, Pace{Above: Threshold, AtOnce: true})
			require.NotEmpty(t, what, "%s, %s", called, like)
			whole(t, root, next)
			require.LessOrEqual(t, Skew(next, root, w), Hysteresis, "%s, %s", called, like)
			again, what := Balance(root, next, w, Pace{Above: Hysteresis, AtOnce: true})
			require.Empty(t, what, "%s, %s", called, like)
			require.Equal(t, next, again, "%s, %s", called, like)
		}
	}
}

func TestBalanceBeginsAboveItsThreshold(t *testing.T) {
	root := auto(2)
	w := thousand(names["tenant-0000"], weights["equal"])
	first := First(root, w)
	grow := func(by int64) {
		for key, owner := range owners(t, first, w) {
			if owner == "op-1-normal" {
				w[key] = 50 * by / 100
			}
		}
	}
	grow(150) // a skew of 1.2
	_, what := Balance(root, first, w, Pace{Above: Threshold})
	require.Empty(t, what)
	_, what = Balance(root, first, w, Pace{Above: Hysteresis})
	require.NotEmpty(t, what, "a correction that has begun goes on")
	grow(200) // of 1.33
	_, what = Balance(root, first, w, Pace{Above: Threshold})
	require.NotEmpty(t, what)
}

// Namespaces whose names differ in the last character are neighbours in the key
// space, and yet are divided exactly as their weights demand.
func TestNeighboursAreDividedByWeight(t *testing.T) {
	w := Weights{}
	for i := range 8 {
		w[fmt.Sprintf("kcm-s%d", i)] = 10
	}
	for n := 2; n <= 8; n *= 2 {
		first := First(auto(n), w)
		whole(t, auto(n), first)
		require.InDelta(t, 1, Skew(first, auto(n), w), 0, "%d shards", n)
	}
	w["kcm-s3"] = 70
	require.InDelta(t, 1, Skew(First(auto(2), w), auto(2), w), 0.15)
}

func TestACutLiesBetweenAnyTwoHashes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		low := rapid.Uint64Range(0, math.MaxUint64-1).Draw(t, "low")
		high := rapid.OneOf(rapid.Just(low+1), rapid.Uint64Range(low+1, math.MaxUint64)).Draw(t, "high")
		l := line{hashes: []uint64{low, high}}
		bound := l.bound(1)
		require.Greater(t, bound, low)
		require.LessOrEqual(t, bound, high)
		require.Equal(t, 1, l.index(bound))
	})
}

func TestOneHeavyKeyIsNoReasonToMoveForEver(t *testing.T) {
	w := thousand(names["tenant-0000"], weights["equal"])
	w["tenant-0500"] = 100000
	root := auto(5)
	last, _ := rounds(t, root, First(root, nil), w)
	l := newLine(w, sharding.Scope{}, 5)
	require.LessOrEqual(t, Skew(last, root, w), goal*float64(l.lightest(5))*5/float64(l.total())+1e-9)
}

// gradual is the pace at which a correction that has begun goes on, if pods keep running.
var gradual = Pace{Above: Hysteresis}

var (
	genWeights = rapid.Custom(func(t *rapid.T) Weights {
		return rapid.MapOfN(rapid.StringMatching(`[a-z]{1,3}-[0-9]{1,2}`), rapid.Int64Range(0, 1000), 0, 60).Draw(t, "weights")
	})
	genRoot = rapid.Custom(func(t *rapid.T) *v1alpha1.RootConfig {
		root := &v1alpha1.RootConfig{Prefix: "op", TargetStatefulSet: "op"}
		if n := rapid.IntRange(0, 12).Draw(t, "shards"); n > 0 {
			root = auto(n)
		}
		named := rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z]-[0-9]`), 0, 5, rapid.ID[string]).Draw(t, "named")
		buckets := rapid.SliceOfNDistinct(rapid.IntRange(0, 31), 0, 31, rapid.ID[int]).Draw(t, "buckets")
		if len(named)+len(buckets) > 0 {
			root = withCanary(root, named, buckets...)
		}
		return root
	})
)

// Whatever is asked for one after another, keys have one owner each, and shards
// that were made anew have a key each if there are enough.
func TestAlwaysWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var last map[string]sharding.Scope
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			root, w := genRoot.Draw(t, "root"), genWeights.Draw(t, "weights")
			next := Next(root, last, w)
			whole(t, root, next)
			for name, s := range next {
				require.False(t, s.Empty(), name)
			}
			if keys := free(root, w); len(keys) >= len(normals(root)) && len(runsOf(normals(root), last)) != len(normals(root)) {
				require.Len(t, busy(root, next, keys), len(normals(root)), "a shard has no key")
			}
			require.Equal(t, next, Next(root, next, genWeights.Draw(t, "other weights")), "no reason, no move")
			last = next
			if rapid.Bool().Draw(t, "balance") {
				last, _ = rounds(t, root, next, w)
				keys, total := free(root, w), int64(0)
				for _, key := range keys {
					total += w[key]
				}
				if n := len(normals(root)); total > 0 && len(keys) >= n {
					require.Len(t, busy(root, last, keys), n, "a shard has no key")
					least := float64(newLine(w, takenBy(root), n).lightest(n)) * float64(n) / float64(total)
					require.LessOrEqual(t, Skew(last, root, w), max(Hysteresis, least*goal)+1e-9)
				}
			}
		}
	})
}

// free are the keys that are not the canary's.
func free(root *v1alpha1.RootConfig, w Weights) (keys []string) {
	for key := range w {
		if !takenBy(root).Owns(key) {
			keys = append(keys, key)
		}
	}
	return keys
}

// busy are the shards with a key.
func busy(root *v1alpha1.RootConfig, scopes map[string]sharding.Scope, keys []string) map[string]bool {
	out := map[string]bool{}
	for _, key := range keys {
		for _, name := range normals(root) {
			if scopes[name].Owns(key) {
				out[name] = true
			}
		}
	}
	return out
}

// What was last need not come from here: somebody may have written the status.
func TestNextOfAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		last := map[string]sharding.Scope{}
		for _, s := range rapid.SliceOfN(rapid.IntRange(1, 6), 0, 6).Draw(t, "names") {
			a, b := rapid.Uint64().Draw(t, "first"), rapid.Uint64().Draw(t, "last")
			last[fmt.Sprintf("op-%d-normal", s)] = sharding.Of(sharding.Range{First: a, Last: b})
		}
		root, w := genRoot.Draw(t, "root"), genWeights.Draw(t, "weights")
		whole(t, root, Next(root, last, w))
		rounds(t, root, Next(root, last, w), w)
	})
}

func BenchmarkFirst(b *testing.B) {
	w := Weights{}
	for i := range 10000 {
		w[fmt.Sprintf("tenant-%05d", i)] = int64(i % 100)
	}
	for b.Loop() {
		First(auto(64), w)
	}
}
