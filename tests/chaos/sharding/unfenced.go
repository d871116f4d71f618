package sharding

import (
	"context"
	"fmt"
	"slices"

	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
)

// unfenced proves that the judge finds violations: with isolation off, members that still
// cache what another shard owns now, and cannot be restarted, write it.
func (s *suite) unfenced(ctx context.Context) error {
	spec := operator.NewSpec(2, meshv1alpha1.OnChangeRestart, operator.FirstTenant)
	spec.Isolation = meshv1alpha1.IsolationOff
	o, err := s.start(ctx, "unfenced", spec)
	if o == nil {
		return err
	}
	defer func() { s.Result.DoubtErr("unfenced", o.Remove(ctx)) }()
	if err != nil {
		return err
	}
	defer o.Writer.Stop()
	never := intstr.FromInt32(0)
	err = o.CreateAll(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Home, Name: operator.Name},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MaxUnavailable: &never,
			Selector:       &metav1.LabelSelector{MatchLabels: map[string]string{"app": operator.Name}},
		},
	})
	if err != nil {
		return err
	}
	if err := o.waitWritten(ctx); err != nil {
		return err
	}
	if err := o.moveCanary(ctx, 0); err != nil {
		return err
	}
	var j audit.Findings
	err = o.Until(ctx, "the judge to find double writes where nothing prevents them", func(context.Context) error {
		states, writes, err := o.Evidence()
		if err != nil {
			return err
		}
		j = audit.Check(states, writes, nil)
		if !slices.ContainsFunc(j.Foreign, func(f audit.Foreign) bool { return f.Code < 300 }) {
			return fmt.Errorf("it finds %d, and none that the apiserver took", len(j.Foreign))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("is the checker blind? %w", err)
	}
	s.Logf("  the judge finds %d double writes: %s", len(j.Foreign), j.Foreign[0])
	return nil
}

// waitWritten waits until each tenant was written, and so is in the cache of its member.
func (o *shardedOperator) waitWritten(ctx context.Context) error {
	return o.Until(ctx, "each tenant to be written", func(context.Context) error {
		_, writes, err := o.Evidence()
		if err != nil {
			return err
		}
		for _, tenant := range o.Tenants.Names {
			if !slices.ContainsFunc(writes, func(w audit.Request) bool { return w.Namespace == tenant && w.Code >= 200 && w.Code < 300 }) {
				return fmt.Errorf("%s is not", tenant)
			}
		}
		return nil
	})
}
