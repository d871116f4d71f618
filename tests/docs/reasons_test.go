package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a user may be told a reason of is in the table, and nothing else.
func TestReasonsAreToldOf(t *testing.T) {
	conditions, events := reasons(t)
	const file = "../../docs/operations.md"
	first := func(rows [][]string) (out []string) {
		for _, row := range rows {
			require.Len(t, row, 4)
			require.NotEmpty(t, row[3], row[0])
			out = append(out, row[0])
		}
		slices.Sort(out)
		return out
	}
	require.Equal(t, slices.Sorted(maps.Keys(conditions)), first(Section(t, file, "### Reasons of conditions")))
	require.Equal(t, slices.Sorted(maps.Keys(events)), first(Section(t, file, "### Events")))
}

// reasons are those in the code: of conditions the constants Reason... of the manager;
// of Events those of the proxy, and what is given to who records them.
func reasons(t *testing.T) (conditions, events map[string]bool) {
	conditions, events = map[string]bool{}, map[string]bool{}
	constants := map[string]string{}
	// Where whoever records Events has the reason among its arguments.
	at := map[string]int{"Eventf": 3, "pod": 1, "ofNode": 0, "tell": 0}
	var calls []ast.Expr
	for _, dir := range []string{"api", "manager", "agent", "proxy"} {
		require.NoError(t, filepath.WalkDir("../../"+dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.ValueSpec:
					for i, name := range n.Names {
						if value, ok := literal(n.Values, i); ok && strings.HasPrefix(name.Name, "Reason") {
							constants[name.Name] = value
							if dir == "proxy" {
								events[value] = true
							} else {
								conditions[value] = true
							}
						}
					}
				case *ast.CallExpr:
					f, ok := n.Fun.(*ast.SelectorExpr)
					if !ok || dir != "manager" && dir != "agent" {
						return true
					}
					if i, records := at[f.Sel.Name]; records && i < len(n.Args) {
						calls = append(calls, n.Args[i])
					}
				}
				return true
			})
			return nil
		}))
	}
	for _, c := range calls {
		if value, ok := literal([]ast.Expr{c}, 0); ok {
			events[value] = true
		}
		if conversion, ok := c.(*ast.CallExpr); ok && len(conversion.Args) == 1 {
			c = conversion.Args[0]
		}
		if s, ok := c.(*ast.SelectorExpr); ok && constants[s.Sel.Name] != "" {
			events[constants[s.Sel.Name]] = true
		}
	}
	return conditions, events
}

// literal returns the value of a string literal.
func literal(values []ast.Expr, i int) (string, bool) {
	if i >= len(values) {
		return "", false
	}
	l, ok := values[i].(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(l.Value)
	return s, err == nil
}
