package idle

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOnlyShardsThatWriteNothingAreIdle(t *testing.T) {
	busy := Shard{Name: "busy", Objects: 100, Writes: 100, Watches: true}
	for _, q := range []struct {
		name string
		is   Shard
		idle bool
	}{
		{"as much to do", Shard{Name: "s", Objects: 100, Watches: true}, true},
		{"a fifth to do", Shard{Name: "s", Objects: 20, Watches: true}, true},
		{"little to do", Shard{Name: "s", Objects: 19, Watches: true}, false},
		{"nothing to do", Shard{Name: "s", Watches: true}, false},
		{"one write", Shard{Name: "s", Objects: 100, Watches: true, Writes: 1}, false},
		{"its agents are too old, or its pods read nothing", Shard{Name: "s", Objects: 100}, false},
		{"very many objects", Shard{Name: "s", Objects: math.MaxInt64, Watches: true}, true},
	} {
		t.Run(q.name, func(t *testing.T) {
			want := []string(nil)
			if q.idle {
				want = []string{"s"}
			}
			require.Equal(t, want, find([]Shard{busy, q.is}))
		})
	}
	require.Empty(t, find([]Shard{{Name: "a", Objects: 9, Watches: true}, {Name: "b", Objects: 9, Watches: true}}), "nobody writes")
	require.Empty(t, find([]Shard{{Name: "alone", Objects: 9, Watches: true}}))
}

func TestShardIsReportedWhenIdleForLong(t *testing.T) {
	now := time.Now()
	work := func(writes uint64) []Shard {
		return []Shard{{Name: "a", Objects: 50, Writes: 500, Watches: true}, {Name: "b", Objects: 50, Writes: writes, Watches: true}}
	}
	var tr Tracker
	require.Empty(t, tr.Round(work(0), nil, now))
	require.Empty(t, tr.Round(work(0), nil, now.Add(After-1)))
	require.Equal(t, []string{"b"}, tr.Round(work(0), nil, now.Add(After)))
	require.Empty(t, tr.Round(work(1), []string{"b"}, now.Add(After)))
	require.Empty(t, tr.Round(work(0), nil, now.Add(After)), "it begins anew")

	var next Tracker
	require.Equal(t, []string{"b"}, next.Round(work(0), []string{"b"}, now), "as the last leader reported")
}
