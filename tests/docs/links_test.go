package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/yuin/goldmark/ast"
)

const root = "../.."

// tracked returns the files of the repository that match patterns of git.
func tracked(t *testing.T, patterns ...string) []string {
	t.Helper()
	args := append([]string{"-C", root, "ls-files", "--"}, patterns...)
	out, err := exec.CommandContext(t.Context(), "git", args...).Output()
	require.NoError(t, err)
	files := strings.Fields(string(out))
	require.NotEmpty(t, files)
	return files
}

// assertTarget asserts that a file of the repository exists, and has the anchor; "" is none.
func assertTarget(t *testing.T, from, file, anchor string) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(root, file)); !assert.NoError(t, err, "%s leads to a file that does not exist: correct the link", from) || anchor == "" {
		return
	}
	assert.True(t, Anchors(t, filepath.Join(root, file))[anchor], "%s leads to section %q, which %s does not have: correct the link, or the heading", from, anchor, file)
}

func TestLinksResolve(t *testing.T) {
	for _, file := range tracked(t, "*.md") {
		source, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err)
		for _, link := range links(source) {
			if strings.Contains(link, "://") {
				continue
			}
			path, anchor, _ := strings.Cut(link, "#")
			target := file
			if path != "" {
				target = filepath.Join(filepath.Dir(file), path)
			}
			assertTarget(t, file, target, anchor)
		}
	}
}

// links returns the targets of all links and images of a document.
func links(source []byte) (out []string) {
	_ = ast.Walk(parse(source), func(node ast.Node, entering bool) (ast.WalkStatus, error) {
		switch node := node.(type) {
		case *ast.Link:
			if entering {
				out = append(out, string(node.Destination))
			}
		case *ast.Image:
			if entering {
				out = append(out, string(node.Destination))
			}
		}
		return ast.WalkContinue, nil
	})
	return out
}

// section is a section of a document, as programs, manifests and scripts name it.
var section = regexp.MustCompile(`\b((?:(?:docs|tests)/[\w/-]+|README|CONTRIBUTING)\.md)#([\w-]+)`)

// Programs and manifests print links to the documentation.
func TestSectionsNamedElsewhereExist(t *testing.T) {
	found := 0
	for _, file := range tracked(t, "*.go", "*.yaml", "*.txt", "*.sh", "*.golden", "Makefile") {
		source, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err)
		for _, m := range section.FindAllStringSubmatch(string(source), -1) {
			assertTarget(t, file, m[1], m[2])
			found++
		}
	}
	require.Greater(t, found, 20, "links in programs and manifests: correct the expression that finds them")
}

// The index and the README lead to each page.
func TestEveryPageIsListed(t *testing.T) {
	for _, index := range []string{"README.md", "docs/README.md"} {
		source, err := os.ReadFile(filepath.Join(root, index))
		require.NoError(t, err)
		listed := map[string]bool{index: true, "README.md": true}
		for _, link := range links(source) {
			path, _, _ := strings.Cut(link, "#")
			listed[filepath.Join(filepath.Dir(index), path)] = true
		}
		for _, page := range tracked(t, "docs/*.md") {
			assert.True(t, listed[page], "add a link to %[2]s in %[1]s", index, page)
		}
	}
}

func TestReadmeIsShort(t *testing.T) {
	source, err := os.ReadFile(filepath.Join(root, "README.md"))
	require.NoError(t, err)
	assert.Less(t, strings.Count(string(source), "\n"), 150, "lines of README.md: move details to a page of docs/")
}

func TestAnchorsOfHeadings(t *testing.T) {
	file := filepath.Join(t.TempDir(), "page.md")
	const source = "# What happens to a member's `requests`\n\n## 502 and 504: no answer\n\n## Twice\n\n## Twice\n\n    # not me\n"
	require.NoError(t, os.WriteFile(file, []byte(source), 0o600))
	require.Equal(t, map[string]bool{"what-happens-to-a-members-requests": true, "502-and-504-no-answer": true, "twice": true, "twice-1": true}, Anchors(t, file))
}
