package push

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// An agent may report anything.
func TestReportedShadowIsBounded(t *testing.T) {
	require.Nil(t, shadow(nil))
	valid := &meshv1.ShadowDifference{Group: "apps", Resource: "deployments/status", Verb: "update", Fields: []string{"status.a\x00\n", strings.Repeat("é", 200), "\xff"}, Writes: 1 << 60}
	invalid := []*meshv1.ShadowDifference{{Resource: "A", Verb: "update"}, {Resource: "pods/", Verb: "update", Group: "-"}, {Resource: "pods/x/y", Verb: "update"}, {Resource: "pods", Verb: ""}}
	out := shadow(&meshv1.ShadowReport{Agreed: 1 << 60, Differences: append(invalid, valid)})
	require.EqualValues(t, maxWrites, out.Agreed)
	require.Equal(t, []ShadowDifference{{Group: "apps", Resource: "deployments/status", Verb: "update", Fields: []string{"status.a", strings.Repeat("é", 126), ""}, Writes: maxWrites}}, out.Differences)

	valid.Fields = slices.Repeat([]string{"a"}, 100)
	out = shadow(&meshv1.ShadowReport{Differences: slices.Repeat([]*meshv1.ShadowDifference{valid}, 100)})
	require.Len(t, out.Differences, meshv1.MaxShadowDifferences)
	require.Len(t, out.Differences[0].Fields, meshv1.MaxShadowFields)
}
