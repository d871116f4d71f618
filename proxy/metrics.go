package proxy

import (
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// maxResourceNames bounds the resource label of one owner; what comes after is
// "other". Paths can name anything.
const maxResourceNames = 200

const other = "other"

// metrics are the node's series. Their labels are bounded: verbs are a fixed
// set, codes are three digits, resources are capped per owner, and owners and rules
// take their series with them.
type metrics struct {
	requests, bytes, refusals, upstreamErrors       *prometheus.CounterVec
	added                                           *prometheus.HistogramVec
	watches                                         *prometheus.GaugeVec
	panics                                          prometheus.Counter
	dryRun                                          *prometheus.CounterVec
	bounds, tunnels, tunnelBytes, filtered, foreign *prometheus.CounterVec
	limits                                          ruleMetrics
	faults                                          ruleMetrics
	egress                                          *prometheus.CounterVec

	owners owners
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	owner := []string{"namespace", "workload", "shard"}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "ctrlmesh_" + name, Help: help}, append(owner[:3:3], labels...))
	}
	m := &metrics{
		requests:       counter("requests_total", "Requests of captured pods, by how they were answered. Code 499: the client went away first.", "verb", "resource", "code"),
		bytes:          counter("response_bytes_total", "Bytes of answers' bodies sent to captured pods.", "verb", "resource"),
		refusals:       counter("refusals_total", "Requests that the proxy answered itself, by reason.", "reason"),
		upstreamErrors: counter("upstream_errors_total", "Requests that the apiserver did not answer."),
		added: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "ctrlmesh_added_latency_seconds",
			Help: "Time a request spent in the proxy: from its head read to its leaving for the apiserver, and from the answer's head read to it written.",
			Buckets: []float64{
				10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 250e-3, 1,
			},
		}, append(owner[:3:3], "verb")),
		watches: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "ctrlmesh_watches", Help: "Watches open.",
		}, append(owner[:3:3], "resource")),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "ctrlmesh_panics_total", Help: "Requests that met a bug of the proxy and were answered 500.",
		}),
		bounds:      counter("bounds_reached_total", "Connections and requests of captured pods refused because the pod had reached a bound of the proxy.", "bound"),
		foreign:     counter("foreign_requests_total", "Requests for single objects that are another shard's, by what became of them: refused, or observed and passed on. Unknown were those passed on of which it could not be told.", "verb", "action"),
		tunnels:     counter("passthrough_connections_total", "Connections of captured pods tunnelled opaque."),
		tunnelBytes: counter("passthrough_bytes_total", "Bytes of connections tunnelled opaque, to the apiserver (up) and to the pod (down).", "direction"),
		filtered:    counter("filtered_objects_total", "Objects that the proxy read on their way to captured pods, by what became of them: kept or dropped.", "resource", "result"),
	}
	m.dryRun = counter("dry_run_requests_total", "Requests of members under spec.dryRun, by what would have been done: narrowed, refused or renamed.", "verb", "action")
	m.limits.counts = counter("limited_requests_total", "Requests of captured pods that a rule of a CircuitBreaker refused, by the rule and why.", "circuitbreaker", "rule", "reason")
	m.faults.counts = counter("faults_injected_total", "Faults injected into requests of captured pods, by the rule of a FaultInjection.", "faultinjection", "rule", "kind")
	m.egress = counter("egress_requests_total", "Requests of captured pods to other hosts than the apiserver, or connections where no request is seen, by what became of them.", "protocol", "verdict")
	m.owners.vectors = []vector{m.requests, m.bytes, m.refusals, m.upstreamErrors, m.added, m.watches, m.bounds, m.tunnels, m.tunnelBytes, m.filtered, m.foreign, m.egress, m.dryRun}
	if r == nil {
		return m, nil
	}
	all := []prometheus.Collector{m.panics, m.limits.counts, m.faults.counts}
	for _, v := range m.owners.vectors {
		all = append(all, v)
	}
	for _, c := range all {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// meters are the series of one plan, looked up once.
type meters struct {
	bytes          prometheus.Counter
	added          prometheus.Observer
	watches        prometheus.Gauge // nil if it is about none
	upstreamErrors prometheus.Counter
	codes          counters[int]
	request        func(code string) prometheus.Counter
}

func (m *metrics) of(o *owner, verb, resource string, isResource bool) *meters {
	if !isResource {
		resource = ""
	}
	verb = verbLabel(verb)
	out := &meters{
		bytes:          o.counter(m.bytes, verb, resource),
		added:          series(o, m.added, uncounted.added, verb),
		upstreamErrors: o.counter(m.upstreamErrors),
		request:        func(code string) prometheus.Counter { return o.counter(m.requests, verb, resource, code) },
	}
	if verb == "watch" {
		out.watches = series(o, m.watches, uncounted.watches, resource)
	}
	return out
}

func (m *meters) count(code int) {
	m.codes.of(code, func(code int) prometheus.Counter {
		if code >= 100 && code <= 599 {
			return m.request(strconv.Itoa(code))
		}
		return m.request(other)
	}).Inc()
}

func verbLabel(verb string) string {
	switch verb {
	case "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection",
		"post", "put", "head", "options":
		return verb
	}
	return other
}

// resourceNames caps the resource labels of one owner.
type resourceNames struct {
	mu    sync.Mutex
	known map[string]bool
}

func (n *resourceNames) label(resource string) string {
	if !plausible(resource) {
		return other
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.known[resource] {
		return resource
	}
	if len(n.known) >= maxResourceNames {
		return other
	}
	if n.known == nil {
		n.known = map[string]bool{}
	}
	n.known[resource] = true
	return resource
}

func plausible(resource string) bool {
	if len(resource) > 63 {
		return false
	}
	for i := range len(resource) {
		if c := resource[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.' {
			return false
		}
	}
	return true
}

// statusClientGone is what a request is counted as whose client went away before
// it was answered. It is never sent.
const statusClientGone = 499
