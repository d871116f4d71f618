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
var path = regexp.MustCompile("`((?:agent|api|bpf|cmd|internal|manager|proxy|tests)/[a-zA-Z0-9_./-]*)`")

func TestDesignNamesExistingFiles(t *testing.T) {
	source, err := os.ReadFile("../../docs/design.md")
	require.NoError(t, err)
	named := path.FindAllSubmatch(source, -1)
	require.NotEmpty(t, named)
	for _, m := range named {
		_, err := os.Stat(filepath.Join("../..", string(m[1])))
		assert.NoError(t, err)
	}
}
