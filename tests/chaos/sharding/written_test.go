package sharding

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

func TestWritesOutOfTurn(t *testing.T) {
	start := time.Now()
	at := func(second int) time.Time {
		if second == 0 {
			return time.Time{}
		}
		return start.Add(time.Duration(second) * time.Second)
	}
	by := func(shard string, received, ended int) audit.Request {
		return audit.Request{Pod: shard, Received: at(received), Ended: at(ended)}
	}
	given := func(to string, second, over int) change { return change{to, at(second), at(over)} }
	for name, c := range map[string]struct {
		changes []change
		writes  []audit.Request
		want    int
	}{
		"by the owner":                                {[]change{given("a", 1, 2)}, []audit.Request{by("a", 3, 4), by("a", 5, 6)}, 0},
		"by another":                                  {[]change{given("a", 1, 2)}, []audit.Request{by("a", 3, 4), by("b", 5, 6)}, 1},
		"before the change":                           {[]change{given("a", 1, 2), given("b", 10, 20)}, []audit.Request{by("b", 9, 9), by("a", 9, 9)}, 1},
		"first one, then the next":                    {[]change{given("a", 1, 2), given("b", 10, 20)}, []audit.Request{by("a", 11, 12), by("b", 13, 14), by("b", 30, 31)}, 0},
		"the last owner after the next one":           {[]change{given("a", 1, 2), given("b", 10, 20)}, []audit.Request{by("b", 13, 14), by("a", 15, 16)}, 1},
		"the last owner afterwards":                   {[]change{given("a", 1, 2), given("b", 10, 20)}, []audit.Request{by("a", 21, 22)}, 1},
		"both at once":                                {[]change{given("a", 1, 2), given("b", 10, 20)}, []audit.Request{by("a", 11, 14), by("b", 13, 15)}, 1},
		"back again before the other had it":          {[]change{given("a", 1, 2), given("b", 10, 0), given("a", 11, 20)}, []audit.Request{by("a", 12, 13), by("a", 21, 22)}, 0},
		"back again after the other had it":           {[]change{given("a", 1, 2), given("b", 10, 0), given("a", 11, 20)}, []audit.Request{by("b", 12, 13), by("a", 14, 15)}, 0},
		"more turns than changes":                     {[]change{given("a", 1, 2), given("b", 10, 0), given("a", 11, 20)}, []audit.Request{by("b", 12, 13), by("a", 14, 15), by("b", 16, 17)}, 1},
		"the wrong one, after several changes":        {[]change{given("a", 1, 2), given("b", 10, 0), given("a", 11, 20)}, []audit.Request{by("b", 21, 22)}, 1},
		"without an end, because nobody recorded one": {[]change{given("a", 1, 2), given("b", 10, 20)}, []audit.Request{by("a", 11, 0), by("b", 13, 0)}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			require.Len(t, outOfTurn(c.changes, c.writes, func(r audit.Request) string { return r.Pod }), c.want)
		})
	}
}
