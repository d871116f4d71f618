package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

// Every count needs an existing part, and every part except the one that proves the judge
// takes a count.
func TestCountsAndPartsMatch(t *testing.T) {
	for name, create := range suites {
		suite := create(nil, &harness.Result{})
		require.Equal(t, name, suite.Name)
		counted := []string{"unfenced"}
		for _, c := range suite.Counts() {
			counted = append(counted, c.Parts...)
		}
		for _, p := range suite.Parts {
			require.Contains(t, counted, p.Name)
			counted = slices.DeleteFunc(counted, func(part string) bool { return part == p.Name })
		}
		require.Subset(t, []string{"unfenced"}, counted, "counts of parts that do not exist")
	}
}

func TestChooseRejectsUnknownNames(t *testing.T) {
	_, parts, err := choose(nil, nil, "capture", "cleanup,kills")
	require.NoError(t, err)
	require.Equal(t, "kills", parts[0].Name)
	require.Equal(t, "cleanup", parts[1].Name)
	_, _, err = choose(nil, nil, "capture", "kils")
	require.ErrorContains(t, err, `no part ["kils"]`)
	_, _, err = choose(nil, nil, "shading", "")
	require.ErrorContains(t, err, "no suite")
}
