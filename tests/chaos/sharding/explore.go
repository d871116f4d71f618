package sharding

import (
	"context"
	"fmt"

	"github.com/ctrlmesh/ctrlmesh/tests/explore"
	"github.com/ctrlmesh/ctrlmesh/tests/explore/edits"
)

// explore checks handovers and edits of roots in the states of small models, without a cluster.
func (s *suite) explore(context.Context) error {
	report, err := explore.Run(explore.Quick()...)
	if err != nil {
		return fmt.Errorf("exploring: %w", err)
	}
	s.counts.explored = report.States
	if report.Violation != "" {
		return fmt.Errorf("exploring: %s", report.Violation)
	}
	edited, err := edits.Run(edits.Quick()...)
	if err != nil {
		return fmt.Errorf("exploring edits: %w", err)
	}
	s.counts.explored += edited.States
	if edited.Violation != "" {
		return fmt.Errorf("exploring edits: %s", edited.Violation)
	}
	return nil
}
