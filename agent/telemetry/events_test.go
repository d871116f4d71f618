package telemetry

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/events"

	"github.com/ctrlmesh/ctrlmesh/agent/pods"
)

func TestEventsAreBounded(t *testing.T) {
	fake := events.NewFakeRecorder(1000)
	r := NewRecorder(fake, "node1")
	p := pods.Pod{UID: "a", Namespace: "ns", Name: "a"}
	r.Pod(p, "NotCaptured", strings.Repeat("x", 5000))
	r.Pod(p, "NotCaptured", "again")
	r.Pod(p, "TokenRefused", "another reason")
	r.Pod(pods.Pod{UID: "b"}, "NotCaptured", "without a name no Event is recorded")
	require.Len(t, fake.Events, 2)
	assert.Less(t, len(<-fake.Events), 1100)

	for i := range 200 {
		r.Pod(pods.Pod{UID: fmt.Sprint("flood-", i), Namespace: "ns", Name: "x"}, "NotCaptured", "flood")
	}
	assert.Less(t, len(fake.Events), 50)
	assert.Less(t, time.Since(r.recorded[eventKey{"a", "NotCaptured"}]), time.Minute)
}
