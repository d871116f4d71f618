package agent

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/events"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
)

func TestALossIsNewOnceAndMendedOnce(t *testing.T) {
	var h health
	assert.Error(t, h.ready(), "nothing was checked yet")
	lost := capture.Loss{UID: "a", Mode: capture.EBPF, Reason: errors.New("detached"), Repair: errors.New("no leave")}
	mended := capture.Loss{Mode: capture.IPTables, Reason: errors.New("flushed")}

	fresh, again := h.note([]capture.Loss{lost, mended})
	assert.Equal(t, []capture.Loss{lost, mended}, fresh)
	assert.Equal(t, []capture.Loss{mended}, again)

	fresh, again = h.note([]capture.Loss{lost})
	assert.Empty(t, fresh)
	assert.Empty(t, again)
	assert.NoError(t, h.ready(), "one pod does not take the others' agent away")

	_, again = h.note(nil)
	assert.Equal(t, []capture.Loss{lost}, again)
}

func TestAnAgentWhoseNodeIsNotRedirectedIsNotReady(t *testing.T) {
	var h health
	h.note([]capture.Loss{{Mode: capture.EBPF, Reason: errors.New("detached"), Repair: errors.New("no leave")}})
	assert.ErrorContains(t, h.ready(), "detached")
	h.note(nil)
	require.NoError(t, h.ready())

	h.last = h.last.Add(-2 * stalledAfter)
	assert.Error(t, h.ready(), "checks that stopped say nothing")
}

func TestEventsAreBounded(t *testing.T) {
	fake := events.NewFakeRecorder(1000)
	r := newRecorder(fake, "node1")
	p := pods.Pod{UID: "a", Namespace: "ns", Name: "a"}
	r.pod(p, "NotCaptured", strings.Repeat("x", 5000))
	r.pod(p, "NotCaptured", "again")
	r.pod(p, "TokenRefused", "another reason")
	r.pod(pods.Pod{UID: "b"}, "NotCaptured", "without a name there is nothing to tell of")
	require.Len(t, fake.Events, 2)
	assert.Less(t, len(<-fake.Events), 1100)

	for i := range 200 {
		r.pod(pods.Pod{UID: fmt.Sprint("flood-", i), Namespace: "ns", Name: "x"}, "NotCaptured", "flood")
	}
	assert.Less(t, len(fake.Events), 50)
	assert.Less(t, time.Since(r.told[told{"a", "NotCaptured"}]), time.Minute)
}
