package snapshot

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
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
