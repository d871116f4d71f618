package status

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// condition is what a condition says.
type condition struct {
	status  bool
	reason  v1alpha1.Reason
	message string
}

// impeded is a condition that is false because of an obstacle.
func impeded(by *locks.Obstacle, members string) *condition {
	return &condition{false, by.Reason, members + "; " + by.Message}
}

// first returns what the first stage that applies says, and otherwise if none does.
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
	next := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: string(is.reason), Message: is.message,
		ObservedGeneration: c.generation, LastTransitionTime: metav1.NewTime(c.now)}
	if is.status {
		next.Status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(&c.out.Conditions, next)
}

// unreadyFor is how long Ready has not been true.
func (c conditionsOf) unreadyFor() time.Duration {
	ready := meta.FindStatusCondition(c.out.Conditions, v1alpha1.ConditionReady)
	if ready == nil || ready.Status == metav1.ConditionTrue {
		return 0
	}
	return c.now.Sub(ready.LastTransitionTime.Time)
}

// leading sets the LeaderMissing condition.
func (c conditionsOf) leading(missing *locks.Obstacle) {
	if missing != nil {
		c.set(v1alpha1.ConditionLeaderMissing, condition{true, missing.Reason, missing.Message})
		return
	}
	c.set(v1alpha1.ConditionLeaderMissing, condition{false, v1alpha1.ReasonLed, ""})
}
