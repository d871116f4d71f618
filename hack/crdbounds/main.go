// Command crdbounds bounds the label selectors in CustomResourceDefinitions. Their type
// is Kubernetes' own, to whose fields no marker can be attached.
package main

import (
	"fmt"
	"os"

	"sigs.k8s.io/yaml"
)

const (
	maxExpressions = 64
	// Selectors of objects name namespaces; those of pods have few values.
	maxValues   = 10_000
	maxValue    = 63
	maxLabelKey = 317
)

func main() {
	for _, path := range os.Args[1:] {
		if err := bound(path); err != nil {
			fmt.Fprintln(os.Stderr, "crdbounds:", err)
			os.Exit(1)
		}
	}
}

func bound(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var definition map[string]any
	if err := yaml.Unmarshal(text, &definition); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	walk(definition)
	if text, err = yaml.Marshal(definition); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return os.WriteFile(path, append([]byte("---\n"), text...), 0o644)
}

// walk bounds all selectors beneath a node.
func walk(node any) {
	switch node := node.(type) {
	case []any:
		for _, child := range node {
			walk(child)
		}
	case map[string]any:
		if properties, ok := node["properties"].(map[string]any); ok {
			boundSelector(properties)
		}
		for _, child := range node {
			walk(child)
		}
	}
}

// boundSelector bounds the properties of a selector; those of other objects stay.
func boundSelector(properties map[string]any) {
	expressions, ok := properties["matchExpressions"].(map[string]any)
	labels, hasLabels := properties["matchLabels"].(map[string]any)
	if !ok || !hasLabels {
		return
	}
	labels["maxProperties"] = maxExpressions
	labels["additionalProperties"].(map[string]any)["maxLength"] = maxValue
	expressions["maxItems"] = maxExpressions
	requirement := expressions["items"].(map[string]any)["properties"].(map[string]any)
	requirement["key"].(map[string]any)["maxLength"] = maxLabelKey
	values := requirement["values"].(map[string]any)
	values["maxItems"] = maxValues
	values["items"].(map[string]any)["maxLength"] = maxValue
}
