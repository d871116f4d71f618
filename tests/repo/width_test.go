package repo

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// maxWidth is how many fields a struct may have, with those of the structs of this module that it embeds: all of them
// are names that its methods can use without saying whose they are.
const maxWidth = 30

// wide are structs that may have more, and why.
var wide = map[string]string{
	"agent/node.handler":       "it is the node, as the manager's stream sees it",
	"manager/status.LedMember": "it adds to a member, which others use by itself",
	"proxy.exchange":           "it is a request, what is decided about it, and its response: its methods are all stages of its life",
}

type field struct {
	name     string // of a field, or of the embedded type
	pkg      string // of the embedded type; empty: it is a field
	embedded bool
}

// TestStructsAreNotWide counts the fields that a struct has by itself and by what it embeds.
func TestStructsAreNotWide(t *testing.T) {
	structs := map[string][]field{} // by package.Name
	for file, text := range sources(t) {
		if filepath.Ext(file) == ".go" && !strings.HasSuffix(file, "_test.go") && !strings.HasPrefix(file, "api/") && !strings.HasPrefix(file, "tests/") {
			addStructs(t, structs, file, text)
		}
	}
	require.NotEmpty(t, structs)
	for name := range structs {
		n := width(structs, name, map[string]bool{})
		if wide[name] == "" {
			assert.LessOrEqual(t, n, maxWidth, "%s has %d fields with those that it embeds: give the parts names, so that each use says which part it is about, or say in the variable wide why not", name, n)
		}
	}
	for name := range wide {
		assert.Greater(t, width(structs, name, map[string]bool{}), maxWidth, "%s is not wide: remove it from the variable wide", name)
	}
}

func width(structs map[string][]field, name string, seen map[string]bool) (n int) {
	if seen[name] {
		return 0
	}
	seen[name] = true
	for _, f := range structs[name] {
		n++
		if f.embedded {
			n += width(structs, f.pkg+"."+f.name, seen)
		}
	}
	return n
}

// addStructs adds the structs of a file.
func addStructs(t *testing.T, to map[string][]field, file, text string) {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
	require.NoError(t, err)
	pkg, imports := path.Dir(file), map[string]string{}
	for _, i := range parsed.Imports {
		of, _ := strconv.Unquote(i.Path.Value)
		name := path.Base(of)
		if i.Name != nil {
			name = i.Name.Name
		}
		imports[name] = strings.TrimPrefix(of, module)
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if s, ok := spec.Type.(*ast.StructType); ok {
			to[pkg+"."+spec.Name.Name] = fieldsOf(s, pkg, imports)
		}
		return true
	})
}

func fieldsOf(s *ast.StructType, pkg string, imports map[string]string) (out []field) {
	for _, f := range s.Fields.List {
		for _, name := range f.Names {
			out = append(out, field{name: name.Name})
		}
		if len(f.Names) > 0 {
			continue
		}
		of := f.Type
		if pointer, ok := of.(*ast.StarExpr); ok {
			of = pointer.X
		}
		switch of := of.(type) {
		case *ast.Ident:
			out = append(out, field{of.Name, pkg, true})
		case *ast.SelectorExpr:
			out = append(out, field{of.Sel.Name, imports[of.X.(*ast.Ident).Name], true})
		default: // of a generic type
			out = append(out, field{name: "generic"})
		}
	}
	return out
}
