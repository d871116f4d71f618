package agent

import (
	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	pods           *prometheus.GaugeVec
	captureSeconds prometheus.Histogram
	managerSynced  prometheus.Gauge
	lockHolder     *prometheus.GaugeVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		pods: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "ctrlmesh_captured_pods", Help: "Labelled pods of this node, by capture mode; none: not captured.",
		}, []string{"mode"}),
		captureSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "ctrlmesh_capture_duration_seconds", Help: "Time to capture a pod once its network namespace is there.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 12),
		}),
		managerSynced: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "ctrlmesh_manager_synced", Help: "1 once this agent has been in step with a manager since it started.",
		}),
		lockHolder: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "ctrlmesh_lock_holder", Help: "1 while the member holds its shard's lock, by its last renewal.",
		}, []string{"namespace", "pod", "shard"}),
	}
	r.MustRegister(m.pods, m.captureSeconds, m.managerSynced, m.lockHolder)
	return m
}

// setLockHolder tells of a member of a shard with a lock.
func (m *metrics) setLockHolder(namespace, pod, shard string, holds bool) {
	value := 0.0
	if holds {
		value = 1
	}
	m.lockHolder.WithLabelValues(namespace, pod, shard).Set(value)
}

// forget drops what is told of a pod that is gone.
func (m *metrics) forget(namespace, pod string) {
	m.lockHolder.DeletePartialMatch(prometheus.Labels{"namespace": namespace, "pod": pod})
}

func (m *metrics) setPods(byMode map[string]int) {
	for _, mode := range []string{"ebpf", "iptables", ""} {
		label := mode
		if mode == "" {
			label = "none"
		}
		m.pods.WithLabelValues(label).Set(float64(byMode[mode]))
	}
}
