package proxy

import "github.com/prometheus/client_golang/prometheus"

var breakersOpen = prometheus.NewDesc("ctrlmesh_circuitbreaker_rule_open_pods",
	"Pods of this node in which the breaker of a rule is not closed.",
	[]string{"namespace", "workload", "shard", "circuitbreaker", "rule"}, nil)

// openBreakers collects what is open when it is asked.
type openBreakers struct{ *Server }

// Describe implements prometheus.Collector.
func (openBreakers) Describe(to chan<- *prometheus.Desc) { to <- breakersOpen }

// Collect implements prometheus.Collector.
func (o openBreakers) Collect(to chan<- prometheus.Metric) {
	open := map[ruleSeries]int{}
	o.mu.Lock()
	for p := range o.pods {
		if pol := p.policy.Load(); pol != nil {
			for _, n := range pol.rules.Opened() {
				open[pol.series(n.Breaker, n.Rule)]++
			}
		}
	}
	o.mu.Unlock()
	for s, n := range open {
		to <- prometheus.MustNewConstMetric(breakersOpen, prometheus.GaugeValue, float64(n), s.namespace, s.workload, s.shard, s.source, s.rule)
	}
}
