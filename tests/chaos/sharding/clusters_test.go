package sharding

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/fleet"
)

func TestForeignWritesInMembers(t *testing.T) {
	start := time.Now()
	at := func(second int) time.Time { return start.Add(time.Duration(second) * time.Second) }
	by := func(pod string, second int) fleet.Write { return fleet.Write{Pod: pod, At: at(second)} }
	tenures := []tenure{{[]string{"a", "a2"}, at(10), at(20)}, {[]string{"b"}, at(30), at(40)}, {[]string{"b"}, at(50), time.Time{}}}
	for name, c := range map[string]struct {
		writes []fleet.Write
		want   int
	}{
		"before the first tenure":           {[]fleet.Write{by("b", 1), by("a", 2)}, 0},
		"by the owners":                     {[]fleet.Write{by("a", 10), by("a", 19), by("b", 31), by("b", 60)}, 0},
		"by another pod of the shard":       {[]fleet.Write{by("a", 12), by("a2", 13), by("a", 14)}, 0},
		"by another":                        {[]fleet.Write{by("b", 15), by("a", 35), by("a", 60)}, 3},
		"by both in turn, in a handover":    {[]fleet.Write{by("a", 22), by("b", 24), by("b", 25)}, 0},
		"by the last owner after the next":  {[]fleet.Write{by("b", 22), by("a", 24)}, 1},
		"by a third, in a handover":         {[]fleet.Write{by("c", 22)}, 1},
		"by the owner who remains the same": {[]fleet.Write{by("b", 42), by("b", 49)}, 0},
	} {
		t.Run(name, func(t *testing.T) { require.Len(t, foreign(c.writes, tenures), c.want) })
	}
}
