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
		require.Len(t, row, 3, "columns of %s, section Fuzz targets", securityPage)
		require.NotEmpty(t, row[1], "fill the columns of %s in %s", row[0], securityPage)
		require.NotEmpty(t, row[2], "fill the columns of %s in %s", row[0], securityPage)
		listed = append(listed, row[0])
	}
	slices.Sort(packages)
	require.ElementsMatch(t, slices.Compact(packages), listed, "give each package with fuzz tests a row in the section Fuzz targets of %s", securityPage)
}

func TestSecurityNamesExistingCode(t *testing.T) {
	assertPathsExist(t, securityPage)
	tests := map[string]bool{}
	for _, file := range tracked(t, "*_test.go") {
		for _, m := range testFunc.FindAllStringSubmatch(readFile(t, file), -1) {
			tests[m[1]] = true
		}
	}
	named := testName.FindAllStringSubmatch(readFile(t, securityPage), -1)
	require.NotEmpty(t, named, "%s names no test: correct the expression that finds them", securityPage)
	for _, m := range named {
		assert.True(t, tests[m[1]], "%s names %s, which does not exist: name the test that shows this now", securityPage, m[1])
	}
}
