package agent

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"

	"github.com/ctrlmesh/ctrlmesh/agent/pods"
)

const (
	// eventEvery is how often one reason is told of one object.
	eventEvery = time.Minute
	// maxTold bounds what is remembered of what was told.
	maxTold = 4096
	// maxNote is the API's bound.
	maxNote = 1024
)

// recorder tells users, by Events, what befell their pods and this node. It is
// safe for concurrent use. What comes too fast is left out: it is in the log.
type recorder struct {
	events events.EventRecorder
	node   string
	limit  *rate.Limiter

	mu   sync.Mutex
	told map[told]time.Time
}

type told struct {
	uid    types.UID
	reason string
}

func newRecorder(r events.EventRecorder, node string) *recorder {
	return &recorder{events: r, node: node, limit: rate.NewLimiter(1, 25), told: map[told]time.Time{}}
}

// pod warns of a pod.
func (r *recorder) pod(p pods.Pod, reason, note string) {
	if p.Name == "" {
		return // a pod that is only known to the manager yet
	}
	r.record(&corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID),
	}, reason, note)
}

// ofNode warns of this node.
func (r *recorder) ofNode(reason, note string) {
	// The kubelet, too, takes the name for the uid.
	r.record(&corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.node, UID: types.UID(r.node)}, reason, note)
}

func (r *recorder) record(about *corev1.ObjectReference, reason, note string) {
	if !r.may(told{about.UID, reason}) {
		return
	}
	if len(note) > maxNote {
		note = note[:maxNote-3] + "..."
	}
	r.events.Eventf(about, nil, corev1.EventTypeWarning, reason, "Capture", "%s", note)
}

func (r *recorder) may(t told) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if now.Sub(r.told[t]) < eventEvery || !r.limit.AllowN(now, 1) {
		return false
	}
	if len(r.told) >= maxTold {
		for k, at := range r.told {
			if now.Sub(at) >= eventEvery {
				delete(r.told, k)
			}
		}
		if len(r.told) >= maxTold {
			return false
		}
	}
	r.told[t] = now
	return true
}
