package match

import (
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestPodsShareExpressions(t *testing.T) {
	const expression = "shared-[a-y]{100}"
	match := &meshv1.HttpMatch{Host: &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: expression}}}
	_, err := NewURL(match)
	require.NoError(t, err)
	one, err := expressionOf(expression)
	require.NoError(t, err)
	other, err := expressionOf(expression)
	require.NoError(t, err)
	require.Same(t, one, other)
	require.False(t, one.MatchString("xshared-"), "the whole text")
	_, err = expressionOf("a(")
	require.Error(t, err)
}
