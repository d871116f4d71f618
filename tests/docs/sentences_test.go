package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/yuin/goldmark/ast"
	extast "github.com/yuin/goldmark/extension/ast"
)

const (
	maxWords  = 35 // of a sentence
	meanWords = 18 // of the sentences of a document, tables apart
)

func TestSentencesAreShort(t *testing.T) {
	for _, file := range tracked(t, "*.md") {
		t.Run(file, func(t *testing.T) {
			source, err := os.ReadFile(filepath.Join(root, file))
			require.NoError(t, err)
			words, count := 0, 0
			for _, p := range paragraphs(source) {
				for _, s := range sentences(p.text) {
					n := len(strings.Fields(s))
					assert.LessOrEqual(t, n, maxWords, "words of a sentence: split it: %s", s)
					if !p.inTable {
						words += n
						count++
					}
				}
			}
			if count > 0 {
				mean := float64(words) / float64(count)
				assert.Less(t, mean, float64(meanWords), "mean words of %d sentences: split the long ones", count)
			}
		})
	}
}

type paragraph struct {
	text    string
	inTable bool
}

// paragraphs returns the prose of a document: no code blocks, no headings. A code span
// counts as one word.
func paragraphs(source []byte) (out []paragraph) {
	_ = ast.Walk(parse(source), func(node ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch node.Kind() {
		case ast.KindHeading, ast.KindCodeBlock, ast.KindFencedCodeBlock, ast.KindHTMLBlock:
			return ast.WalkSkipChildren, nil
		case ast.KindParagraph, ast.KindTextBlock:
			out = append(out, paragraph{text: prose(node, source)})
			return ast.WalkSkipChildren, nil
		case extast.KindTableCell:
			out = append(out, paragraph{text: prose(node, source), inTable: true})
			return ast.WalkSkipChildren, nil
		}
		return ast.WalkContinue, nil
	})
	return out
}

func prose(node ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(node, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.CodeSpan:
			b.WriteString("code")
			return ast.WalkSkipChildren, nil
		case *ast.Text:
			b.Write(n.Segment.Value(source))
			if n.SoftLineBreak() || n.HardLineBreak() {
				b.WriteByte(' ')
			}
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// sentenceEnd is what a sentence ends with.
var sentenceEnd = regexp.MustCompile(`[.!?:]["')]?\s+`)

func sentences(paragraph string) (out []string) {
	for _, s := range sentenceEnd.Split(paragraph, -1) {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	return out
}

func TestSentencesAreSplit(t *testing.T) {
	const source = "# Not me\n\nOne of two. The `second one`\nhas five.\n\n    not me\n\n- an item\n\n| a | b |\n|---|---|\n| x | y z |\n"
	var got []string
	for _, p := range paragraphs([]byte(source)) {
		for _, s := range sentences(p.text) {
			got = append(got, fmt.Sprint(s, p.inTable))
		}
	}
	require.Equal(t, []string{"One of twofalse", "The code has five.false", "an itemfalse", "atrue", "btrue", "xtrue", "y ztrue"}, got)
}
