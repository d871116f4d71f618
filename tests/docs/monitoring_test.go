package docs

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/prometheus"
)

var (
	metricName = regexp.MustCompile(`\bctrlmesh_[a-z0-9_]+(\{[^}]*\})?`)
	grouping   = regexp.MustCompile(`\b(?:by|without) \(([^)]*)\)`)
	labelled   = regexp.MustCompile(`([a-z_]+)(?:=~|!~|!=|=)"`)
	shown      = regexp.MustCompile(`\$labels\.([a-z_]+)`)
)

// asks requires that the metrics of an expression exist and have its labels, and returns those
// labels. Labels that Prometheus adds are allowed.
func asks(t *testing.T, known map[string]Metric, expr string) map[string]bool {
	labels := map[string]bool{"pod": true, "namespace": true}
	for _, use := range metricName.FindAllString(expr, -1) {
		name, selector, _ := strings.Cut(use, "{")
		m, ok := known[name]
		for _, part := range []string{"_bucket", "_sum", "_count"} {
			if h, is := strings.CutSuffix(name, part); is && known[h].Type == "histogram" {
				m, ok = known[h], true
				labels["le"] = true
			}
		}
		assert.True(t, ok, "%s: docs/metrics.md does not list %s: correct the expression, or list the metric", expr, name)
		has := map[string]bool{"pod": true}
		for label := range strings.SplitSeq(m.Labels, ", ") {
			has[label] = true
		}
		for _, label := range labelled.FindAllStringSubmatch(selector, -1) {
			assert.True(t, has[label[1]], "%s: %s has no label %s by docs/metrics.md: correct the expression", expr, name, label[1])
		}
		maps.Copy(labels, has)
	}
	for _, g := range grouping.FindAllStringSubmatch(expr, -1) {
		for label := range strings.SplitSeq(g[1], ", ") {
			assert.True(t, labels[label], "%s: no metric of it has the label %s: correct the grouping", expr, label)
		}
	}
	return labels
}

func metrics(t *testing.T) map[string]Metric {
	known := Metrics(t, "../../docs/metrics.md", "## Agent")
	maps.Copy(known, Metrics(t, "../../docs/metrics.md", "## Manager"))
	return known
}

// Alerts use existing metrics, and link to a section that says what to do.
func TestAlerts(t *testing.T) {
	known := metrics(t)
	anchors := Anchors(t, "../../docs/operations.md")
	seen := map[string]bool{}
	groups, err := prometheus.ReadRules("../..")
	require.NoError(t, err)
	for _, g := range groups {
		for _, r := range g.Rules {
			assert.False(t, seen[r.Alert], "there are two alerts %s: rename one", r.Alert)
			seen[r.Alert] = true
			labels := asks(t, known, r.Expr)
			for _, of := range shown.FindAllStringSubmatch(r.Annotations["summary"], -1) {
				assert.True(t, labels[of[1]], "the summary of %s shows label %s, which its expression does not have: correct one of them", r.Alert, of[1])
			}
			assert.Contains(t, []string{"critical", "warning", "info"}, r.Labels["severity"], "give %s a severity", r.Alert)
			assert.NotEmpty(t, r.Annotations["description"], "give %s a description", r.Alert)
			page, section, _ := strings.Cut(r.Annotations["runbook_url"], "#")
			assert.True(t, strings.HasSuffix(page, "/docs/operations.md"), "the runbook_url of %s must lead to docs/operations.md", r.Alert)
			assert.True(t, anchors[section], "the runbook_url of %s leads to section %q of docs/operations.md, which does not exist: write it, or correct the link", r.Alert, section)
		}
	}
	require.GreaterOrEqual(t, len(seen), 20)
}

// The dashboard shows existing metrics, and all but some of them.
func TestDashboard(t *testing.T) {
	known := metrics(t)
	unseen := maps.Clone(known)
	for _, p := range Panels(t, "../../deploy/monitoring/dashboard.json") {
		for _, target := range p.Targets {
			asks(t, known, target.Expr)
			for name := range known {
				if strings.Contains(target.Expr, name) {
					delete(unseen, name)
				}
			}
		}
	}
	require.ElementsMatch(t, []string{
		"ctrlmesh_manager_compile_seconds", "ctrlmesh_manager_host_network_nodes", "ctrlmesh_manager_nodes", "ctrlmesh_mesh_ca_rotation", "ctrlmesh_mesh_ca_rotation_waiting_pods",
		"ctrlmesh_passthrough_connections_total", "ctrlmesh_stamped_objects_total", "ctrlmesh_webhook_interruptions_total",
	}, slices.Collect(maps.Keys(unseen)), "metrics that the dashboard does not show: add a panel for a new one to deploy/monitoring/dashboard.json, or list it here")
}
