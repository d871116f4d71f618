package traffic

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEachKindOfFaultIsInjectedAlone(t *testing.T) {
	alone := map[string]bool{}
	for _, b := range scenarios {
		for _, kind := range b.kinds {
			alone[kind] = true
		}
	}
	require.ElementsMatch(t, faultKinds, slices.Collect(maps.Keys(alone)))
}
