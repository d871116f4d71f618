package main

import (
	"context"
	"fmt"
	"slices"

	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// unfenced proves that the judge can find somebody guilty: without the fence, members
// that hold in their caches what is another's now, and cannot be restarted, write it.
func unfenced(ctx context.Context, w *world, r *result) error {
	spec := divided(2, meshv1alpha1.OnChangeRestart, firstTenant)
	spec.Isolation = meshv1alpha1.IsolationOff
	o, err := w.operate(ctx, "unfenced", spec)
	if o == nil {
		return err
	}
	defer func() { r.doubtErr("unfenced", o.end(ctx)) }()
	if err != nil {
		return err
	}
	defer o.write.stop()
	never := intstr.FromInt32(0)
	err = o.create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.home, Name: operatorName},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MaxUnavailable: &never,
			Selector:       &metav1.LabelSelector{MatchLabels: map[string]string{"app": operatorName}},
		},
	})
	if err != nil {
		return err
	}
	if err := o.moveCanary(ctx, 0); err != nil {
		return err
	}
	var j audit.Judgement
	err = o.until(ctx, "the judge to find double writes where nothing prevents them", func(context.Context) error {
		states, writes, err := o.evidence()
		if err != nil {
			return err
		}
		j = audit.Judge(states, writes, nil)
		if !slices.ContainsFunc(j.Foreign, func(f audit.Foreign) bool { return f.Code < 300 }) {
			return fmt.Errorf("it finds %d, and none that the apiserver took", len(j.Foreign))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("is the checker blind? %w", err)
	}
	w.say("  the judge finds %d double writes: %s", len(j.Foreign), j.Foreign[0])
	return nil
}
