package metrics

import (
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

// Workload has the series of the pods of one workload in one shard. Jobs and bare pods
// always have new names, so the series are deleted with the last pod.
type Workload struct {
	id workloadID

	pods int // that use it; guarded by Workloads.mu

	mu      sync.RWMutex // write-locked by removal alone
	removed bool

	resources, clusters       names
	memberClusters            Counters[memberClusterResult]
	refusals, bounds, reviews Counters[string]
	egress                    Counters[egressResult]
	actions                   Counters[action]
	meters                    sync.Map // [2]string, verb and resource -> *Meters
}

type workloadID struct{ namespace, workload, shard string }

// names are the values of a label, up to a bound.
type names struct {
	mu    sync.Mutex
	known map[string]string
}

type memberClusterResult struct {
	cluster string
	code    int
}

type egressResult struct{ protocol, verdict string }

type action struct {
	in         *prometheus.CounterVec
	verb, name string
}

// Workloads are those of all pods.
type Workloads struct {
	vectors []vector // whose first labels are those of a workload

	mu   sync.Mutex // taken on policy changes
	used map[workloadID]*Workload
}

type vector interface {
	prometheus.Collector
	DeletePartialMatch(prometheus.Labels) int
}

// Acquire returns a workload for a pod, which must release it.
func (ws *Workloads) Acquire(namespace, workload, shard string) *Workload {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	id := workloadID{namespace, workload, shard}
	w := ws.used[id]
	if w == nil {
		w = &Workload{id: id}
		ws.used[id] = w
	}
	w.pods++
	return w
}

// Release ends a pod's use of a workload.
func (ws *Workloads) Release(w *Workload) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w.pods--; w.pods > 0 {
		return
	}
	delete(ws.used, w.id)
	w.mu.Lock()
	w.removed = true
	w.mu.Unlock()
	for _, v := range ws.vectors {
		v.DeletePartialMatch(prometheus.Labels{"namespace": w.id.namespace, "workload": w.id.workload, "shard": w.id.shard})
	}
}

// Len returns the number of workloads that pods use.
func (ws *Workloads) Len() int {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return len(ws.used)
}

// uncounted has the series of requests that end after their workload was removed.
var uncounted = struct {
	count   prometheus.Counter
	added   prometheus.Observer
	watches prometheus.Gauge
}{
	Discard,
	prometheus.NewHistogram(prometheus.HistogramOpts{Name: "uncounted"}),
	prometheus.NewGauge(prometheus.GaugeOpts{Name: "uncounted"}),
}

// Discard is a counter that is not reported.
var Discard = prometheus.NewCounter(prometheus.CounterOpts{Name: "uncounted"})

func series[M any](w *Workload, in interface{ WithLabelValues(...string) M }, removed M, labels ...string) M {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if w.removed {
		return removed
	}
	return in.WithLabelValues(append([]string{w.id.namespace, w.id.workload, w.id.shard}, labels...)...)
}

// Counter returns one of the workload's counters.
func (w *Workload) Counter(in *prometheus.CounterVec, labels ...string) prometheus.Counter {
	return series(w, in, uncounted.count, labels...)
}

// Refused counts a refusal.
func (w *Workload) Refused(m *Node, reason string) {
	w.refusals.Of(reason, func(string) prometheus.Counter { return w.Counter(m.Refusals, reason) }).Inc()
}

// Bounded counts that a bound was reached.
func (w *Workload) Bounded(m *Node, bound string) {
	w.bounds.Of(bound, func(string) prometheus.Counter { return w.Counter(m.Bounds, bound) }).Inc()
}

// Egressed counts a request to another host than the apiserver.
func (w *Workload) Egressed(m *Node, protocol, verdict string) {
	w.egress.Of(egressResult{protocol, verdict}, func(egressResult) prometheus.Counter { return w.Counter(m.Egress, protocol, verdict) }).Inc()
}

// Action returns the counter of an action on a verb, of a vector with these labels.
func (w *Workload) Action(in *prometheus.CounterVec, verb, name string) prometheus.Counter {
	return w.actions.Of(action{in, Verb(verb), name}, func(a action) prometheus.Counter { return w.Counter(in, a.verb, a.name) })
}

// Reviewed counts a request to a webhook.
func (w *Workload) Reviewed(m *Node, decision string) {
	w.reviews.Of(decision, func(string) prometheus.Counter { return w.Counter(m.Reviews, decision) }).Inc()
}

// Resource returns the label of a resource.
func (w *Workload) Resource(resource string) string {
	const characters = "abcdefghijklmnopqrstuvwxyz0123456789-."
	if len(resource) > 63 || strings.Trim(resource, characters) != "" {
		return other // no resource has such a name
	}
	return w.resources.bound(resource, MaxResources)
}

// bound returns a name, or other if there are too many. It does not keep the text in memory of
// which the name is a part.
func (n *names) bound(name string, most int) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if known, ok := n.known[name]; ok {
		return known
	}
	if len(n.known) >= most {
		return other
	}
	if n.known == nil {
		n.known = map[string]string{}
	}
	name = strings.Clone(name)
	n.known[name] = name
	return name
}

// InMemberCluster counts a request into a member cluster, by the code of its response; 0: it has none.
func (w *Workload) InMemberCluster(m *Node, cluster string, code int) {
	if len(cluster) > 253 || !utf8.ValidString(cluster) {
		cluster = other
	}
	w.memberClusters.Of(memberClusterResult{w.clusters.bound(cluster, MaxClusters), code}, func(r memberClusterResult) prometheus.Counter {
		return w.Counter(m.MemberClusters, r.cluster, codeLabel(r.code))
	}).Inc()
}
