package harness

import (
	"context"
	"fmt"
	"maps"

	dto "github.com/prometheus/client_model/go"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Scrape reads the metrics of the agent on a node.
func (w *Testbed) Scrape(ctx context.Context, node string) (map[string]*dto.MetricFamily, error) {
	agent, err := w.AgentPod(ctx, node)
	if err != nil {
		return nil, err
	}
	return w.Cluster.Scrape(ctx, agent)
}

// Metric returns the sum of all series of a metric of the agent on a node.
func (w *Testbed) Metric(ctx context.Context, node, name string) (float64, error) {
	families, err := w.Scrape(ctx, node)
	if err != nil {
		return 0, err
	}
	if families[name] == nil {
		return 0, fmt.Errorf("the agent on %s has no metric %s", node, name)
	}
	return kube.Total(families[name], nil), nil
}

// SumBy adds up the series of all agents that have the given labels, by the values of another
// label.
func (w *Testbed) SumBy(ctx context.Context, metric, by string, labels map[string]string) (map[string]int, error) {
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
			if n := int(kube.Total(families[metric], these)); n > 0 {
				out[value] += n
			}
		}
	}
	return out, nil
}
