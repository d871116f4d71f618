package telemetry

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/agent/pods"
)

func TestEventsAreBounded(t *testing.T) {
	var written []*eventsv1.Event
	r := NewRecorder(func(e *eventsv1.Event) { written = append(written, e) }, "node1")
	p := pods.Pod{UID: "a", Namespace: "ns", Name: "a"}
	r.Pod(p, "NotCaptured", strings.Repeat("é", 5000))
	r.Pod(p, "NotCaptured", "again")
	r.Pod(p, "TokenRefused", "another reason")
	r.Pod(pods.Pod{UID: "b"}, "NotCaptured", "without a name no Event is recorded")
	require.Len(t, written, 2)
	assert.LessOrEqual(t, len(written[0].Note), maxNote)
	assert.True(t, utf8.ValidString(written[0].Note), "protobuf and JSON have no other text")
	assert.Equal(t, "ns", written[0].Namespace)

	for i := range 200 {
		r.Pod(pods.Pod{UID: fmt.Sprint("flood-", i), Namespace: "ns", Name: "x"}, "NotCaptured", "flood")
	}
	assert.Less(t, len(written), 50)
	assert.Less(t, time.Since(last(r.recorded[eventKey{"a", "NotCaptured"}])), time.Minute)
}

func TestEventsThatOccurAgainAreASeries(t *testing.T) {
	r := NewRecorder(nil, "node1")
	node := corev1.ObjectReference{Kind: "Node", Name: "node1", UID: "node1"}
	began := time.Now()
	at := func(d time.Duration) *eventsv1.Event {
		return r.next(node, "CaptureUnavailable", "why", metav1.NewMicroTime(began.Add(d)))
	}
	once := at(0)
	require.NotNil(t, once)
	assert.Nil(t, once.Series)
	assert.Equal(t, metav1.NamespaceDefault, once.Namespace)
	assert.Nil(t, at(30*time.Second), "less than a minute later")
	for i, after := range []time.Duration{time.Minute, 6 * time.Minute} {
		e := at(after)
		require.NotNil(t, e)
		assert.Equal(t, once.Name, e.Name)
		require.NotNil(t, e.Series)
		assert.EqualValues(t, 2+i, e.Series.Count)
	}
	assert.Nil(t, once.Series, "what was written is not changed")
	later := at(12 * time.Minute)
	require.NotNil(t, later)
	assert.NotEqual(t, once.Name, later.Name)
	assert.Nil(t, later.Series)
}
