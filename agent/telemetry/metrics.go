package telemetry

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/internal/listen"
)

var modes = []capture.Mode{capture.EBPF, capture.IPTables, capture.Address}

// Metrics are the metrics of one agent.
type Metrics struct {
	pods             *prometheus.GaugeVec
	captureSeconds   prometheus.Histogram
	enrolmentSeconds prometheus.Histogram
	lockHolder       *prometheus.GaugeVec
	routed           *prometheus.GaugeVec
	interruptions    *prometheus.CounterVec
	losses           *prometheus.CounterVec
	repaired         *prometheus.CounterVec
	refused          *prometheus.CounterVec
}

// NewMetrics registers the metrics of an agent.
func NewMetrics(r prometheus.Registerer) *Metrics {
	register := promauto.With(r)
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return register.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	histogram := func(name, help string) prometheus.Histogram {
		return register.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.0005, 2, 12)})
	}
	m := &Metrics{
		pods:             gauge("ctrlmesh_captured_pods", "Labelled pods of this node, by capture mode; none: not captured.", "mode"),
		captureSeconds:   histogram("ctrlmesh_capture_duration_seconds", "Time to capture a pod once its network namespace exists."),
		enrolmentSeconds: histogram("ctrlmesh_enrolment_duration_seconds", "Time from the runtime's notification that a pod starts until the pod is captured."),
		lockHolder:       gauge("ctrlmesh_lock_holder", "1 while the member holds its shard's lock, by its last renewal.", "namespace", "pod", "shard"),
		routed:           gauge("ctrlmesh_webhook_routed", "1 while all reviews that arrive at the pod's webhook are routed, 0 while the application may answer them by itself.", "namespace", "pod"),
		interruptions:    counter("ctrlmesh_webhook_interruptions_total", "Times that ctrlmesh_webhook_routed of the pod went from 1 to 0.", "namespace", "pod"),
		losses:           counter("ctrlmesh_agent_redirection_losses_total", "Redirections that were found to have no effect.", "mode"),
		repaired:         counter("ctrlmesh_agent_redirection_repaired_total", "Redirections that were found to have no effect and are in force again.", "mode"),
		refused: counter("ctrlmesh_agent_refused_connections_total",
			"Connections to this agent that were closed. In capture mode address: the peer is no captured pod (stranger), or too many of its connections wait (queue_full). Under hostNetwork: no process of the pod made it (foreign_process). For health and metrics: the peer has too many (per_peer), or all peers together (total).", "reason"),
	}
	for _, why := range []string{string(capture.Stranger), string(capture.QueueFull), string(capture.ForeignProcess), refusedBy(listen.PerPeer), refusedBy(listen.Total)} {
		m.refused.WithLabelValues(why)
	}
	for _, mode := range modes { // a rate needs the zero before the first
		m.losses.WithLabelValues(string(mode))
		m.repaired.WithLabelValues(string(mode))
	}
	return m
}

// Captured counts a pod that was captured within d after its network namespace existed.
func (m *Metrics) Captured(d time.Duration) { m.captureSeconds.Observe(d.Seconds()) }

// Enrolled counts a pod that was captured within d of the runtime's announcement.
func (m *Metrics) Enrolled(d time.Duration) { m.enrolmentSeconds.Observe(d.Seconds()) }

// Lost counts a redirection that was found to have no effect.
func (m *Metrics) Lost(mode capture.Mode) { m.losses.WithLabelValues(string(mode)).Inc() }

// Repaired counts a redirection that has effect again.
func (m *Metrics) Repaired(mode capture.Mode) { m.repaired.WithLabelValues(string(mode)).Inc() }

// RefusedCapture counts a connection of a captured pod, or to its agent, that was closed.
func (m *Metrics) RefusedCapture(r capture.Refusal) { m.refused.WithLabelValues(string(r)).Inc() }

// RefusedEndpoint counts a connection for health and metrics that a bound closed.
func (m *Metrics) RefusedEndpoint(r listen.Refusal) {
	m.refused.WithLabelValues(refusedBy(r.Bound)).Inc()
}

func refusedBy(b listen.Bound) string { return strings.ReplaceAll(string(b), "-", "_") }

// SetLockHolder records whether a member of a shard with a lock holds it.
func (m *Metrics) SetLockHolder(namespace, pod, shard string, holds bool) {
	m.lockHolder.WithLabelValues(namespace, pod, shard).Set(number(holds))
}

// SetRouted records whether the reviews that arrive at a pod are routed. before is what was
// recorded last.
func (m *Metrics) SetRouted(namespace, pod string, before, routed bool) {
	m.routed.WithLabelValues(namespace, pod).Set(number(routed))
	interruptions := m.interruptions.WithLabelValues(namespace, pod) // a rate needs the zero before the first
	if before && !routed {
		interruptions.Inc()
	}
}

// ForgetRouted drops the series of a pod whose reviews are not to be routed.
func (m *Metrics) ForgetRouted(namespace, pod string) {
	m.routed.DeleteLabelValues(namespace, pod)
	m.interruptions.DeleteLabelValues(namespace, pod)
}

// Forget drops the series of a pod that was deleted.
func (m *Metrics) Forget(namespace, pod string) {
	m.lockHolder.DeletePartialMatch(prometheus.Labels{"namespace": namespace, "pod": pod})
	m.ForgetRouted(namespace, pod)
}

// SetPods records the number of pods by capture mode; "" for those that are not captured.
func (m *Metrics) SetPods(byMode map[string]int) {
	for _, mode := range modes {
		m.pods.WithLabelValues(string(mode)).Set(float64(byMode[string(mode)]))
	}
	m.pods.WithLabelValues("none").Set(float64(byMode[""]))
}

// RegisterConnected registers the metric of the stream to the manager.
func RegisterConnected(r prometheus.Registerer, connected func() bool) {
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "ctrlmesh_agent_manager_connected", Help: "1 while this agent is connected to a manager and has all policies. The last policies apply otherwise.",
	}, func() float64 { return number(connected()) }))
}

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
