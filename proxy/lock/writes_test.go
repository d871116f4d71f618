package lock

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestHoldersOfEachObject(t *testing.T) {
	set, err := NewSet(&meshv1.Sharding{Shard: "s", Locks: []*meshv1.Lock{{Namespace: "ns", Name: "l", UpstreamName: "l---s"}}})
	require.NoError(t, err)
	w := NewWrites()
	w.Note(set[0], set, "configmaps", "p_1", Held{Holder: "p_1", For: time.Hour, Version: "7"})
	w.Note(set[0], set, "leases", "p_1", Held{Holder: "p_1", For: time.Hour, Version: "8"})
	require.Len(t, w.Changed(), 1)
	require.True(t, w.Holds(set[0]))
	require.Equal(t, []Holder{{"ns", "l", "p_1", "7", "configmaps"}, {"ns", "l", "p_1", "8", "leases"}}, w.Holders())

	w.Note(set[0], set, "configmaps", "", Held{Version: "9"})
	require.False(t, w.Holds(set[0]))
	require.Equal(t, []Holder{{"ns", "l", "", "9", "configmaps"}, {"ns", "l", "p_1", "8", "leases"}}, w.Holders())

	w.Note(set[0], nil, "leases", "p_1", Held{Holder: "p_1", Version: "10"})
	require.Equal(t, []Holder{{"ns", "l", "p_1", "10", "leases"}}, w.Holders(), "the policy names it no more")
}

func TestIdentitiesOfHoldersAreBounded(t *testing.T) {
	set, err := NewSet(&meshv1.Sharding{Shard: "s", Locks: []*meshv1.Lock{{Namespace: "ns", Name: "l", UpstreamName: "l---s"}}})
	require.NoError(t, err)
	long := strings.Repeat("x", 1<<20)
	w := NewWrites()
	w.Note(set[0], set, "leases", long, Held{Holder: long, For: time.Hour, Version: "7"})
	require.True(t, w.Holds(set[0]))
	require.Len(t, w.Holders()[0].Identity, meshv1.MaxIdentity)
	w.Note(set[0], set, "leases", "", Held{Holder: long, For: time.Hour, Version: "8"})
	require.Equal(t, "8", w.Holders()[0].Version, "its own hold goes on")
	var o Observations
	o.Note(Observed{Namespace: "ns", Name: "other", Resource: "leases", Holder: long}, time.Now())
	require.Len(t, o.Except(nil)[0].Holder, meshv1.MaxIdentity)
}

func TestWriteOfOtherContentIsNoHold(t *testing.T) {
	set, err := NewSet(&meshv1.Sharding{Shard: "s", Locks: []*meshv1.Lock{{Namespace: "ns", Name: "l", UpstreamName: "l---s"}}})
	require.NoError(t, err)
	w := NewWrites()
	w.Note(set[0], set, "configmaps", "", Held{Holder: "another_1", For: time.Hour, Version: "7"})
	require.False(t, w.Holds(set[0]))
	require.Empty(t, w.Holders())

	w.Note(set[0], set, "configmaps", "p_1", Held{Holder: "p_1", For: time.Hour, Version: "8"})
	w.Note(set[0], set, "configmaps", "", Held{Holder: "p_1", For: time.Hour, Version: "9"})
	require.True(t, w.Holds(set[0]))
	require.Equal(t, []Holder{{"ns", "l", "p_1", "9", "configmaps"}}, w.Holders(), "its own hold goes on")
	w.Note(set[0], set, "configmaps", "", Held{Holder: "another_1", For: time.Hour, Version: "10"})
	require.Equal(t, "9", w.Holders()[0].Version)
}
