package sharding

import (
	"context"
	"fmt"

	"github.com/ctrlmesh/ctrlmesh/tests/explore"
)

// explore checks the handover protocol in the states of small models, without a cluster.
func (s *suite) explore(context.Context) error {
	report, err := explore.Run(explore.Quick()...)
	if err != nil {
		return fmt.Errorf("exploring: %w", err)
	}
	s.counts.explored = report.States
	if report.Violation != "" {
		return fmt.Errorf("exploring: %s", report.Violation)
	}
	return nil
}
