package kube

import (
	"bytes"
	"context"
	"fmt"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Scrape reads a pod's metrics as Prometheus would find them, by the pod's annotations.
func (c *Cluster) Scrape(ctx context.Context, pod *corev1.Pod) (map[string]*dto.MetricFamily, error) {
	if pod.Annotations["prometheus.io/scrape"] != "true" {
		return nil, fmt.Errorf("pod %s does not ask to be scraped", pod.Name)
	}
	body, err := c.Clientset.CoreV1().Pods(pod.Namespace).
		ProxyGet("http", pod.Name, pod.Annotations["prometheus.io/port"], "/metrics", nil).DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of %s: %w", pod.Name, err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	return families, failure.Wrap(err, "reading the metrics of %s", pod.Name)
}

// Total returns the sum of the series that have the given labels: of their values, and of a
// histogram the number of samples.
func Total(family *dto.MetricFamily, labels map[string]string) (sum float64) {
	for _, series := range family.GetMetric() {
		matching := 0
		for _, l := range series.GetLabel() {
			if value, ok := labels[l.GetName()]; ok && value == l.GetValue() {
				matching++
			}
		}
		if matching == len(labels) {
			sum += series.GetCounter().GetValue() + series.GetGauge().GetValue() + float64(series.GetHistogram().GetSampleCount())
		}
	}
	return sum
}
