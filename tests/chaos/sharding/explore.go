package sharding

import (
	"context"
	"fmt"

	"github.com/ctrlmesh/ctrlmesh/tests/explore"
	"github.com/ctrlmesh/ctrlmesh/tests/explore/edits"
	"github.com/ctrlmesh/ctrlmesh/tests/explore/search"
)

// explore checks handovers and edits of roots in the states of small models, without a cluster.
func (s *suite) explore(context.Context) error {
	for _, run := range []func() (search.Result, error){
		func() (search.Result, error) { return explore.Run(explore.Quick()...) },
		func() (search.Result, error) { return edits.Run(edits.Quick()...) },
	} {
		r, err := run()
		if err != nil {
			return fmt.Errorf("exploring: %w", err)
		}
		s.counts.explored += r.States
		if r.Violation != "" {
			return fmt.Errorf("exploring: %s", r.Violation)
		}
	}
	return nil
}
