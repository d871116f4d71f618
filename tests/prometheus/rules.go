package prometheus

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/prometheus/common/model"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// RuleGroup is a group of alerts, in the format of Prometheus.
type RuleGroup struct {
	Name  string `json:"name"`
	Rules []Rule `json:"rules"`
}

// Rule is an alert.
type Rule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// ReadRules returns the alerts of the mesh. root is the root directory of the repository.
func ReadRules(root string) ([]RuleGroup, error) {
	var rule struct{ Spec struct{ Groups []RuleGroup } }
	source, err := os.ReadFile(filepath.Join(root, "deploy", "monitoring", "alerts.yaml"))
	if err == nil {
		err = yaml.Unmarshal(source, &rule)
	}
	return rule.Spec.Groups, failure.Wrap(err, "reading the alerts")
}

// What hurried alerts are evaluated by. A range has several scrapes, and a test does not wait for longer
// than the longest time.
const (
	hurry        = 60
	shortestTime = time.Second
	longestTime  = 20 * time.Second
	shortestSpan = 10 * time.Second
	longestSpan  = 2 * time.Minute
)

var spans = regexp.MustCompile(`\[\w+\]`)

// Hurried returns alerts whose times are sixtieths of those of the given ones, within bounds.
func Hurried(groups []RuleGroup) (out []RuleGroup, err error) {
	divide := func(text string, shortest, longest time.Duration) string {
		d, parseErr := model.ParseDuration(text)
		if parseErr != nil {
			err = fmt.Errorf("reading the times of the alerts: %w", parseErr)
		}
		return model.Duration(min(max(time.Duration(d)/hurry, shortest), longest).Truncate(time.Second)).String()
	}
	for _, g := range groups {
		next := RuleGroup{Name: g.Name}
		for _, r := range g.Rules {
			if r.For != "" {
				r.For = divide(r.For, shortestTime, longestTime)
			}
			r.Expr = spans.ReplaceAllStringFunc(r.Expr, func(span string) string {
				return "[" + divide(span[1:len(span)-1], shortestSpan, longestSpan) + "]"
			})
			next.Rules = append(next.Rules, r)
		}
		out = append(out, next)
	}
	return out, err
}

func write(path string, content any) error {
	data, err := yaml.Marshal(content)
	if err == nil {
		err = os.WriteFile(path, data, 0o600)
	}
	return failure.Wrap(err, "writing %s", filepath.Base(path))
}
