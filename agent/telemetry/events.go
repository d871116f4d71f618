package telemetry

import (
	"maps"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"

	"github.com/ctrlmesh/ctrlmesh/agent/pods"
)

const (
	// eventInterval is the shortest time between Events of one reason for one object.
	eventInterval = time.Minute
	// maxRecorded bounds the memory of recorded Events.
	maxRecorded = 4096
	// maxNote is the API's bound, in bytes.
	maxNote = 1024
)

// Recorder records Events of pods and of this node. It is safe for concurrent use. It
// drops Events beyond its rate: the log has them.
type Recorder struct {
	events events.EventRecorder
	node   string
	limit  *rate.Limiter

	mu       sync.Mutex
	recorded map[eventKey]time.Time
}

type eventKey struct {
	uid    types.UID
	reason string
}

// NewRecorder returns a Recorder for the named node.
func NewRecorder(r events.EventRecorder, node string) *Recorder {
	return &Recorder{events: r, node: node, limit: rate.NewLimiter(1, 25), recorded: map[eventKey]time.Time{}}
}

// Pod records a warning about a pod. A pod without a name is known to the manager only.
func (r *Recorder) Pod(p pods.Pod, reason, note string) {
	if p.Name == "" {
		return
	}
	r.record(&corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID),
	}, reason, note)
}

// Node records a warning about this node.
func (r *Recorder) Node(reason, note string) {
	// Like the kubelet, use the name as the uid.
	r.record(&corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.node, UID: types.UID(r.node)}, reason, note)
}

func (r *Recorder) record(about *corev1.ObjectReference, reason, note string) {
	if !r.allow(eventKey{about.UID, reason}) {
		return
	}
	if len(note) > maxNote {
		note = note[:maxNote-3] + "..."
	}
	r.events.Eventf(about, nil, corev1.EventTypeWarning, reason, "Capture", "%s", note)
}

func (r *Recorder) allow(k eventKey) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if now.Sub(r.recorded[k]) < eventInterval || !r.limit.AllowN(now, 1) {
		return false
	}
	if len(r.recorded) >= maxRecorded {
		maps.DeleteFunc(r.recorded, func(_ eventKey, at time.Time) bool { return now.Sub(at) >= eventInterval })
		if len(r.recorded) >= maxRecorded {
			return false
		}
	}
	r.recorded[k] = now
	return true
}
