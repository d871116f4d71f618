package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Breakers is the state of CircuitBreakers, some seconds ago.
type Breakers struct {
	Breakers []Breaker `json:"circuitBreakers"`
	// Open are the breakers that are not closed, by pod and rule.
	Open []OpenBreaker `json:"open"`
	// Notes say what the report lacks.
	Notes []string `json:"notes,omitempty"`
}

// Breaker is the state of a CircuitBreaker.
type Breaker struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// State is the reason of the condition Ready.
	State       string `json:"state"`
	Pods        int32  `json:"pods"`
	PodsInForce int32  `json:"podsInForce"`
	// Open is the number of pods with a breaker that is not closed.
	Open    int32 `json:"openPods"`
	Refused int64 `json:"refused"`
}

// OpenBreaker is the breaker of a rule in a pod.
type OpenBreaker struct {
	Namespace string                `json:"namespace"`
	Name      string                `json:"name"`
	Rule      string                `json:"rule"`
	Pod       string                `json:"pod"`
	State     v1alpha1.BreakerState `json:"state"`
	Since     *time.Time            `json:"since,omitempty"`
	// ClosesAfter is the time from which on a trial request may close it.
	ClosesAfter *time.Time `json:"closesAfter,omitempty"`
	// Forced means that its triggerPolicy keeps it open.
	Forced bool `json:"forced"`
	// Closes says when it closes.
	Closes string `json:"closes"`
}

// sleepingWindow is how long a breaker stays open by default.
const sleepingWindow = 10 * time.Second

// BreakersOf returns the state of the CircuitBreakers in a snapshot, or of one name; of all if it is
// empty.
func BreakersOf(s *snapshot.Snapshot, name string) Breakers {
	out := Breakers{Breakers: []Breaker{}, Open: []OpenBreaker{}}
	for i := range s.Subjects.Breakers {
		b := &s.Subjects.Breakers[i]
		if name != "" && b.Name != name {
			continue
		}
		out.Breakers = append(out.Breakers, Breaker{
			Namespace: b.Namespace, Name: b.Name, State: stateOf(b.Status.Conditions), Pods: b.Status.Pods, PodsInForce: b.Status.PodsInForce, Open: b.Status.Opened, Refused: b.Status.Refused,
		})
		open, pods := OpenOf(b, s.Now)
		out.Open = append(out.Open, open...)
		if more := b.Status.Opened - pods; more > 0 {
			out.Notes = append(out.Notes, fmt.Sprintf("breakers of %s/%s are open in %d more pods, which its status does not list", b.Namespace, b.Name, more))
		}
	}
	slices.SortFunc(out.Breakers, func(a, b Breaker) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	slices.SortFunc(out.Open, func(a, b OpenBreaker) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Rule, b.Rule), strings.Compare(a.Pod, b.Pod))
	})
	return out
}

// OpenOf returns the breakers of a CircuitBreaker that are not closed, and the number of their pods.
func OpenOf(b *v1alpha1.CircuitBreaker, now time.Time) (out []OpenBreaker, pods int32) {
	for _, t := range b.Status.TargetStatus {
		before := len(out)
		for _, l := range t.LimitingSnapshots {
			if l.State == v1alpha1.BreakerClosed {
				continue
			}
			one := OpenBreaker{Namespace: b.Namespace, Name: b.Name, Rule: l.Name, Pod: t.PodName, State: l.State}
			if l.LastTransitionTime != nil {
				one.Since = new(l.LastTransitionTime.UTC())
			}
			one.closing(b, now)
			out = append(out, one)
		}
		if len(out) > before {
			pods++
		}
	}
	return out, pods
}

// closing fills in when a breaker closes.
func (o *OpenBreaker) closing(b *v1alpha1.CircuitBreaker, now time.Time) {
	rule := collect.Find(b.Spec.RateLimitings, func(r v1alpha1.Limiting) bool { return r.Name == o.Rule })
	if rule == nil {
		o.Closes = "soon: its rule was removed"
		return
	}
	window := sleepingWindow
	if p := rule.RecoverPolicy; p != nil && p.SleepingWindowSize != nil {
		if d, err := time.ParseDuration(string(*p.SleepingWindowSize)); err == nil {
			window = d
		}
	}
	switch {
	case rule.TriggerPolicy == v1alpha1.TriggerForceOpened:
		o.Forced, o.Closes = true, "never: its triggerPolicy is ForceOpened"
	case rule.RecoverPolicy != nil && rule.RecoverPolicy.Type == v1alpha1.RecoverManual:
		o.Closes = fmt.Sprintf("by kubectl ctrlmesh breaker close %s -n %s", o.Name, o.Namespace)
	case o.State == v1alpha1.BreakerHalfOpen || o.Since == nil || !now.Before(o.Since.Add(window)):
		o.Closes = "when the next trial request succeeds"
	default:
		o.ClosesAfter = new(o.Since.Add(window))
		o.Closes = fmt.Sprintf("when a trial request succeeds, from %s on", o.ClosesAfter.Format(time.RFC3339))
	}
}

// Findings reports whether a breaker is open.
func (b Breakers) Findings() bool { return len(b.Open) > 0 || len(b.Notes) > 0 }

// WriteText implements render.Report.
func (b Breakers) WriteText(t *render.Text) {
	if len(b.Breakers) == 0 {
		t.Line("there is no CircuitBreaker")
	}
	var rows [][]string
	for _, one := range b.Breakers {
		rows = append(rows, []string{one.Namespace, one.Name, one.State, render.Number(one.Pods), render.Number(one.PodsInForce), render.Number(one.Open), render.Number(one.Refused)})
	}
	t.Table([]string{"NAMESPACE", "CIRCUITBREAKER", "STATE", "PODS", "IN FORCE", "OPEN IN", "REFUSED"}, rows)
	rows = nil
	for _, o := range b.Open {
		rows = append(rows, []string{o.Namespace, o.Name, o.Rule, o.Pod, string(o.State), render.Time(o.Since), o.Closes})
	}
	t.Table([]string{"NAMESPACE", "CIRCUITBREAKER", "RULE", "POD", "BREAKER", "SINCE", "CLOSES"}, rows)
	for _, note := range b.Notes {
		t.Line("%s", note)
	}
}

// stateOf returns the reason of the condition Ready of a CircuitBreaker or FaultInjection.
func stateOf(conditions []metav1.Condition) string {
	if ready := meta.FindStatusCondition(conditions, v1alpha1.ConditionReady); ready != nil {
		return ready.Reason
	}
	return "Unknown"
}

// inactive are the reasons with which no rule of a CircuitBreaker or FaultInjection applies.
var inactive = []v1alpha1.Reason{v1alpha1.ReasonDisabled, v1alpha1.ReasonExpired, v1alpha1.ReasonForbidden, v1alpha1.ReasonInvalid}

// Active returns why rules may apply to pods, by the conditions of a CircuitBreaker or FaultInjection;
// empty if all agents have confirmed that none does.
func Active(conditions []metav1.Condition) string {
	ready := meta.FindStatusCondition(conditions, v1alpha1.ConditionReady)
	switch {
	case ready == nil:
		return "its status is not written yet: see whether the manager runs"
	case !slices.Contains(inactive, v1alpha1.Reason(ready.Reason)) || strings.Contains(ready.Message, v1alpha1.EarlierInForce):
		return fmt.Sprintf("%s: %s", ready.Reason, ready.Message)
	}
	return ""
}

// NotInForce returns why rules do not apply to all selected pods, by the conditions of a CircuitBreaker;
// empty if they do, or if no pod is selected.
func NotInForce(conditions []metav1.Condition) string {
	ready := meta.FindStatusCondition(conditions, v1alpha1.ConditionReady)
	switch {
	case ready == nil:
		return "its status is not written yet: see whether the manager runs"
	case ready.Status != metav1.ConditionTrue && ready.Reason != string(v1alpha1.ReasonNoPods):
		return fmt.Sprintf("%s: %s", ready.Reason, ready.Message)
	}
	return ""
}

// Change is what a command changed, and whether that has taken effect.
type Change struct {
	Done bool `json:"done"`
	// Changed are the objects that the command changed.
	Changed []string `json:"changed"`
	Summary string   `json:"summary"`
	// Waiting says what was missing when the time was over, and Do what shows why.
	Waiting []string `json:"waiting,omitempty"`
	Do      string   `json:"do,omitempty"`
}

// WriteText implements render.Report.
func (c Change) WriteText(t *render.Text) { t.Outcome(c.Waiting, c.Do, c.Summary) }
