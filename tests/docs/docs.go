// Package docs reads the tables of docs/, so that tests can compare them with the code.
package docs

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	extast "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/text"
)

// Section returns the rows of the first table after a heading, each by its columns,
// without the marks around words. The heading is as the file has it, such as "## Reasons".
func Section(t testing.TB, file, heading string) (rows [][]string) {
	t.Helper()
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	document := parse(source)
	level, title, _ := strings.Cut(heading, " ")
	within := false
	for node := document.FirstChild(); node != nil; node = node.NextSibling() {
		switch node := node.(type) {
		case *ast.Heading:
			if within {
				return nil
			}
			within = node.Level == len(level) && content(node, source) == title
		case *extast.Table:
			if within {
				return body(node, source)
			}
		}
	}
	require.True(t, within, "%s has no section %q: restore the heading, or correct the test that reads its table", file, heading)
	return nil
}

// Tables returns the rows of all tables of a document, by the heading above them.
func Tables(t testing.TB, file string) map[string][][]string {
	t.Helper()
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	tables, title := map[string][][]string{}, ""
	for node := parse(source).FirstChild(); node != nil; node = node.NextSibling() {
		switch node := node.(type) {
		case *ast.Heading:
			title = content(node, source)
		case *extast.Table:
			tables[title] = append(tables[title], body(node, source)...)
		}
	}
	return tables
}

// notInAnchor are the characters that GitHub drops from a heading to make its anchor.
var notInAnchor = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)

// Anchors returns the anchors of a document's headings, as GitHub makes them.
func Anchors(t testing.TB, file string) map[string]bool {
	t.Helper()
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	anchors := map[string]bool{}
	for node := parse(source).FirstChild(); node != nil; node = node.NextSibling() {
		heading, is := node.(*ast.Heading)
		if !is {
			continue
		}
		first := strings.ReplaceAll(notInAnchor.ReplaceAllString(strings.ToLower(content(heading, source)), ""), " ", "-")
		anchor := first
		for n := 1; anchors[anchor]; n++ {
			anchor = fmt.Sprintf("%s-%d", first, n)
		}
		anchors[anchor] = true
	}
	return anchors
}

func parse(source []byte) ast.Node {
	return goldmark.New(goldmark.WithExtensions(extension.Table)).Parser().Parse(text.NewReader(source))
}

// body returns the rows of a table below its head.
func body(table *extast.Table, source []byte) (rows [][]string) {
	for row := table.FirstChild(); row != nil; row = row.NextSibling() {
		if row.Kind() != extast.KindTableRow {
			continue
		}
		var cells []string
		for cell := row.FirstChild(); cell != nil; cell = cell.NextSibling() {
			cells = append(cells, content(cell, source))
		}
		rows = append(rows, cells)
	}
	return rows
}

// content returns the text of a node.
func content(node ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(node, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if words, ok := n.(*ast.Text); ok && entering {
			b.Write(words.Segment.Value(source))
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// Metric is a row of the tables of docs/metrics.md.
type Metric struct {
	Name, Type, Labels, Meaning string
}

// Metrics returns the metrics of a section of docs/metrics.md.
func Metrics(t testing.TB, file, heading string) map[string]Metric {
	t.Helper()
	out := map[string]Metric{}
	for _, row := range Section(t, file, heading) {
		require.Len(t, row, 4)
		require.NotContains(t, out, row[0])
		out[row[0]] = Metric{row[0], row[1], row[2], row[3]}
	}
	require.NotEmpty(t, out)
	return out
}

// description matches the string of a prometheus.Desc.
var description = regexp.MustCompile(`fqName: "(ctrlmesh_[^"]*)".*variableLabels: \{([^}]*)\}`)

// RequireMetrics requires that a section of docs/metrics.md lists exactly the registered
// metrics, including those without a value so far.
func RequireMetrics(t testing.TB, file, heading string, registry prometheus.Collector) {
	t.Helper()
	descs := make(chan *prometheus.Desc)
	go func() {
		registry.Describe(descs)
		close(descs)
	}()
	registered, documented := map[string]string{}, map[string]string{}
	for d := range descs {
		if m := description.FindStringSubmatch(d.String()); m != nil {
			registered[m[1]] = strings.ReplaceAll(m[2], ",", ", ")
		}
	}
	for _, m := range Metrics(t, file, heading) {
		documented[m.Name] = m.Labels
		require.Equal(t, m.Type == "counter", strings.HasSuffix(m.Name, "_total"), "%s: the names of counters end with _total, and of no other metrics: correct its type in %s, or its name", m.Name, file)
	}
	require.Equal(t, registered, documented, "%s, section %q (actual), must list exactly the registered metrics and their labels (expected)", file, heading)
}
