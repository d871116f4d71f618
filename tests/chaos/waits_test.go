package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
)

func TestWaits(t *testing.T) {
	start := time.Now()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	one, two := types.NamespacedName{Namespace: "a", Name: "one"}, types.NamespacedName{Namespace: "b", Name: "two"}
	w := newWaits()
	w.saw(one, 1, at(0)) // nobody waits
	w.wrote(one, 2, at(1))
	w.wrote(one, 3, at(5))
	w.wrote(two, 2, at(5))
	w.saw(one, 1, at(6))
	w.saw(two, 2, at(6))
	require.Empty(t, w.longer(5*time.Second))
	w.saw(one, 2, at(10)) // the one that it waited for; the next is another wait
	w.wrote(one, 4, at(11))
	w.away(20 * time.Second) // no wait of one's own
	w.saw(one, 4, at(32))
	require.Empty(t, w.open)
	long := w.longer(5 * time.Second)
	require.Len(t, long, 1)
	require.Equal(t, one, long[0].object)
	require.Equal(t, 9*time.Second, long[0].took)
	require.Contains(t, long[0].String(), "a/one waited 9s")
	require.Len(t, w.longer(0), 2)
}
