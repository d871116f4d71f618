package node

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
)

func TestLossIsReportedOnce(t *testing.T) {
	synctest.Test(t, testLossIsReportedOnce)
}

func testLossIsReportedOnce(t *testing.T) {
	var h losses
	assert.Error(t, h.ready(), "nothing was checked yet")
	lost := capture.Loss{UID: "a", Mode: capture.EBPF, Reason: errors.New("detached"), Repair: errors.New("no leave")}
	repaired := capture.Loss{Mode: capture.IPTables, Reason: errors.New("flushed")}

	fresh, again := h.note([]capture.Loss{lost, repaired})
	assert.Equal(t, []capture.Loss{lost, repaired}, fresh)
	assert.Equal(t, []capture.Loss{repaired}, again)

	fresh, again = h.note([]capture.Loss{lost})
	assert.Empty(t, fresh)
	assert.Empty(t, again)
	assert.NoError(t, h.ready(), "one pod does not take the others' agent away")

	_, again = h.note(nil)
	assert.Equal(t, []capture.Loss{lost}, again)
}

func TestAgentWithoutRedirectionIsNotReady(t *testing.T) {
	synctest.Test(t, testAgentWithoutRedirectionIsNotReady)
}

func testAgentWithoutRedirectionIsNotReady(t *testing.T) {
	var h losses
	h.note([]capture.Loss{{Mode: capture.EBPF, Reason: errors.New("detached"), Repair: errors.New("no leave")}})
	assert.ErrorContains(t, h.ready(), "detached")
	h.note(nil)
	require.NoError(t, h.ready())

	time.Sleep(stalledAfter)
	require.NoError(t, h.ready())
	time.Sleep(time.Nanosecond)
	assert.Error(t, h.ready(), "checks that stopped say nothing")
}
