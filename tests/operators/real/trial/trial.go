package trial

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Schedule says how long and by which steps an operator is tried.
type Schedule struct {
	// Churn is how long objects change before and between the steps.
	Churn time.Duration
	// Sizes are the numbers of shards, one after the other.
	Sizes []int32
	// Kill is true if a leader is killed.
	Kill bool
	// Say reports progress.
	Say func(format string, args ...any)
}

// Full is the schedule of a complete trial.
func Full(say func(string, ...any)) Schedule {
	return Schedule{Churn: 10 * time.Second, Sizes: []int32{2, 3, 2}, Kill: true, Say: say}
}

// patience is how long a step may take on a busy machine.
const patience = 3 * time.Minute

// trial is the state of one operator's trial.
type trial struct {
	*kube.Cluster
	*Built
	plan  Schedule
	begun kube.Mark
}

// Run tries an operator. An error means that the trial could not be completed; the result then
// says as much as is known.
func Run(ctx context.Context, c *kube.Cluster, b *Built, plan Schedule) (result *Result, err error) {
	start := time.Now()
	t := &trial{Cluster: c, Built: b, plan: plan}
	if result, err = newResult(b, plan); err != nil {
		return result, err
	}
	defer func() {
		result.Took = time.Since(start)
		if err != nil {
			result.Problem = err.Error()
		}
	}()
	if t.begun, err = c.Mark(); err != nil {
		return result, err
	}
	restore, err := withoutControllers(ctx, c, b.Controllers)
	if err != nil {
		return result, err
	}
	// The restored controllers finalise objects that the operator no longer can.
	defer func() { err = errors.Join(err, restore(), t.remove(context.WithoutCancel(ctx))) }()
	if err := t.deploy(ctx); err != nil {
		return result, err
	}
	reference, err := t.reference(ctx)
	if err != nil {
		return result, fmt.Errorf("without the mesh: %w", err)
	}
	return result, t.adopted(ctx, reference, result)
}

// reference runs the workload without the mesh and returns the end state.
func (t *trial) reference(ctx context.Context) ([]endState, error) {
	t.say("%s runs without the mesh", t.Name)
	if err := t.seed(ctx, referenceSet); err != nil {
		return nil, err
	}
	c := t.startChurn(ctx, referenceSet, referenceSet)
	defer c.stop()
	_ = kube.Sleep(ctx, t.plan.Churn)
	if err := c.reconciled(ctx); err != nil {
		return nil, err
	}
	pending, err := c.finish(ctx)
	if err != nil {
		return nil, err
	}
	if len(pending) > 0 {
		return nil, fmt.Errorf("%d changes were not reconciled: %v for one", len(pending), pending[0].object)
	}
	took := percentile(c.samples, referenceSet, 0.99)
	t.say("  a change took %d ms, p99", took)
	state, err := t.settledSnapshot(ctx, referenceSet, time.Duration(took)*time.Millisecond)
	if err != nil {
		return nil, err
	}
	return state, removeNamespaces(ctx, t.Cluster, tenantsOf(referenceSet)...)
}

// adopted takes the operator through adoption and removal while objects change, and judges it.
func (t *trial) adopted(ctx context.Context, reference []endState, result *Result) error {
	if err := t.seed(ctx, adoptedSet); err != nil {
		return err
	}
	c := t.startChurn(ctx, adoptedSet, "unlabelled")
	defer c.stop()
	stepsErr := t.steps(ctx, c, result)
	if stepsErr != nil {
		t.explain(ctx)
	}
	pending, err := c.finish(ctx)
	if err != nil {
		return errors.Join(stepsErr, err)
	}
	result.Unreconciled = len(pending)
	for _, want := range pending[:min(3, len(pending))] {
		t.say("  ! not reconciled: %v, changed in phase %s", want.object, want.phase)
	}
	result.SilentStops = len(c.silent)
	result.AdoptionGapP99 = percentile(c.samples, phaseAdoption, 0.99)
	return errors.Join(stepsErr, t.compare(ctx, reference, result), t.judgeAudit(result))
}

// compare waits until the end state equals the reference, and counts the differences.
func (t *trial) compare(ctx context.Context, reference []endState, result *Result) error {
	var last []string
	err := kube.UntilWithin(ctx, finalWait+t.Unreleased, "the end state", func(ctx context.Context) error {
		state, err := t.snapshot(ctx, adoptedSet)
		if err != nil {
			return err
		}
		if last = differences(reference, state); len(last) > 0 {
			return errors.New("it differs")
		}
		return nil
	})
	result.Differences = len(last)
	for _, d := range last[:min(5, len(last))] {
		t.say("  ! %s", d)
	}
	if len(last) > 0 { // the wait timed out, which the count shows
		return nil
	}
	return err
}

// judgeAudit judges the writes in the audit log.
func (t *trial) judgeAudit(result *Result) error {
	root := types.NamespacedName{Namespace: t.Home, Name: rootName}
	states, requests, err := t.Evidence(t.begun, root, t.account())
	if err != nil {
		return err
	}
	v := judge(states, slices.DeleteFunc(requests, func(r audit.Request) bool { return !t.judged(r) }))
	result.Writes, result.OutsideWrites, result.TwoOwners = v.writes, v.outside, len(v.twoOwners)
	for _, line := range v.twoOwners[:min(5, len(v.twoOwners))] {
		t.say("  ! %s", line)
	}
	if v.writes == 0 {
		return errors.New("the audit log has no write of the operator: is its policy that of tests/cluster?")
	}
	return nil
}

// judged reports whether a request is a write of a divided object in the adopted namespaces.
func (t *trial) judged(r audit.Request) bool {
	return r.Writes() && slices.Contains(tenantsOf(adoptedSet), r.Namespace) && slices.ContainsFunc(t.Divided, func(g meshv1alpha1.ResourceGroup) bool {
		return slices.Contains(g.APIGroups, r.Group) && slices.Contains(g.Resources, r.Resource)
	})
}

// remove deletes all objects of the trial. The operator is deleted last: objects may have its
// finalizers.
func (t *trial) remove(ctx context.Context) error {
	errs := []error{removeNamespaces(ctx, t.Cluster, append(tenantsOf(referenceSet), tenantsOf(adoptedSet)...)...)}
	errs = append(errs, ignoreGone(t.Delete(ctx, t.named())), t.removeRoot(ctx))
	for _, b := range append([]*Built{t.Built}, t.required...) {
		errs = append(errs, t.uninstall(ctx, b))
	}
	return errors.Join(errs...)
}

func (t *trial) say(format string, args ...any) { t.plan.Say(format, args...) }

// until waits for cond as long as a step may take.
func (t *trial) until(ctx context.Context, what string, cond func(context.Context) error) error {
	return kube.UntilWithin(ctx, patience+t.Unreleased, what, cond)
}
