package docs

import (
	"go/ast"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestSymptomsQuoteMessages holds the messages that the page quotes as the mesh's own to the
// texts in the code and in the manifests.
func TestSymptomsQuoteMessages(t *testing.T) {
	const others = "Messages of clients and Kubernetes"
	tables := Tables(t, "../../docs/symptoms.md")
	require.Contains(t, tables, others)
	texts, quoted := messages(t), map[string]bool{}
	for heading, rows := range tables {
		for _, row := range rows {
			require.Len(t, row, 3, "columns of docs/symptoms.md, section %s", heading)
			require.NotEmpty(t, row[1], "fill the columns of %q in docs/symptoms.md", row[0])
			require.NotEmpty(t, row[2], "fill the columns of %q in docs/symptoms.md", row[0])
			assert.False(t, quoted[row[0]], "docs/symptoms.md has two rows for %q: join them", row[0])
			quoted[row[0]] = true
			if heading != others {
				assert.True(t, strings.Contains(texts, row[0]), "docs/symptoms.md quotes %q in section %s, and no program or manifest says that: quote what it says now", row[0], heading)
			}
		}
	}
	require.GreaterOrEqual(t, len(quoted), 25)
}

// apart separates texts, so that no quotation spans two of them.
const apart = "\x00"

// messages returns the texts of the mesh's programs and of its manifests.
func messages(t *testing.T) string {
	t.Helper()
	var texts strings.Builder
	for _, dir := range []string{"agent", "api", "bpf", "cmd", "deploy", "internal", "manager", "proxy"} {
		for _, path := range files(t, dir, ".yaml") {
			source, err := os.ReadFile(path)
			require.NoError(t, err)
			texts.WriteString(apart + string(source))
		}
		inspect(t, dir, func(n ast.Node) {
			switch n := n.(type) {
			case *ast.BinaryExpr:
				texts.WriteString(apart + joined(n))
			case *ast.BasicLit:
				texts.WriteString(apart + joined(n))
			}
		})
	}
	return texts.String()
}

// joined returns the text of a string literal, or of several that are added.
func joined(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			return joined(e.X) + joined(e.Y)
		}
	case *ast.BasicLit:
		if s, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
			return s
		}
	}
	return apart
}
