package traffic

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
)

// apply creates the FaultInjection of a scenario and waits until it is in force. The returned
// function counts its faults and deletes it.
func (o *faultTest) apply(ctx context.Context, sc scenario) (end func(*counts) error, err error) {
	lasts := meshv1alpha1.Duration(faultsEnd)
	f := &meshv1alpha1.FaultInjection{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Home, Name: sc.name},
		Spec:       meshv1alpha1.FaultInjectionSpec{Selector: o.selector(), Duration: &lasts, HTTPFaultInjections: sc.rules},
	}
	if err := o.CreateAll(ctx, f); err != nil {
		return nil, err
	}
	end = func(c *counts) error {
		ctx := context.WithoutCancel(ctx)
		by, err := o.injected(ctx, sc.name)
		c.addInjected(by)
		return errors.Join(err, client.IgnoreNotFound(o.Delete(ctx, f)))
	}
	err = o.UntilObject(ctx, sc.name+" to be in force", f, func() error {
		return inForce(f.Generation, f.Status.ObservedGeneration, f.Status.Pods, f.Status.PodsInForce)
	})
	if err != nil {
		return nil, errors.Join(err, end(&counts{}))
	}
	return end, nil
}

// inForce returns an error that says why a CircuitBreaker or FaultInjection is not in force.
func inForce(generation, observed int64, pods, in int32) error {
	switch {
	case observed < generation:
		return errors.New("the manager has not seen it")
	case pods == 0:
		return errors.New("it selects no pods")
	case in < pods:
		return fmt.Errorf("it is in %d pods of %d", in, pods)
	}
	return nil
}

func (o *faultTest) selector() *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": operator.Name}}
}

// injected returns the injected faults of a FaultInjection by kind, as the agents count them
// now.
func (o *faultTest) injected(ctx context.Context, name string) (map[string]int, error) {
	return o.SumBy(ctx, "ctrlmesh_faults_injected_total", "kind", map[string]string{"namespace": o.Home, "faultinjection": name})
}

// format returns counts as text, in order.
func format(by map[string]int) string {
	var out []string
	for _, kind := range slices.Sorted(maps.Keys(by)) {
		out = append(out, fmt.Sprintf("%d %s", by[kind], kind))
	}
	return strings.Join(out, ", ")
}
