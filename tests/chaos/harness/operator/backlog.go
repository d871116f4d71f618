package operator

import (
	"bufio"
	"context"
	"encoding/json"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	// backlogEvery is how often the backlog is read while an object has waited for longer
	// than backlogAfter.
	backlogEvery = 10 * time.Second
	backlogAfter = 20 * time.Second
)

// readBacklog reads from the logs of the operator's pods which cached objects wait in their
// queues. Such a wait is no fault of the mesh: it delivered the objects.
func (w *Writer) readBacklog(ctx context.Context, _ int) {
	w.mu.Lock()
	late := w.waits.anyLongerThan(backlogAfter, time.Now())
	w.mu.Unlock()
	if !late {
		return
	}
	var pods corev1.PodList
	if err := w.List(ctx, &pods, client.InNamespace(w.home), client.MatchingLabels{"app": Name}); err != nil {
		return // the apiserver is unavailable
	}
	since := int64((2 * backlogEvery).Seconds())
	for _, pod := range pods.Items {
		logs, err := w.Clientset.CoreV1().Pods(w.home).GetLogs(pod.Name, &corev1.PodLogOptions{SinceSeconds: &since}).DoRaw(ctx)
		if err != nil {
			continue // it starts or exits
		}
		w.mu.Lock()
		for object, queued := range parseBacklog(string(logs)) {
			w.waits.queued(object, pod.Name, queued)
		}
		w.mu.Unlock()
	}
}

// parseBacklog returns how long objects (namespace/name) have waited in a queue, by the log of
// an operator's pod.
func parseBacklog(logs string) map[string]time.Duration {
	out := map[string]time.Duration{}
	lines := bufio.NewScanner(strings.NewReader(logs))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			Msg     string
			Seconds map[string]float64
		}
		if json.Unmarshal(lines.Bytes(), &line) != nil || line.Msg != tallyv1.BacklogMessage {
			continue
		}
		for object, seconds := range line.Seconds {
			out[object] = max(out[object], time.Duration(seconds*float64(time.Second)))
		}
	}
	return out
}
