package monitoring

import (
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/manager/query"
	"github.com/ctrlmesh/ctrlmesh/tests/docs"
	"github.com/ctrlmesh/ctrlmesh/tests/prometheus"
)

const soon = 30 * time.Second

// program returns the path of a program of Prometheus.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := prometheus.Program(t.Context(), "../..", name)
	require.NoError(t, err)
	return path
}

// start starts a Prometheus that scrapes a target with some metrics.
func start(t *testing.T, metrics string) *prometheus.Server {
	t.Helper()
	target := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		_, _ = io.WriteString(w, metrics)
	}))
	t.Cleanup(target.Close)
	type object = map[string]any
	server, err := prometheus.Start(t.Context(), prometheus.Options{Root: "../..", Directory: t.TempDir(), Config: object{
		"global": object{"scrape_interval": "1s"},
		"scrape_configs": []object{{
			"job_name": "tenant", "honor_labels": true,
			"static_configs": []object{{"targets": []string{strings.TrimPrefix(target.URL, "http://")}}},
		}},
	}})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, server.Stop()) })
	return server
}

func TestQueriesOfRolloutsByPrometheus(t *testing.T) {
	t.Parallel()
	p := &query.Prometheus{URL: start(t, `# TYPE app_errors gauge
app_errors{namespace="tenant",shard="a"} 3
app_errors{namespace="tenant",shard="b"} 5
app_errors{namespace="other",shard="a"} 7
# TYPE app_seconds histogram
app_seconds_bucket{le="1"} 4
app_seconds_bucket{le="+Inf"} 4
app_seconds_sum 2
app_seconds_count 4
`).URL}
	ask := func(expression string) (query.Answer, error) {
		return p.Evaluate(t.Context(), query.Query{Namespace: "tenant", Expression: expression})
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		a, err := ask(`app_errors`)
		assert.NoError(c, err)
		assert.Equal(c, 3, a.Numbers)
	}, soon, 100*time.Millisecond)
	for expression, want := range map[string]query.Answer{
		`app_errors{namespace="tenant"}`:                 {Numbers: 2, Min: 3, Max: 5},
		`sum(app_errors{namespace="tenant"})`:            {Numbers: 1, Min: 8, Max: 8},
		`scalar(app_errors{namespace="other"})`:          {Numbers: 1, Min: 7, Max: 7},
		`histogram_quantile(0.5, app_seconds_bucket)`:    {Numbers: 1, Min: 0.5, Max: 0.5},
		`app_errors{namespace="none"}`:                   {Problem: "its result is empty: check that Prometheus has its series"},
		`sum(app_errors) / sum(app_errors - app_errors)`: {Numbers: 1, Min: math.Inf(1), Max: math.Inf(1)},
		`app_errors[5m]`:                                 {Problem: "its result is a range vector: apply a function such as rate or avg_over_time"},
	} {
		got, err := ask(expression)
		require.NoError(t, err, expression)
		require.Equal(t, want, got, expression)
	}
	_, err := ask(`sum(app_errors`)
	require.ErrorContains(t, err, "Prometheus answered with an error: bad_data: invalid parameter \"query\"")
	_, err = ask(`label_replace(app_errors, "shard", "", "", "") + on() group_left() app_errors`)
	require.ErrorContains(t, err, "Prometheus answered with an error: execution")
}

// Prometheus understands all queries of the dashboard.
func TestDashboardByPrometheus(t *testing.T) {
	t.Parallel()
	server := start(t, "")
	panels := docs.Panels(t, "../../deploy/monitoring/dashboard.json")
	require.NotEmpty(t, panels)
	variables := strings.NewReplacer("$__rate_interval", "5m", "$__range", "1h", "$namespace", ".*", "$workload", ".*")
	for _, panel := range panels {
		for _, target := range panel.Targets {
			_, _, err := server.Query(t.Context(), variables.Replace(target.Expr), time.Now())
			assert.NoError(t, err, "%s: %s", panel.Title, target.Expr)
		}
	}
}
