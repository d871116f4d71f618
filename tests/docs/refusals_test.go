package docs

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRefusalsAreDocumented(t *testing.T) {
	code, err := os.ReadFile("../../api/mesh/v1/refusals.go")
	require.NoError(t, err)
	page, err := os.ReadFile("../../docs/metrics.md")
	require.NoError(t, err)
	row := regexp.MustCompile("(?m)^\\| `ctrlmesh_refusals_total`.*$").FindString(string(page))
	all := regexp.MustCompile(`Refusal = "(\w+)"`).FindAllStringSubmatch(string(code), -1)
	require.NotEmpty(t, all)
	for _, refusal := range all {
		require.Regexp(t, `\b`+refusal[1]+`\b`, row, "name the refusal %s in the row of ctrlmesh_refusals_total in docs/metrics.md", refusal[1])
	}
}
