package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// files returns the paths of the files below a directory of the repository that have an extension, without
// tests.
func files(t *testing.T, dir, ext string) (out []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Ext(path) == ext && !strings.HasSuffix(path, "_test.go") {
			out = append(out, path)
		}
		return err
	}))
	return out
}

// inspect calls do for each node of the Go files below a directory of the repository, without tests.
func inspect(t *testing.T, dir string, do func(ast.Node)) {
	t.Helper()
	for _, path := range files(t, dir, ".go") {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			do(n)
			return true
		})
	}
}
