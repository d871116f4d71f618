// Package operator runs the test operator of tests/operators/tally for chaos suites, changes
// its objects all the time, and judges what it wrote.
package operator

import (
	"context"
	"errors"
	"maps"
	"time"

	appsv1 "k8s.io/api/apps/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

// Operators runs the test operator, once per part, and counts what came of it.
type Operators struct {
	*harness.Testbed
	Result  *harness.Result
	Tenants *Tenants
	Counts  *Counts
}

// New returns what runs operators over the default tenants.
func New(w *harness.Testbed, r *harness.Result) *Operators {
	return &Operators{Testbed: w, Result: r, Tenants: &Tenants{Testbed: w}, Counts: &Counts{Took: map[string][]time.Duration{}}}
}

// Run runs the operator under a root with the given spec while do changes or breaks
// something. Then it checks the outcome and removes the operator.
func (t *Operators) Run(ctx context.Context, part string, spec meshv1alpha1.ShardingConfigSpec, do func(context.Context, *Operator) error) error {
	o, err := t.Start(ctx, part, spec)
	if err == nil {
		err = do(ctx, o)
	}
	if o == nil {
		return err
	}
	return errors.Join(err, o.judge(ctx), o.Remove(ctx))
}

// Start starts the operator and waits until all its shards work. If it returns an
// operator, even with an error, the caller must Remove it.
func (t *Operators) Start(ctx context.Context, part string, spec meshv1alpha1.ShardingConfigSpec) (*Operator, error) {
	if err := t.ApplyCRD(ctx); err != nil {
		return nil, err
	}
	if err := t.Tenants.create(ctx); err != nil {
		return nil, err
	}
	o, err := t.Prepare(ctx, part)
	if err != nil {
		return o, err
	}
	root := o.NewRoot(spec)
	if err := t.CreateAll(ctx, root); err != nil {
		return o, err
	}
	// A pod that is created before the manager has read the root belongs to no shard.
	err = t.UntilObject(ctx, "the manager to see the root", root, func() error {
		if root.Status.ObservedGeneration < root.Generation {
			return errors.New("it has not")
		}
		return nil
	})
	if err != nil {
		return o, err
	}
	if err := o.CreateStatefulSet(ctx, replicasOf(spec.Root), nil); err != nil {
		return o, err
	}
	for _, subset := range spec.Root.Subsets {
		if err := o.CreateStatefulSet(ctx, 1, version(subset)); err != nil {
			return o, err
		}
	}
	if err := o.WaitSettled(ctx); err != nil {
		return o, err
	}
	o.StartWriter()
	return o, nil
}

// ApplyCRD applies the CustomResourceDefinition of the operator's objects.
func (t *Operators) ApplyCRD(ctx context.Context) error {
	return t.ApplyPath(ctx, manifests+"crd.yaml")
}

// Prepare creates a namespace for the operator, which it does not start.
func (t *Operators) Prepare(ctx context.Context, part string) (*Operator, error) {
	began, err := t.Mark()
	if err != nil {
		return nil, err
	}
	home, err := t.CreatePodNamespace(ctx, part)
	if err != nil {
		return nil, err
	}
	o := &Operator{Operators: t, Part: part, Home: home, began: began}
	return o, o.allowWeighing(ctx)
}

// version makes the operator's StatefulSet that of a subset.
func version(subset meshv1alpha1.Subset) func(*appsv1.StatefulSet) {
	return func(set *appsv1.StatefulSet) {
		set.Name += "-" + subset.Name
		maps.Copy(set.Spec.Selector.MatchLabels, subset.PodLabels)
		maps.Copy(set.Spec.Template.Labels, subset.PodLabels)
	}
}
