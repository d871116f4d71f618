// Package docs reads what the tables of docs/ say, so that tests can hold it against the
// code.
package docs

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// Section returns the rows of the first table after a heading, each by its columns,
// without the back quotes around words.
func Section(t testing.TB, file, heading string) (rows [][]string) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), "\n"+heading+"\n")
	require.True(t, found, "%s has %q", file, heading)
	for line := range strings.Lines(rest) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "#"), line == "" && rows != nil:
			return rows[min(2, len(rows)):]
		case strings.HasPrefix(line, "|"):
			var row []string
			for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
				row = append(row, strings.ReplaceAll(strings.TrimSpace(cell), "`", ""))
			}
			rows = append(rows, row)
		}
	}
	return rows[min(2, len(rows)):]
}

// Metric is a row of the tables of docs/metrics.md.
type Metric struct {
	Name, Type, Labels, Meaning string
}

// Metrics are those of a section of docs/metrics.md.
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

// description is what a prometheus.Desc prints as.
var description = regexp.MustCompile(`fqName: "(ctrlmesh_[^"]*)".*variableLabels: \{([^}]*)\}`)

// RequireMetrics holds a section of docs/metrics.md to what the mesh has registered,
// whether or not there is any of it yet.
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
		require.Equal(t, m.Type == "counter", strings.HasSuffix(m.Name, "_total"), m.Name)
	}
	require.Equal(t, registered, documented)
}
