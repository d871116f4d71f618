package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// path is a code span that names a directory or a file of the repository.
var path = regexp.MustCompile("`((?:agent|api|bpf|cmd|deploy|internal|manager|proxy|tests)/[a-zA-Z0-9_./-]*)`")

func TestDesignNamesExistingFiles(t *testing.T) { assertPathsExist(t, "docs/design.md") }

// assertPathsExist asserts that a page names directories and files, and that they exist.
func assertPathsExist(t *testing.T, file string) {
	t.Helper()
	named := path.FindAllStringSubmatch(readFile(t, file), -1)
	require.NotEmpty(t, named, "%s names no path of the repository: correct the expression that finds them", file)
	for _, m := range named {
		_, err := os.Stat(filepath.Join(root, m[1]))
		assert.NoError(t, err, "%s names what does not exist: correct the path", file)
	}
}

// readFile returns the text of a file of the repository.
func readFile(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	require.NoError(t, err)
	return string(text)
}
