// Package metrics has the series that the proxy counts. Their labels are bounded: verbs
// are a fixed set, codes are three digits, resources are capped per workload, and the
// series of a workload or a rule are deleted with the last pod that has it.
package metrics

import (
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// MaxResources bounds the resource label of one workload; further ones are counted as
// other. A path can name any resource.
const MaxResources = 200

// MaxClusters bounds the cluster label of one workload.
const MaxClusters = 500

const other = "other"

// Unclassified is the verb of a request that was refused before the proxy had parsed it.
const Unclassified = "unclassified"

// ClientGone is the code of a request whose client went away before its response. It is
// never sent.
const ClientGone = 499

// Node has the series of one node.
type Node struct {
	Refusals, UpstreamErrors, DryRun                *prometheus.CounterVec
	Bounds, Tunnels, TunnelBytes, Filtered, Foreign *prometheus.CounterVec
	Egress, Reviews, Supplemented, Distrusted       *prometheus.CounterVec
	MemberClusters, Shadow                          *prometheus.CounterVec
	Panics                                          prometheus.Counter
	Limits, Faults                                  Rules
	Workloads                                       Workloads
	metered
}

// metered are the series that [Meters] looks up.
type metered struct {
	requests, bytes, apiserver, delivery *prometheus.CounterVec
	added                                *prometheus.HistogramVec
	Watches                              *prometheus.GaugeVec
}

// workloadLabels come first in all series of a workload.
var workloadLabels = []string{"namespace", "workload", "shard"}

// NewNode returns the series of a node. It registers them if r is not nil, and fails if a
// name is taken.
func NewNode(r prometheus.Registerer) (*Node, error) {
	labels := func(more ...string) []string { return append(workloadLabels[:3:3], more...) }
	m := &Node{Panics: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "ctrlmesh_panics_total", Help: "Requests that failed with 500 because of a bug of the proxy.",
	})}
	m.Workloads.used, m.Limits.used, m.Faults.used = map[workloadID]*Workload{}, map[Rule]*ruleCounts{}, map[Rule]*ruleCounts{}
	m.added = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "ctrlmesh_added_latency_seconds",
		Help:    "Time that the proxy added to a request: from reading its head to sending it to the apiserver, and from reading the head of the response to writing it.",
		Buckets: []float64{10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 250e-3, 1},
	}, labels("verb"))
	m.Watches = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "ctrlmesh_watches", Help: "Open watches."}, labels("resource"))
	all := []prometheus.Collector{m.Panics}
	m.Workloads.vectors = []vector{m.added, m.Watches}
	for _, c := range []struct {
		vec        **prometheus.CounterVec
		name, help string
		labels     []string
	}{
		{&m.requests, "requests", "Requests of captured pods to the apiserver, including those that the proxy refused, by the code of the response. Code 499: the client went away first; other: the connection was closed without a response.", []string{"verb", "resource", "code"}},
		{&m.bytes, "response_bytes", "Bytes of the response bodies sent to captured pods.", []string{"verb", "resource"}},
		{&m.apiserver, "apiserver_seconds", "Time until the apiserver answered, added up. The time per second is the mean number of requests that it works on at a time. Watches and connections into pods are left out.", []string{"verb", "resource"}},
		{&m.delivery, "watch_delivery_seconds", "Time that bytes of watches waited until the pod took them, added up: near one second per second and watch, its informers lag behind.", []string{"resource"}},
		{&m.Refusals, "refusals", "Requests that the proxy answered itself, by reason.", []string{"reason"}},
		{&m.UpstreamErrors, "upstream_errors", "Requests that the apiserver did not answer.", nil},
		{&m.Bounds, "bounds_reached", "Connections and requests of captured pods that were refused because the pod reached a bound of the proxy.", []string{"bound"}},
		{&m.Distrusted, "distrusted_handshakes", "TLS handshakes that clients of captured pods ended because they do not trust the mesh's CA.", nil},
		{&m.Foreign, "foreign_requests", "Requests for single objects of another shard, by action: refused, or observed (and passed). Unknown: passed without knowing the owner.", []string{"verb", "action"}},
		{&m.Tunnels, "passthrough_connections", "Connections of captured pods that were tunnelled without decryption.", nil},
		{&m.TunnelBytes, "passthrough_bytes", "Bytes of tunnelled connections, to the apiserver (up) and to the pod (down).", []string{"direction"}},
		{&m.Filtered, "filtered_objects", "Objects of lists and watches that the proxy filtered, by result: kept or dropped.", []string{"resource", "result"}},
		{&m.Supplemented, "supplemented_watches", "Watches that resumed after keys had moved, and brought what the shard had gained and lost.", []string{"resource"}},
		{&m.DryRun, "dry_run_requests", "Requests of members under spec.dryRun, by what the policy would do: narrowed, refused or renamed.", []string{"verb", "action"}},
		{&m.MemberClusters, "cluster_requests", "Requests into member clusters, by the code of the response as in ctrlmesh_requests_total. They are in that metric, too.", []string{"cluster", "code"}},
		{&m.Shadow, "shadow_writes", "Writes of a shadow, which are dry runs, by result: agreed, differed, refused or uncompared.", []string{"verb", "result"}},
		{&m.Egress, "egress_requests", "Requests of captured pods to other hosts than the apiserver, or connections where requests cannot be seen, by verdict.", []string{"protocol", "verdict"}},
		{&m.Reviews, "reviews", "Requests to webhooks of captured pods, by decision: local, forwarded (to a pod of the shard that owns the namespace), unreachable (no such pod could be reached; answered locally), or allowed (outside the limits of the operator).", []string{"decision"}},
	} {
		*c.vec = counter(c.name, c.help, c.labels...)
		m.Workloads.vectors = append(m.Workloads.vectors, *c.vec)
	}
	m.Limits.counts = counter("limited_requests", "Requests of captured pods that a rule of a CircuitBreaker refused, by rule and reason.", "circuitbreaker", "rule", "reason")
	m.Faults.counts = counter("faults_injected", "Faults injected into requests of captured pods, by the rule of a FaultInjection.", "faultinjection", "rule", "kind")
	all = append(all, m.Limits.counts, m.Faults.counts)
	for _, v := range m.Workloads.vectors {
		all = append(all, v)
	}
	if r == nil {
		return m, nil
	}
	for _, c := range all {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "ctrlmesh_" + name + "_total", Help: help}, append(workloadLabels[:3:3], labels...))
}

// Meters are the series of one verb and resource of a workload, looked up once.
type Meters struct {
	Bytes          prometheus.Counter
	Apiserver      prometheus.Counter // in seconds
	Added          prometheus.Observer
	Watches        prometheus.Gauge   // nil unless the verb is watch
	Delivery       prometheus.Counter // of watches, in seconds; nil as Watches
	UpstreamErrors prometheus.Counter
	codes          Counters[int]
	request        func(code string) prometheus.Counter
}

// Meters returns the series of a verb and resource. An empty resource stands for paths, and
// for requests that are [Unclassified].
func (m *Node) Meters(w *Workload, verb, resource string) *Meters {
	verb = Verb(verb)
	if known, ok := w.meters.Load([2]string{verb, resource}); ok {
		return known.(*Meters)
	}
	verb, resource = strings.Clone(verb), strings.Clone(resource) // they may be parts of a long path
	out := &Meters{
		Bytes:          w.Counter(m.bytes, verb, resource),
		Apiserver:      w.Counter(m.apiserver, verb, resource),
		Added:          series(w, m.added, uncounted.added, verb),
		UpstreamErrors: w.Counter(m.UpstreamErrors),
		request:        func(code string) prometheus.Counter { return w.Counter(m.requests, verb, resource, code) },
	}
	if verb == "watch" {
		out.Watches, out.Delivery = series(w, m.Watches, uncounted.watches, resource), w.Counter(m.delivery, resource)
	}
	known, _ := w.meters.LoadOrStore([2]string{verb, resource}, out)
	return known.(*Meters)
}

// Count counts a request by the code of its response; 0: it has none.
func (m *Meters) Count(code int) {
	m.codes.Of(code, func(code int) prometheus.Counter { return m.request(codeLabel(code)) }).Inc()
}

func codeLabel(code int) string {
	if code >= 100 && code <= 599 {
		return strconv.Itoa(code)
	}
	return other
}

// Verb returns the label of a verb.
func Verb(verb string) string {
	switch verb {
	case "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection",
		"post", "put", "head", "options", Unclassified:
		return verb
	}
	return other
}
