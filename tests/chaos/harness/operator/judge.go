package operator

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// Evidence returns what the audit log has of the operator: the states of its shards, and all
// its writes that take effect.
func (o *Operator) Evidence() ([]audit.State, []audit.Request, error) {
	root := types.NamespacedName{Namespace: o.Home, Name: Name}
	states, requests, err := o.Testbed.Evidence(o.began, root, harness.ProbeAccount)
	return states, slices.DeleteFunc(requests, func(r audit.Request) bool {
		return !r.Writes() || r.DryRun() || r.Group != tallyv1.GroupVersion.Group
	}), err
}

// judge stops the writer and counts the outcome of the part.
func (o *Operator) judge(ctx context.Context) error {
	o.CheckWaits(ctx)
	if err := o.judgeOwners(ctx); err != nil {
		return err
	}
	states, writes, err := o.Evidence()
	if err != nil {
		return err
	}
	j := audit.Check(states, writes, o.APIServerRestarts)
	o.Counts.DoubleWrites += len(j.Foreign) + len(j.Shared)
	o.LogViolations(j)
	if len(j.Unknown) > 0 {
		o.Result.Doubt("%s: %d writes are by pods of no shard: %s", o.Part, len(j.Unknown), j.Unknown[0])
	}
	o.RequireEvidence(states, writes)
	moved := audit.Handovers(states)
	var took []time.Duration
	for _, h := range moved {
		took = append(took, h.Took())
	}
	o.Counts.addHandovers(o.Part, took)
	o.Logf("  %d handovers, half of them in %v, the slowest took %v; %d writes, %d in what was another's", len(moved),
		stats.Percentile(took, 0.5).Round(time.Millisecond), stats.Percentile(took, 1).Round(time.Millisecond), j.Writes, len(j.Foreign))
	return nil
}

// judgeOwners counts the tenants that no shard owns in the end.
func (o *Operator) judgeOwners(ctx context.Context) error {
	root, err := o.ShardingConfig(ctx)
	if err != nil || root.Status.Root == nil {
		return err
	}
	orphans, err := o.unowned(root.Status.Root)
	if err != nil {
		return err
	}
	o.Counts.Orphans += len(orphans)
	if len(orphans) > 0 {
		o.Logf("  ! no shard owns %d tenants, such as %s", len(orphans), orphans[0])
	}
	return nil
}

// RequireEvidence records a doubt if the audit log has no states or no writes.
func (o *Operator) RequireEvidence(states []audit.State, writes []audit.Request) {
	if len(states) == 0 || len(writes) == 0 {
		o.Result.Doubt("%s: the audit log has %d states and %d writes: is its policy that of tests/cluster?", o.Part, len(states), len(writes))
	}
}

// LogViolations prints some of the violations that a judgement found.
func (o *Operator) LogViolations(j audit.Findings) {
	harness.LogSome(o.Testbed, 5, "  ! %s", j.Foreign)
	harness.LogSome(o.Testbed, 3, "  ! %s", j.Shared)
}

// CheckWaits stops the writer, and counts the objects that were not reconciled, or only after
// too long.
func (o *Operator) CheckWaits(ctx context.Context) {
	if o.Writer == nil {
		return
	}
	lost, long, starved, err := o.Writer.Finish(ctx)
	o.Result.DoubtErr(o.Part, err)
	long = slices.DeleteFunc(long, func(w wait) bool { return w.object.Namespace == o.Trial })
	o.Counts.Lost += len(lost)
	o.Counts.Orphans += len(long)
	harness.LogSome(o.Testbed, 3, "  ! %s", lost)
	harness.LogSome(o.Testbed, 3, "  ! %s", long)
	if len(starved) > 0 {
		o.Result.Doubt("%s: the operator was too slow for a result: %d objects that it received starved in its queue: %s", o.Part, len(starved), starved[0])
	}
}
