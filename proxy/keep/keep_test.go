package keep

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var start = time.Unix(1_800_000_000, 123)

// tally counts with a step, which distinguishes each.
type tally struct{ step, own, earlier int }

type total struct {
	Count int    `json:"count"`
	Blob  string `json:"blob,omitempty"`
}

func (t *tally) Like(other *tally) bool         { return t.step == other.step }
func (t *tally) Save(time.Time) total           { return total{Count: t.own + t.earlier} }
func (t *tally) Restore(was total, _ time.Time) { t.earlier = was.Count }
func (t total) Possible() bool                  { return t.Count >= 0 && t.Count <= MaxCount }

type store struct{ Store[*tally, total] }

func (s *store) compile(t testing.TB, now time.Time, step int, keys ...string) map[string]*tally {
	t.Helper()
	policy := map[string]*tally{}
	for _, key := range keys {
		_, err := s.Add(policy, key, &tally{step: step}, now)
		require.NoError(t, err)
	}
	return policy
}

func (s *store) put(t testing.TB, now time.Time, keys ...string) map[string]*tally {
	t.Helper()
	policy := s.compile(t, now, 1, keys...)
	s.Enforce(now, policy)
	return policy
}

func (s *store) export(t testing.TB, now time.Time) []byte {
	t.Helper()
	data, err := s.Export(now)
	require.NoError(t, err)
	return data
}

func TestStateSurvivesPoliciesWithItsRule(t *testing.T) {
	s := &store{}
	first := s.put(t, start, "a", "b")
	require.Same(t, first["a"], s.put(t, start, "a")["a"])
	require.Same(t, first["b"], s.put(t, start.Add(For-1), "b", "a")["b"], "it was away for a moment")
	other := s.compile(t, start, 2, "a")
	require.NotSame(t, first["a"], other["a"], "it counts other things")
	require.Same(t, first["a"], s.compile(t, start, 1, "a")["a"], "nothing else is in force yet")
	s.Enforce(start, other)
	require.Same(t, other["a"], s.compile(t, start, 2, "a")["a"])
	s.put(t, start)
	require.NotSame(t, first["b"], s.put(t, start.Add(For), "b")["b"], "it was away for long")

	var keys []string
	for key := range s.InForce() {
		keys = append(keys, key)
	}
	require.Equal(t, []string{"b"}, keys)
}

func TestOldestStatesAreForgottenFirst(t *testing.T) {
	s := &store{}
	old := s.put(t, start, "a", "b")
	for i := range maxLeft {
		s.put(t, start.Add(time.Duration(i)), "b", fmt.Sprint("passing ", i))
	}
	require.Same(t, old["a"], s.compile(t, start, 1, "a")["a"])
	s.put(t, start.Add(time.Second), "b")
	require.Len(t, s.left, maxLeft)
	require.NotSame(t, old["a"], s.compile(t, start, 1, "a")["a"])
	require.Same(t, old["b"], s.compile(t, start, 1, "b")["b"])
}

func TestNumberOfRulesIsBounded(t *testing.T) {
	s := &store{}
	add := func(policy map[string]*tally, key string) error {
		_, err := s.Add(policy, key, &tally{}, start)
		return err
	}
	policy := map[string]*tally{}
	require.Error(t, add(policy, ""))
	require.Error(t, add(policy, strings.Repeat("k", maxKey+1)))
	for i := range MaxRules {
		require.NoError(t, add(policy, fmt.Sprint(i)))
	}
	require.ErrorContains(t, add(policy, "0"), "used twice")
	require.ErrorContains(t, add(policy, "one"), "more than")
}

// Whatever comes first: the import, the rule, or the rule's being in force.
func TestImportReachesAllRules(t *testing.T) {
	old := &store{}
	for _, of := range old.put(t, start, "force", "compiled", "later", "left", "never") {
		of.own = 2
	}
	old.put(t, start, "force", "compiled", "later", "left")
	s := &store{}
	away := s.put(t, start, "left", "force")
	away["left"].own = 1
	s.put(t, start, "force")
	policy := s.compile(t, start, 1, "force", "compiled")
	policy["compiled"].own = 1
	for range 2 {
		require.NoError(t, s.Import(old.export(t, start), start))
	}
	require.Equal(t, 2, policy["force"].Save(start).Count, "at once")
	s.Enforce(start, policy)
	all := s.put(t, start, "force", "compiled", "later", "left", "never", "new")
	totals := map[string]int{}
	for key, of := range all {
		totals[key] = of.Save(start).Count
	}
	require.Equal(t, map[string]int{"force": 2, "compiled": 3, "later": 2, "left": 3, "never": 2, "new": 0}, totals)
}

func TestUnusedStatesAreForgotten(t *testing.T) {
	count := func(now time.Time) int {
		old := &store{}
		old.put(t, start, "a")["a"].own = 2
		for _, at := range []time.Time{start, start.Add(For / 2), now} { // each passes its age to the next
			s := &store{}
			require.NoError(t, s.Import(old.export(t, at), at))
			s.put(t, at)
			old = s
		}
		return old.put(t, now, "a")["a"].Save(now).Count
	}
	require.Equal(t, 2, count(start.Add(For-1)))
	require.Zero(t, count(start.Add(For)))

	for at, kept := range map[time.Time]bool{start.Add(For - 1): true, start.Add(For): false} {
		left, imported := &store{}, &store{}
		left.put(t, start, "a")
		left.put(t, start)
		require.NoError(t, imported.Import(left.export(t, start), start))
		for _, s := range []*store{left, imported} {
			require.Equal(t, kept, strings.Contains(string(s.export(t, at)), `"a"`), "whether or not another policy came")
			s.put(t, at)
			require.Equal(t, kept, strings.Contains(string(s.export(t, start)), `"a"`))
		}
	}
}

// How long a rule is away is counted through all processes.
func TestTakeoverDoesNotProlongStates(t *testing.T) {
	count := func(back time.Time) int {
		s := &store{}
		s.put(t, start, "a")["a"].own = 2
		s.put(t, start)
		for _, at := range []time.Time{start.Add(For / 3), start.Add(For / 2), start.Add(For - 1)} {
			next := &store{}
			require.NoError(t, next.Import(s.export(t, at), at))
			s = next
		}
		return s.put(t, back, "a")["a"].Save(back).Count
	}
	require.Equal(t, 2, count(start.Add(For-1)))
	require.Zero(t, count(start.Add(For)))
}

func TestImportAcceptsExport(t *testing.T) {
	s, next := &store{}, &store{}
	var keys []string
	for i := range MaxRules - 1 {
		keys = append(keys, fmt.Sprint(i))
	}
	s.put(t, start, "left", "too")
	s.put(t, start, keys...)
	require.NoError(t, next.Import(s.export(t, start), start))
	require.Len(t, next.imported, MaxRules)
	for key := range s.force {
		if _, ok := next.imported[key]; !ok {
			t.Fatalf("%s is in force and left out", key)
		}
	}

	s = &store{}
	s.put(t, start, "force")
	s.imported = map[string]dated[total]{}
	for i := range 8 {
		s.imported[fmt.Sprint(i)] = dated[total]{of: total{Blob: strings.Repeat("b", MaxExport/6)}, at: start}
	}
	require.NoError(t, next.Import(s.export(t, start), start))
	require.Len(t, next.imported, 6, "as many as there is room for")
	require.Equal(t, start, next.imported["force"].at)
}

func TestImportIsBoundedAndSkipsInvalidRules(t *testing.T) {
	states := func(of ...string) string {
		return fmt.Sprintf(`{"version":%d,"wall":1,"states":[%s]}`, version, strings.Join(of, ","))
	}
	state := func(key string) string { return fmt.Sprintf(`{"key":%q,"of":{"count":1}}`, key) }
	s := &store{}
	s.imported = map[string]dated[total]{"a": {}}
	for what, data := range map[string]string{
		"unexpected end":          "[",
		"cannot":                  "[]",
		"larger than":             strings.Repeat(" ", MaxExport+1),
		"without a version":       `{"states":[]}`,
		"needs version 3 to read": `{"version":4,"oldest":3}`,
		"before 1970":             fmt.Sprintf(`{"version":%d,"wall":-1}`, version),
	} {
		t.Run(what, func(t *testing.T) {
			require.ErrorContains(t, s.Import([]byte(data), start), what)
			require.Len(t, s.imported, 1, "as it was")
		})
	}
	for what, data := range map[string]string{
		"empty or too":     state(""),
		"too long":         state(strings.Repeat("k", maxKey+1)),
		"used twice":       state("good"),
		`rule "k" has`:     `{"key":"k","of":{"count":-1}}`,
		`rule "of old"`:    `{"key":"of old","age":-1}`,
		`rule "gone"`:      `{"key":"gone","away":-1}`,
		"cannot unmarshal": `{"key":"k","of":{"count":"many"}}`,
	} {
		t.Run(what, func(t *testing.T) {
			require.ErrorContains(t, s.Import([]byte(states(state("good"), data, state("too"))), start), what)
			require.Len(t, s.imported, 2, "the others are read")
			require.Equal(t, 1, s.imported["good"].of.Count)
		})
	}
	many := make([]string, MaxRules+1)
	for i := range many {
		many[i] = state(fmt.Sprint(i))
	}
	require.ErrorContains(t, s.Import([]byte(states(many...)), start), "more than 4096 rules")
	require.Len(t, s.imported, MaxRules)
	require.NoError(t, s.Import([]byte(states(many[1:]...)), start))
	require.Len(t, s.imported, MaxRules)
	require.NoError(t, s.Import(nil, start))
	require.Empty(t, s.imported)
}

func TestImportReadsOtherVersions(t *testing.T) {
	wall := start.Add(-time.Second).UnixNano()
	for _, test := range []struct {
		name, data string
		at         time.Time
	}{
		{"older, of faults", `{"rule":{"count":3}}`, start},
		{"older, of limits", fmt.Sprintf(`{"version":1,"wall":%d,"states":[{"key":"rule","age":5,"count":3}]}`, wall), start.Add(-time.Second - 5)},
		{"without an oldest version", fmt.Sprintf(`{"version":2,"wall":%d,"states":[{"key":"rule","age":5,"of":{"count":3}}]}`, wall), start.Add(-time.Second - 5)},
		{"newer", fmt.Sprintf(`{"version":7,"oldest":2,"wall":%d,"zone":[1],"states":[{"key":"rule","age":5,"new":{"a":1},"of":{"count":3,"newer":[true]}}],"more":"x"}`, wall), start.Add(-time.Second - 5)},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &store{}
			require.NoError(t, s.Import([]byte(test.data), start))
			require.Equal(t, map[string]dated[total]{"rule": {of: total{Count: 3}, at: test.at}}, s.imported)
			require.Equal(t, 3, s.put(t, start, "rule")["rule"].Save(start).Count)
		})
	}
}

// Agents that require version 2 read what this one exports.
func TestExportHasVersion2(t *testing.T) {
	s := &store{}
	s.put(t, start, "a")["a"].own = 2
	var v2 struct {
		Version int
		Wall    int64
		States  []struct {
			Key string
			Of  total
		}
	}
	require.NoError(t, json.Unmarshal(s.export(t, start), &v2))
	require.Equal(t, 2, v2.Version)
	require.Equal(t, start.UnixNano(), v2.Wall)
	require.Len(t, v2.States, 1)
	require.Equal(t, "a", v2.States[0].Key)
	require.Equal(t, 2, v2.States[0].Of.Count)
}

func TestClockSetBackCountsAsNoTime(t *testing.T) {
	s := &store{}
	data, err := json.Marshal(export[saved[total]]{Version: version, Wall: start.Add(time.Hour).UnixNano(), States: []saved[total]{{Key: "a", Age: 5}}})
	require.NoError(t, err)
	require.NoError(t, s.Import(data, start))
	require.Equal(t, start.Add(-5), s.imported["a"].at)
}
