package dialect

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/manager/internal/crdtest"
)

// crd judges objects that are decoded strictly, so that nothing is pruned.
type crd struct{ *crdtest.CRD }

func schemaOf(t testing.TB, name string) crd { return crd{crdtest.Load(t, name)} }

// admit returns the errors that the apiserver finds.
func (c crd) admit(o map[string]any) field.ErrorList {
	defaulting.PruneNonNullableNullsWithoutDefaults(o, c.Structural)
	return c.Validate(o)
}

func TestSchemasRefuseTwoSpellingsOfTheLock(t *testing.T) {
	controller := map[string]any{"leaderElectionName": "a", "leaderElection": map[string]any{"lockName": "b"}}
	selector := map[string]any{"matchLabels": map[string]any{"app": "a"}}
	for name, spec := range map[string]map[string]any{
		"ctrlmesh.kruise.io_virtualapps":        {"selector": selector, "configuration": map[string]any{"controller": controller}},
		"kridge.kusionstack.io_shardingconfigs": {"selector": selector, "controller": controller, "limits": []any{map[string]any{}}},
	} {
		errs := schemaOf(t, name).admit(map[string]any{"metadata": map[string]any{"name": "a"}, "spec": spec})
		require.Len(t, errs, 1)
		require.ErrorContains(t, errs[0], "leaderElectionName and leaderElection.lockName both name the lock: set one of them")
	}
}
