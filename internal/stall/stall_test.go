package stall_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/internal/stall"
)

func TestIdleMachineIsNotLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := stall.Measure(t)
		time.Sleep(time.Second)
		require.Zero(t, m.Total())
	})
}

func TestDelaysAreAddedUp(t *testing.T) {
	m := stall.Measure(t)
	require.Eventually(t, func() bool { return m.Total() > 0 }, time.Minute, time.Millisecond, "no timer is exact")
}
