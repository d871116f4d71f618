package operator

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
)

func TestWaitsEndWhenGenerationIsReconciled(t *testing.T) {
	start := time.Now()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	one, two := types.NamespacedName{Namespace: "a", Name: "one"}, types.NamespacedName{Namespace: "b", Name: "two"}
	w := newWaits()
	w.reconciled(one, 1, at(0)) // nothing waits
	w.wrote(one, 2, at(1))
	w.wrote(one, 3, at(5))
	w.wrote(two, 2, at(5))
	w.reconciled(one, 1, at(6))
	w.reconciled(two, 2, at(6))
	long, starved := w.longerThan(5 * time.Second)
	require.Empty(t, long)
	require.Empty(t, starved)
	w.reconciled(one, 2, at(10)) // ends the wait; the next change begins another
	w.wrote(one, 4, at(11))
	w.exclude(20 * time.Second) // counts for no wait
	w.reconciled(one, 4, at(32))
	require.Empty(t, w.open)
	long, starved = w.longerThan(5 * time.Second)
	require.Len(t, long, 1)
	require.Empty(t, starved)
	require.Equal(t, one, long[0].object)
	require.Equal(t, 9*time.Second, long[0].took)
	require.Contains(t, long[0].String(), "a/one waited 9s")
	long, _ = w.longerThan(0)
	require.Len(t, long, 2)
}

func TestObjectsInOperatorsQueueAreStarvedNotLost(t *testing.T) {
	start := time.Now()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	hidden, starved := types.NamespacedName{Namespace: "a", Name: "hidden"}, types.NamespacedName{Namespace: "b", Name: "starved"}
	w := newWaits()
	for _, object := range []types.NamespacedName{hidden, starved} {
		w.wrote(object, 2, at(0))
	}
	require.False(t, w.anyLongerThan(20*time.Second, at(20)))
	require.True(t, w.anyLongerThan(20*time.Second, at(21)))
	for object, long := range parseBacklog(`not JSON
{"time":"...","level":"WARN","msg":"objects in the cache wait in the queue","pod":"tally-2","seconds":{"b/starved":15,"a/hidden":12}}
{"msg":"another","seconds":{"b/starved":900}}
{"msg":"objects in the cache wait in the queue","seconds":{"b/starved":70}}
`) {
		w.queued(object, "tally-2", long)
	}
	for _, object := range []types.NamespacedName{hidden, starved} {
		w.reconciled(object, 2, at(120))
	}
	long, late := w.longerThan(90 * time.Second)
	require.Len(t, long, 1)
	require.Equal(t, hidden, long[0].object, "it was shown late")
	require.Len(t, late, 1)
	require.Contains(t, late[0].String(), "b/starved waited 2m0s for a reconcile")
	require.Contains(t, late[0].String(), "in the queue of tally-2 for 1m10s")
}
