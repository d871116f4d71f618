package harness

import (
	"bytes"
	"context"
	"fmt"
	"maps"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Scrape reads the metrics of the agent on a node.
func (w *World) Scrape(ctx context.Context, node string) (map[string]*dto.MetricFamily, error) {
	agent, err := w.AgentPod(ctx, node)
	if err != nil {
		return nil, err
	}
	body, err := w.Clientset.CoreV1().Pods(agent.Namespace).ProxyGet("http", agent.Name, agent.Annotations["prometheus.io/port"], "/metrics", nil).DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of %s: %w", agent.Name, err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	return families, failure.Wrap(err, "reading the metrics of %s", agent.Name)
}

// Metric returns the sum of all series of a metric of the agent on a node.
func (w *World) Metric(ctx context.Context, node, name string) (float64, error) {
	families, err := w.Scrape(ctx, node)
	if err != nil {
		return 0, err
	}
	if families[name] == nil {
		return 0, fmt.Errorf("the agent on %s has no metric %s", node, name)
	}
	return Total(families[name], nil), nil
}

// Total returns the sum of the series of a counter or gauge that have the given labels.
func Total(family *dto.MetricFamily, labels map[string]string) (sum float64) {
	for _, series := range family.GetMetric() {
		matching := 0
		for _, l := range series.GetLabel() {
			if value, ok := labels[l.GetName()]; ok && value == l.GetValue() {
				matching++
			}
		}
		if matching == len(labels) {
			sum += series.GetCounter().GetValue() + series.GetGauge().GetValue()
		}
	}
	return sum
}

// SumBy adds up the series of all agents that have the given labels, by the values of another
// label.
func (w *World) SumBy(ctx context.Context, metric, by string, labels map[string]string) (map[string]int, error) {
	out := map[string]int{}
	for _, node := range w.Nodes {
		families, err := w.Scrape(ctx, node)
		if err != nil {
			return nil, err
		}
		values := map[string]bool{}
		for _, series := range families[metric].GetMetric() {
			for _, l := range series.GetLabel() {
				if l.GetName() == by {
					values[l.GetValue()] = true
				}
			}
		}
		for value := range values {
			these := maps.Clone(labels)
			these[by] = value
			if n := int(Total(families[metric], these)); n > 0 {
				out[value] += n
			}
		}
	}
	return out, nil
}
