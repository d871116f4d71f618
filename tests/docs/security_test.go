package docs

import (
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const securityPage = "docs/security.md"

var (
	testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	fuzzFunc = regexp.MustCompile(`(?m)^func Fuzz\w+\(`)
	// testName is a code span that names a test.
	testName = regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w*)`")
)

// The table lists exactly the packages with fuzz tests.
func TestFuzzTargetsAreDocumented(t *testing.T) {
	var packages, listed []string
	for _, file := range tracked(t, "*_test.go") {
		if fuzzFunc.MatchString(readFile(t, file)) {
			packages = append(packages, filepath.Dir(file))
		}
	}
	for _, row := range Section(t, filepath.Join(root, securityPage), "## Fuzz targets") {
		require.Len(t, row, 3)
		require.NotEmpty(t, row[1], row[0])
		require.NotEmpty(t, row[2], row[0])
		listed = append(listed, row[0])
	}
	slices.Sort(packages)
	require.ElementsMatch(t, slices.Compact(packages), listed)
}

func TestSecurityNamesExistingCode(t *testing.T) {
	page := readFile(t, securityPage)
	assertPathsExist(t, page)
	tests := map[string]bool{}
	for _, file := range tracked(t, "*_test.go") {
		for _, m := range testFunc.FindAllStringSubmatch(readFile(t, file), -1) {
			tests[m[1]] = true
		}
	}
	named := testName.FindAllStringSubmatch(page, -1)
	require.NotEmpty(t, named)
	for _, m := range named {
		assert.True(t, tests[m[1]], "there is no %s", m[1])
	}
}
