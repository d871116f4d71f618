package reviews

import (
	"fmt"
	"slices"
	"time"

	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

// Outcome is the outcome of one create, about which the apiserver sends two reviews: one to the
// mutating webhook, and one to the validating webhook.
type Outcome struct {
	Start, End time.Time
	Namespace  string
	Name       string
	// Mutated and Validated are the reviewers that answered; zero if the create failed.
	Mutated, Validated v2.Reviewer
	Err                error
}

// PerCreate is the number of reviews about one create.
const PerCreate = 2

// Window is a span of time.
type Window struct{ From, To time.Time }

func (w Window) touches(o Outcome) bool { return o.Start.Before(w.To) && o.End.After(w.From) }

// cutWithin is how long after the death of its agent a review that was under way may fail: the
// apiserver finds the connection closed, on a busy machine a while later, and does not wait for a
// timeout, which would be ten seconds.
const cutWithin = 5 * time.Second

// noticedWithin is how long the apiserver may still send requests on a connection that the other
// side has closed, until its goroutine that reads from it has run.
const noticedWithin = time.Second

// cut reports whether an outcome failed because an agent died in the window.
func (w Window) cut(o Outcome) bool {
	return Window{w.From, w.To.Add(noticedWithin)}.touches(o) && !o.End.After(w.To.Add(cutWithin))
}

// Tenure is a time in which one version owns a namespace, and all agents know that.
type Tenure struct {
	Namespace, Version string
	From               time.Time
	To                 time.Time // zero: until now
}

func (t Tenure) covers(o Outcome) bool {
	return t.Namespace == o.Namespace && !o.Start.Before(t.From) && (t.To.IsZero() || !o.End.After(t.To))
}

// Checker finds which outcomes are wrong.
type Checker struct {
	// Tenures are the owners, which must answer. Outside of them any version may.
	Tenures []Tenure
	// Away are the times in which an agent was killed or stopped: the webhook of a pod without
	// an agent answers reviews of all namespaces by itself.
	Away []Window
	// Dying are the times from a SIGKILL until all connections of the process are closed. No
	// other process can answer the reviews that were under way on them, and the apiserver
	// does not repeat a review.
	Dying []Window
}

// Verdict counts outcomes.
type Verdict struct {
	Reviews   int // of creates that ended
	Misrouted int // creates of which another version answered a review than the owner
	Failed    int // creates
	Cut       int // creates that failed because their agent was killed
	Checked   int // creates that had a known owner
	Findings  []string
}

const maxFindings = 5

// Check returns the counts of some outcomes.
func (j *Checker) Check(outcomes []Outcome) (v Verdict) {
	found := func(o Outcome, format string, args ...any) {
		if len(v.Findings) < maxFindings {
			v.Findings = append(v.Findings, fmt.Sprintf("a create in %s at %s ", o.Namespace, o.Start.Format("15:04:05.000"))+fmt.Sprintf(format, args...))
		}
	}
	for _, o := range outcomes {
		v.Reviews += PerCreate
		if o.Err != nil {
			if slices.ContainsFunc(j.Dying, func(w Window) bool { return w.cut(o) }) {
				v.Cut++
				continue
			}
			v.Failed++
			found(o, "failed: %v", o.Err)
			continue
		}
		i := slices.IndexFunc(j.Tenures, func(t Tenure) bool { return t.covers(o) })
		if i < 0 || slices.ContainsFunc(j.Away, func(w Window) bool { return w.touches(o) }) {
			continue
		}
		v.Checked++
		if owner := j.Tenures[i].Version; o.Mutated.Version != owner || o.Validated.Version != owner {
			v.Misrouted++
			found(o, "was mutated by %+v and validated by %+v, not by version %s", o.Mutated, o.Validated, owner)
		}
	}
	return v
}
