package writes

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A pod may lose as many writes as it can make.
func TestLostWritesOfAPolicyShareOneTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w Count
		over := make(chan struct{})
		w.Over(func() { close(over) })
		began := time.Now()
		for _, d := range []time.Duration{20 * time.Second, 5 * time.Second, 40 * time.Second} {
			w.Raise()
			w.LowerAfter(d)
		}
		require.EqualValues(t, 1, w.n.Load(), "all count as one")
		<-over
		require.Equal(t, 40*time.Second, time.Since(began))
	})
}
