package activity

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

var (
	start   = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	secrets = schema.GroupResource{Resource: "secrets"}
)

func counted(l *Log) *Counter {
	l.Reset(start.Add(-Grace))
	l.Report(start)
	return l.Counter(secrets, false)
}

func one(t *testing.T, l *Log, now time.Time) *meshv1.ResourceActivity {
	t.Helper()
	all := l.Report(now)
	require.Len(t, all, 1)
	return all[0]
}

func TestWritesAreCountedWithTheirKeys(t *testing.T) {
	var l Log
	c := counted(&l)
	require.Empty(t, l.Report(start), "nothing was answered yet")
	a, b := sample.Key("a", ""), sample.Key("b", "")
	c.Write(a, false)
	c.Write(a, true)
	c.Write(b, false)
	c.Write(0, false)
	is := one(t, &l, start)
	require.EqualValues(t, 4, is.GetWrites())
	require.EqualValues(t, 1, is.GetForeignWrites())
	require.Equal(t, "secrets", is.GetResource())
	require.Equal(t, sample.Merge([]uint64{a, b}), is.GetKeys())
}

// After a change, the client still works on what its shard owned before.
func TestResetDropsWritesWithinGrace(t *testing.T) {
	var l Log
	c := counted(&l)
	c.Write(1, false)
	l.Reset(start)
	c.Write(2, false)
	require.Empty(t, l.Report(start.Add(Grace-1)))
	require.Empty(t, l.Report(start.Add(Grace)))
	c.Write(3, false)
	require.Equal(t, []uint64{3}, one(t, &l, start.Add(Grace)).GetKeys())
}

func TestCountsEndAfterTwoPeriods(t *testing.T) {
	var l Log
	c := counted(&l)
	c.Write(1, false)
	require.EqualValues(t, 1, one(t, &l, start.Add(Period)).GetWrites())
	c.Write(2, false)
	require.EqualValues(t, []uint64{1, 2}, one(t, &l, start.Add(2*Period-1)).GetKeys())
	require.EqualValues(t, []uint64{2}, one(t, &l, start.Add(2*Period)).GetKeys())
	require.Empty(t, l.Report(start.Add(3*Period)))
	require.Empty(t, l.known, "it makes room")
	c.Write(4, false)
	require.EqualValues(t, []uint64{4}, one(t, &l, start.Add(3*Period)).GetKeys(), "the counter finds it again")
}

func TestWatchesCountWhileOpen(t *testing.T) {
	var l Log
	over := counted(&l).Watch()
	l.Reset(start)
	require.True(t, one(t, &l, start.Add(Grace+2*Period)).GetWatched(), "a watch outlasts a change")
	over()
	require.Empty(t, l.Report(start.Add(Grace+2*Period)))
}

// A pod chooses what it writes.
func TestReportIsBounded(t *testing.T) {
	var l Log
	counted(&l)
	for _, divided := range []bool{true, false} {
		for i := range 3 * maxKnown {
			c := l.Counter(schema.GroupResource{Group: "example.com", Resource: fmt.Sprintf("kind-%03d", i)}, divided)
			for range i + 1 {
				c.Write(rand.Uint64(), false)
			}
		}
	}
	require.Len(t, l.known, maxKnown)
	all := l.Report(start)
	require.Len(t, all, meshv1.MaxActivity, "those that came first are all divided")
	for i, a := range all {
		require.Equal(t, fmt.Sprintf("kind-%03d", maxKnown-meshv1.MaxActivity+i), a.GetResource(), "those with the most writes")
		require.LessOrEqual(t, len(a.GetKeys()), sample.Size)
	}
}

// Some operators watch hundreds of kinds, and write few of them.
func TestWatchedResourcesMakeRoomForWrittenOnes(t *testing.T) {
	var l Log
	counted(&l)
	for i := range 2 * maxKnown {
		l.Counter(schema.GroupResource{Group: "example.com", Resource: fmt.Sprintf("kind-%03d", i)}, false).Watch()
	}
	require.Len(t, l.known, maxKnown)
	for i := range maxKnown {
		l.Counter(schema.GroupResource{Resource: fmt.Sprintf("written-%03d", i)}, false).Write(1, false)
	}
	require.Len(t, l.known, maxKnown)
	for k := range l.known {
		require.Contains(t, k.Resource, "written")
	}
	full := l.Counter(secrets, false)
	full.Write(1, false)
	require.Nil(t, full.resource.Load())
}

func TestKeysAreTheSmallest(t *testing.T) {
	var l Log
	c := counted(&l)
	var all []uint64
	for range 10_000 {
		all = append(all, max(1, rand.Uint64()))
	}
	var together sync.WaitGroup
	for part := range 4 {
		together.Go(func() {
			for i := range all {
				c.Write(all[(i+part*len(all)/4)%len(all)], false)
			}
		})
	}
	together.Wait()
	require.Equal(t, sample.Merge(all), one(t, &l, start).GetKeys())
}

func TestKnownKeysTakeNoLock(t *testing.T) {
	var l Log
	c := counted(&l)
	var all []uint64
	for i := range uint64(100) {
		all = append(all, sample.Key(fmt.Sprint(i), ""))
		c.Write(all[i], false)
	}
	r := c.resource.Load()
	l.mu.Lock()
	defer l.mu.Unlock()
	r.periods[0].keys.mu.Lock()
	defer r.periods[0].keys.mu.Unlock()
	require.Zero(t, testing.AllocsPerRun(10, func() {
		for _, key := range all {
			c.Write(key, false)
		}
	}))
}
