package status

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/text"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// condition is the content of a condition.
type condition struct {
	status  bool
	reason  v1alpha1.Reason
	message string
}

// maxMessage bounds the message of a condition, of which the apiserver accepts 32 KiB: some
// consist of texts that pods supply, such as the holder of a lock.
const maxMessage = 16 << 10

// set sets a condition of an object. A status that did not change keeps its time.
func (c condition) set(conditions *[]metav1.Condition, kind string, generation int64, now time.Time) {
	next := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: string(c.reason), Message: text.Bounded(c.message, maxMessage),
		ObservedGeneration: generation, LastTransitionTime: metav1.NewTime(now)}
	if c.status {
		next.Status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(conditions, next)
}

// impeded returns a condition that is false because of an obstacle.
func impeded(by *locks.Obstacle, members string) *condition {
	return &condition{false, by.Reason, members + "; " + by.Message}
}

// first returns the result of the first stage that applies; otherwise if none does.
func first(otherwise condition, stages ...func() *condition) condition {
	for _, stage := range stages {
		if c := stage(); c != nil {
			return *c
		}
	}
	return otherwise
}

// conditionsOf sets the conditions of a status.
type conditionsOf struct {
	out        *v1alpha1.ShardingConfigStatus
	generation int64
	now        time.Time
}

func (c conditionsOf) set(kind string, is condition) {
	is.set(&c.out.Conditions, kind, c.generation, c.now)
}

// unreadyFor returns how long Ready has not been true.
func (c conditionsOf) unreadyFor() time.Duration {
	ready := meta.FindStatusCondition(c.out.Conditions, v1alpha1.ConditionReady)
	if ready == nil || ready.Status == metav1.ConditionTrue {
		return 0
	}
	return c.now.Sub(ready.LastTransitionTime.Time)
}

// leading sets the LeaderMissing condition.
func (c conditionsOf) leading(missing *locks.Obstacle) {
	is := condition{false, v1alpha1.ReasonLed, ""}
	if missing != nil {
		is = condition{true, missing.Reason, missing.Message}
	}
	c.set(v1alpha1.ConditionLeaderMissing, is)
}

// maxNote bounds the note of an Event, of which the apiserver accepts 1 KiB.
const maxNote = 1000

// Note returns a text bounded to the length of an Event's note.
func Note(s string) string { return text.Bounded(s, maxNote) }
