package adoption

import (
	"slices"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
)

// Result is how a command ended.
type Result struct {
	Workload string `json:"workload"`
	// Done means that the operator is adopted, or removed.
	Done bool `json:"done"`
	// Summary says it in one line.
	Summary string `json:"summary"`
	// Changed are the actions of this run; none if nothing was left to do.
	Changed []Action `json:"changed"`
	// Leaders are those of the shards, after an adoption.
	Leaders []string `json:"leaders,omitempty"`
	// Problems must be fixed first.
	Problems []string `json:"problems,omitempty"`
	// Waiting is what the command waited for when its time was over.
	Waiting string `json:"waiting,omitempty"`
	// Do is what a user can do about it, usually a command.
	Do string `json:"do,omitempty"`
}

// WriteText implements render.Report.
func (r Result) WriteText(t *render.Text) {
	problems := r.Problems
	if r.Waiting != "" {
		problems = append(slices.Clone(problems), r.Waiting)
	}
	t.Outcome(problems, r.Do, r.Summary)
}
