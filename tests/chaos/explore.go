package main

import (
	"context"
	"fmt"

	"github.com/ctrlmesh/ctrlmesh/manager/handover/explore"
)

// explored goes through the states of small worlds, without a cluster.
func explored(_ context.Context, _ *world, r *result) error {
	report, err := explore.Run(explore.Quick()...)
	if err != nil {
		return fmt.Errorf("exploring: %w", err)
	}
	r.sharding.explored = report.States
	if report.Violation != "" {
		return fmt.Errorf("exploring: %s", report.Violation)
	}
	return nil
}
