package crdschema

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func breaker(spec map[string]any) map[string]any {
	return map[string]any{
		"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "CircuitBreaker",
		"metadata": map[string]any{"name": "a"}, "spec": spec,
	}
}

func TestAdmitReportsWhatTheApiserverWould(t *testing.T) {
	s, err := Load("ctrlmesh.kusionstack.io_circuitbreakers")
	require.NoError(t, err)
	selector := map[string]any{"matchLabels": map[string]any{"app": "a"}}

	unknown, errs := s.Admit(breaker(map[string]any{"selector": selector}))
	require.Empty(t, unknown)
	require.Empty(t, errs)

	o := breaker(map[string]any{"selector": selector, "selektor": "a"})
	unknown, errs = s.Admit(o)
	require.Equal(t, []string{"spec.selektor"}, unknown)
	require.Empty(t, errs)
	require.NotContains(t, o["spec"], "selektor", "it is pruned")

	_, errs = s.Admit(breaker(map[string]any{"selector": "a"}))
	require.ErrorContains(t, errs.ToAggregate(), "spec.selector")
}

func TestUnknownDefinitionsAreErrors(t *testing.T) {
	_, err := Load("none")
	require.ErrorContains(t, err, "reading the definition none")
}
