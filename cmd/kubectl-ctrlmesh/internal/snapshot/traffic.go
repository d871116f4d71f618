package snapshot

import (
	"context"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
)

// Breakers reads the CircuitBreakers of a namespace; of all if it is empty.
func Breakers(namespace string) Part {
	return Part{"CircuitBreakers", func(ctx context.Context, r Reader, s *Snapshot) error {
		return list(ctx, r, func(page v1alpha1.CircuitBreakerList) {
			s.Subjects.Breakers = append(s.Subjects.Breakers, page.Items...)
		}, client.InNamespace(namespace))
	}}
}

// Faults reads the FaultInjections of a namespace; of all if it is empty.
func Faults(namespace string) Part {
	return Part{"FaultInjections", func(ctx context.Context, r Reader, s *Snapshot) error {
		return list(ctx, r, func(page v1alpha1.FaultInjectionList) { s.Subjects.Faults = append(s.Subjects.Faults, page.Items...) }, client.InNamespace(namespace))
	}}
}

// TrafficPolicies reads the TrafficPolicies of a namespace as the CircuitBreakers that they stand for.
func TrafficPolicies(namespace string) Part {
	return Part{"TrafficPolicies", func(ctx context.Context, r Reader, s *Snapshot) error {
		policies, err := serve.Policies(ctx, within{r.Client, namespace})
		for _, p := range policies {
			s.Subjects.Translated = append(s.Subjects.Translated, p.Breakers...)
		}
		if unserved(err) {
			return nil
		}
		return err
	}}
}

// within lists the objects of a namespace alone.
type within struct {
	client.Reader
	namespace string
}

// List implements client.Reader.
func (w within) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return w.Reader.List(ctx, list, append(slices.Clone(opts), client.InNamespace(w.namespace))...)
}
