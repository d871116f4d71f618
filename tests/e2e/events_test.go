package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentkube "github.com/ctrlmesh/ctrlmesh/agent/kube"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
)

// An Event that occurs again is one object with a count. If somebody has deleted it, it is
// written anew.
func TestEventOfAnAgentIsWrittenOnce(t *testing.T) {
	ns := namespace(t, "events")
	c, err := agentkube.New(cluster.Config)
	require.NoError(t, err)
	events := c.Events(slog.New(slog.DiscardHandler))
	go events.Run(t.Context())

	var first *eventsv1.Event
	telemetry.NewRecorder(func(e *eventsv1.Event) { first = e }, "node1").Pod(pods.Pod{UID: "a", Namespace: ns, Name: "a"}, "NotCaptured", "tested")
	events.Write(first)
	soon := func(count int32) eventsv1.Event {
		var seen eventsv1.EventList
		until(t, fmt.Sprintf("an Event that occurred %d times", count), func(ctx context.Context) error {
			if err := cluster.List(ctx, &seen, client.InNamespace(ns)); err != nil {
				return err
			}
			found := len(seen.Items) == 1 && (count == 1 || seen.Items[0].Series != nil && seen.Items[0].Series.Count == count)
			return orElse(found, fmt.Sprint(seen.Items))
		})
		return seen.Items[0]
	}
	soon(1)
	write := func(count int32) {
		again := first.DeepCopy()
		again.Series = &eventsv1.EventSeries{Count: count, LastObservedTime: metav1.NowMicro()}
		events.Write(again)
	}
	write(2)
	seen := soon(2)
	require.Equal(t, "tested", seen.Note)
	require.NoError(t, cluster.Delete(t.Context(), &seen))
	write(3)
	soon(3)
}
