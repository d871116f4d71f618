// Command values writes a page of the documentation from the comments of a chart's values.yaml.
//
//	values VALUES PAGE
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"
)

const intro = `<!-- Written from deploy/chart/values.yaml by make generate. Do not edit. -->
# Values of the chart

With this page you look up a value of the [chart](operations.md#install-by-helm), and its default. Set it by ` + "`--set NAME=VALUE`" + ` or in a file of your own. The chart's schema refuses unknown names.
`

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: values VALUES PAGE")
		os.Exit(1)
	}
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "values:", err)
		os.Exit(1)
	}
}

func write(values, page string) error {
	source, err := os.ReadFile(values)
	if err != nil {
		return fmt.Errorf("reading the values: %w", err)
	}
	var document yaml.Node
	if err := yaml.Unmarshal(source, &document); err != nil {
		return fmt.Errorf("parsing %s: %w", values, err)
	}
	if len(document.Content) == 0 || document.Content[0].Kind != yaml.MappingNode {
		return fmt.Errorf("parsing %s: it has no values", values)
	}
	out := bytes.NewBufferString(intro)
	if err := sections(out, document.Content[0]); err != nil {
		return fmt.Errorf("describing %s: %w", values, err)
	}
	if err := os.WriteFile(page, out.Bytes(), 0o644); err != nil {
		return fmt.Errorf("writing the page: %w", err)
	}
	return nil
}

// sections writes a section for each value at the top.
func sections(out *bytes.Buffer, of *yaml.Node) error {
	for i := 0; i < len(of.Content); i += 2 {
		name, value := of.Content[i], of.Content[i+1]
		fmt.Fprintf(out, "\n## %s\n\n", name.Value)
		if nested(value) {
			fmt.Fprintf(out, "%s\n\n", comment(name))
		}
		fmt.Fprint(out, "| value | default | |\n|---|---|---|\n")
		if err := rows(out, name.Value, name, value); err != nil {
			return err
		}
	}
	return nil
}

// rows writes a row for a value, or for each value below it.
func rows(out *bytes.Buffer, path string, name, value *yaml.Node) error {
	if !nested(value) {
		text := comment(name)
		if text == "" {
			return fmt.Errorf("value %s has no comment", path)
		}
		is, err := flow(value)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "| `%s` | `%s` | %s |\n", path, is, strings.ReplaceAll(text, "|", `\|`))
		return nil
	}
	for i := 0; i < len(value.Content); i += 2 {
		if err := rows(out, path+"."+value.Content[i].Value, value.Content[i], value.Content[i+1]); err != nil {
			return err
		}
	}
	return nil
}

// nested reports whether a value has others below it, which have comments of their own.
func nested(value *yaml.Node) bool {
	return value.Kind == yaml.MappingNode && len(value.Content) > 0 && value.Content[0].HeadComment != ""
}

// comment returns the comment of a value, in one line.
func comment(name *yaml.Node) string {
	lines := strings.Split(name.HeadComment, "\n")
	for i := range lines {
		lines[i] = strings.TrimPrefix(strings.TrimPrefix(lines[i], "#"), " ")
	}
	return strings.Join(lines, " ")
}

// flow returns a value in one line.
func flow(value *yaml.Node) (string, error) {
	one := *value
	one.Style |= yaml.FlowStyle
	text, err := yaml.Marshal(&one)
	if err != nil {
		return "", err
	}
	line := strings.TrimSpace(string(text))
	if strings.ContainsAny(line, "\n`") {
		return "", errors.New("a default does not fit into one line of a table: " + line)
	}
	return line, nil
}
