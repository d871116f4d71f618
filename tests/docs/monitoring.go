package docs

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
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

// RuleGroups returns the alerts of a PrometheusRule.
func RuleGroups(t testing.TB, file string) []RuleGroup {
	t.Helper()
	var rule struct{ Spec struct{ Groups []RuleGroup } }
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(source, &rule))
	return rule.Spec.Groups
}

// Panel is a panel of a dashboard.
type Panel struct {
	Title   string
	Targets []struct{ Expr string }
}

// Panels returns the panels of a dashboard for Grafana.
func Panels(t testing.TB, file string) []Panel {
	t.Helper()
	var board struct{ Panels []Panel }
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(source, &board))
	return board.Panels
}
