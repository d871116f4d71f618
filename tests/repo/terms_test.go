package repo

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// glossary defines the terms, and in which packages exported names have them.
const glossary = "docs/glossary.md"

// terms are words that meant several things once, as they occur in names.
var terms = map[string]*regexp.Regexp{
	"admission": regexp.MustCompile(`^(admi(t|ts|tted|tting)|admissions?)$`),
	"book":      regexp.MustCompile(`^books?$`),
	"depart":    regexp.MustCompile(`^depart(s|ed|ing|ures?)?$`),
	"division":  regexp.MustCompile(`^divisions?$`),
	"effect":    regexp.MustCompile(`^effects?$`),
	"fence":     regexp.MustCompile(`^fenc(es?|ed|ing)$`),
	"gate":      regexp.MustCompile(`^gat(es?|ed|ing)$`),
	"judge":     regexp.MustCompile(`^judg(es?|ed|ing|e?ments?)$`),
	"known":     regexp.MustCompile(`^known$`),
	"ledger":    regexp.MustCompile(`^ledgers?$`),
	"member":    regexp.MustCompile(`^members?$`),
	"plan":      regexp.MustCompile(`^plan(s|ned|ning|ner)?$`),
	"route":     regexp.MustCompile(`^(rout(es?|ed|ing)|router)$`),
	"scope":     regexp.MustCompile(`^scop(es?|ed|ing)$`),
	"seal":      regexp.MustCompile(`^seal(s|ed|er|ing)?$`),
	"settled":   regexp.MustCompile(`^settl(es?|ed|ing)$`),
	"shed":      regexp.MustCompile(`^shed(s|ding)?$`),
	"strip":     regexp.MustCompile(`^strip(s|ped|ping)?$`),
	"ticket":    regexp.MustCompile(`^tickets?$`),
	"tunnel":    regexp.MustCompile(`^tunnel(s|led|ling)?$`),
	"world":     regexp.MustCompile(`^worlds?$`),
}

// TestTermsMeanOneThing holds exported names to the table of words in names of the glossary.
// It leaves out the API, whose names users know.
func TestTermsMeanOneThing(t *testing.T) {
	allowed := packagesOfTerms(t)
	for file, text := range sources(t) {
		pkg := path.Dir(file)
		if filepath.Ext(file) != ".go" || strings.HasSuffix(file, "_test.go") || strings.HasPrefix(pkg, "api/") {
			continue
		}
		for _, name := range exported(t, file, text) {
			for _, part := range camelWords(name) {
				term := termOf(part)
				if term == "" || slices.Contains(allowed[term], pkg) {
					continue
				}
				assert.Fail(t, "a term in a name", `%s: exported name %s has the term %q, which %s does not allow in %s.
If the name means what the glossary says of the term, add the package to its table of words in names.
If it means something else, use another word, so that the term keeps one meaning.`, file, name, term, glossary, pkg)
			}
		}
	}
}

func termOf(part string) string {
	for term, forms := range terms {
		if forms.MatchString(strings.ToLower(part)) {
			return term
		}
	}
	return ""
}

// packagesOfTerms reads the table of words in names.
func packagesOfTerms(t *testing.T) map[string][]string {
	text, err := os.ReadFile(filepath.Join("../..", glossary))
	require.NoError(t, err)
	_, table, found := strings.Cut(string(text), "## Words in names")
	require.True(t, found, "%s has no section of words in names", glossary)
	packages := map[string][]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| (\\w+) \\| (`.*) \\|$").FindAllStringSubmatch(table, -1) {
		require.Contains(t, terms, row[1], "add the term to the list of this test")
		packages[row[1]] = strings.Split(strings.ReplaceAll(row[2], "`", ""), ", ")
	}
	require.NotEmpty(t, packages)
	return packages
}

// exported returns the exported names that a file declares.
func exported(t *testing.T, file, text string) (names []string) {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
	require.NoError(t, err)
	ast.Inspect(parsed, func(n ast.Node) bool {
		var declared []*ast.Ident
		switch n := n.(type) {
		case *ast.FuncDecl:
			declared = []*ast.Ident{n.Name}
		case *ast.TypeSpec:
			declared = []*ast.Ident{n.Name}
		case *ast.ValueSpec:
			declared = n.Names
		case *ast.Field:
			declared = n.Names
		}
		for _, d := range declared {
			if d.IsExported() {
				names = append(names, d.Name)
			}
		}
		return true
	})
	return names
}
