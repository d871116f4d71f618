// Package render writes reports as tables, JSON or YAML.
package render

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"sigs.k8s.io/yaml"
)

// Formats are the values of --output.
var Formats = []string{"table", "json", "yaml"}

// Report is what a command prints. Its fields in JSON are the same in YAML, and stable.
type Report interface {
	// WriteText writes the report for people.
	WriteText(*Text)
}

// Check returns an error for an unknown format.
func Check(format string) error {
	if slices.Contains(Formats, format) {
		return nil
	}
	return fmt.Errorf("unknown output format %q: choose one of %s", format, strings.Join(Formats, ", "))
}

// Write writes a report in a format.
func Write(w io.Writer, format string, r Report) error {
	switch format {
	case "json":
		text, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "%s\n", text)
		return err
	case "yaml":
		text, err := yaml.Marshal(r)
		if err != nil {
			return err
		}
		_, err = w.Write(text)
		return err
	}
	t := &Text{}
	r.WriteText(t)
	_, err := io.WriteString(w, t.b.String())
	return err
}

// Text is a report for people.
type Text struct{ b strings.Builder }

// Line writes a line.
func (t *Text) Line(format string, args ...any) { fmt.Fprintf(&t.b, format+"\n", args...) }

// Outcome writes how a command ended: what is wrong, what a user can do about it, and a summary.
func (t *Text) Outcome(problems []string, do, summary string) {
	for _, p := range problems {
		t.Line("! %s", p)
	}
	if do != "" {
		t.Line("  %s", do)
	}
	t.Line("%s", summary)
}

// Table writes rows below a head. It separates it from what is above by an empty line. Empty cells
// become dashes.
func (t *Text) Table(head []string, rows [][]string) {
	if len(rows) == 0 {
		return
	}
	if t.b.Len() > 0 {
		t.Line("")
	}
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{head}, rows...) {
		cells := slices.Clone(row)
		for i, c := range cells {
			if c == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	w.Flush() // a strings.Builder cannot fail
	for line := range strings.Lines(table.String()) {
		t.Line("%s", strings.TrimRight(line, " \n"))
	}
}

// Count returns a number of things as text: the noun is in the singular, and gets an s.
func Count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Size returns a number of bytes as text.
func Size(n float64) string {
	for _, unit := range []string{"B", "KiB", "MiB"} {
		if n < 1024 {
			return fmt.Sprintf("%.0f %s", n, unit)
		}
		n /= 1024
	}
	return fmt.Sprintf("%.1f GiB", n)
}

// Number returns a number as text.
func Number[N int | int32 | int64](n N) string { return strconv.FormatInt(int64(n), 10) }

// Optional returns a number as text; empty if it is unknown.
func Optional[N int | int32 | int64](n *N) string {
	if n == nil {
		return ""
	}
	return Number(*n)
}

// Time returns a time as text; empty if it is unknown.
func Time(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.Format(time.RFC3339)
}
