// Package sharding is the chaos suite of shards: it moves keys from shard to shard while
// everything breaks, and judges every write by the audit log.
package sharding

import (
	"context"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
)

// suite is the state of a run.
type suite struct {
	*operator.Operators
	counts counts
}

// New returns the sharding suite. Each part has an operator of its own.
func New(w *harness.Testbed, r *harness.Result) harness.Suite {
	s := &suite{Operators: operator.New(w, r)}
	return harness.Suite{
		Name: "sharding",
		Parts: []harness.Part{
			{Name: "explore", Run: s.explore},
			{Name: "scale", Run: s.scale},
			{Name: "canary", Run: s.canary},
			{Name: "restart", Run: s.restart},
			{Name: "storm", Run: s.storm},
			{Name: "subsets", Run: s.subsets},
			{Name: "written", Run: s.written},
			{Name: "edits", Run: s.edits},
			{Name: "rollout", Run: s.rollout},
			{Name: "shadow", Run: s.shadow},
			{Name: "clusters", Run: s.clusters},
			{Name: "balance", Run: s.balance},
			{Name: "failover", Run: s.failover},
			{Name: "adoption", Run: s.adoption},
			{Name: "restore", Run: s.restore},
			{Name: "unfenced", Run: s.unfenced},
		},
		Counts: func() []harness.Count { return s.counts.list(s.Counts, r.Ran) },
	}
}

// shardedOperator is an operator whose disruptions are counted.
type shardedOperator struct {
	*operator.Operator
	counts *counts
}

// run runs the operator while do changes or breaks something.
func (s *suite) run(ctx context.Context, part string, spec meshv1alpha1.ShardingConfigSpec, do func(context.Context, *shardedOperator) error) error {
	return s.Run(ctx, part, spec, func(ctx context.Context, o *operator.Operator) error {
		return do(ctx, &shardedOperator{o, &s.counts})
	})
}

// start starts the operator. If it returns one, even with an error, the caller must Remove it.
func (s *suite) start(ctx context.Context, part string, spec meshv1alpha1.ShardingConfigSpec) (*shardedOperator, error) {
	o, err := s.Start(ctx, part, spec)
	if o == nil {
		return nil, err
	}
	return &shardedOperator{o, &s.counts}, err
}
