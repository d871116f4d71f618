package telemetry

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/agent/pods"
)

const (
	// eventInterval is the shortest time between Events of one reason for one object.
	eventInterval = time.Minute
	// seriesEnd is how long after its last occurrence an Event is not the same any more.
	seriesEnd = 6 * time.Minute
	// maxRecorded bounds the memory of recorded Events.
	maxRecorded = 4096
	// maxNote is the API's bound, in bytes.
	maxNote = 1024

	reporter = "ctrlmesh-agent"
)

// Recorder records Events of pods and of this node. It is safe for concurrent use. It
// drops Events beyond its rate: the log has them. An Event that occurs again within six
// minutes becomes a series.
type Recorder struct {
	write func(*eventsv1.Event)
	node  string
	limit *rate.Limiter

	mu       sync.Mutex
	recorded map[eventKey]*eventsv1.Event // as written last
}

type eventKey struct {
	uid    types.UID
	reason string
}

// NewRecorder returns a Recorder for the named node. It calls write, which must not block and
// must not change the Event.
func NewRecorder(write func(*eventsv1.Event), node string) *Recorder {
	return &Recorder{write: write, node: node, limit: rate.NewLimiter(1, 25), recorded: map[eventKey]*eventsv1.Event{}}
}

// Pod records a warning about a pod. A pod without a name is known to the manager only.
func (r *Recorder) Pod(p pods.Pod, reason, note string) {
	if p.Name == "" {
		return
	}
	r.record(corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID),
	}, reason, note)
}

// Node records a warning about this node.
func (r *Recorder) Node(reason, note string) {
	// Like the kubelet, use the name as the uid.
	r.record(corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.node, UID: types.UID(r.node)}, reason, note)
}

func (r *Recorder) record(about corev1.ObjectReference, reason, note string) {
	if event := r.next(about, reason, note, metav1.NowMicro()); event != nil {
		r.write(event)
	}
}

// next returns what to write about an object: a new Event, the one of before as a series, or
// nothing.
func (r *Recorder) next(about corev1.ObjectReference, reason, note string, now metav1.MicroTime) *eventsv1.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := eventKey{about.UID, reason}
	before, since := r.recorded[key], seriesEnd
	if before != nil {
		since = now.Sub(last(before))
	}
	if since < eventInterval || !r.limit.AllowN(now.Time, 1) || before == nil && !r.hasRoom(now.Time) {
		return nil
	}
	event := first(about, reason, note, r.node, now)
	if since < seriesEnd {
		event = again(before, now)
	}
	r.recorded[key] = event
	return event
}

func (r *Recorder) hasRoom(now time.Time) bool {
	if len(r.recorded) >= maxRecorded {
		maps.DeleteFunc(r.recorded, func(_ eventKey, e *eventsv1.Event) bool { return now.Sub(last(e)) >= seriesEnd })
	}
	return len(r.recorded) < maxRecorded
}

func first(about corev1.ObjectReference, reason, note, node string, now metav1.MicroTime) *eventsv1.Event {
	if len(note) > maxNote {
		note = strings.ToValidUTF8(note[:maxNote-3], "") + "..."
	}
	namespace := about.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // of Events of what has no namespace
	}
	return &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s.%x", about.Name, now.UnixNano()), Namespace: namespace},
		EventTime:  now, Type: corev1.EventTypeWarning, Reason: reason, Action: "Capture", Note: note, Regarding: about,
		ReportingController: reporter, ReportingInstance: reporter + "-" + node,
	}
}

// again returns an Event with one occurrence more.
func again(before *eventsv1.Event, now metav1.MicroTime) *eventsv1.Event {
	event, count := before.DeepCopy(), int32(2)
	if before.Series != nil {
		count = before.Series.Count + 1
	}
	event.Series = &eventsv1.EventSeries{Count: count, LastObservedTime: now}
	return event
}

// last returns when an Event occurred last.
func last(e *eventsv1.Event) time.Time {
	if e.Series != nil {
		return e.Series.LastObservedTime.Time
	}
	return e.EventTime.Time
}
