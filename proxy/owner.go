package proxy

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// owner is what series are told of: the pods of a workload in one shard. Jobs and bare
// pods come with ever new names, so the series go with the last pod.
type owner struct {
	namespace, workload, shard string

	pods int // held by; owners.mu

	mu   sync.RWMutex // taken for a series' first time, by requests of these pods alone
	gone bool

	names             resourceNames
	refusals, reached counters[string]
	egress            counters[egressResult]
}

type egressResult struct{ protocol, verdict string }

// owners are those of all pods.
type owners struct {
	vectors []vector // all that are told of owners, whose labels come first

	mu   sync.Mutex // of what changes with policies
	held map[[3]string]*owner
}

type vector interface {
	prometheus.Collector
	DeletePartialMatch(prometheus.Labels) int
}

func (os *owners) hold(namespace, workload, shard string) *owner {
	os.mu.Lock()
	defer os.mu.Unlock()
	name := [3]string{namespace, workload, shard}
	o := os.held[name]
	if o == nil {
		if os.held == nil {
			os.held = map[[3]string]*owner{}
		}
		o = &owner{namespace: namespace, workload: workload, shard: shard}
		os.held[name] = o
	}
	o.pods++
	return o
}

func (os *owners) release(o *owner) {
	os.mu.Lock()
	defer os.mu.Unlock()
	if o.pods--; o.pods > 0 {
		return
	}
	delete(os.held, [3]string{o.namespace, o.workload, o.shard})
	o.mu.Lock()
	o.gone = true
	o.mu.Unlock()
	for _, v := range os.vectors {
		v.DeletePartialMatch(prometheus.Labels{"namespace": o.namespace, "workload": o.workload, "shard": o.shard})
	}
}

// uncounted is what requests are counted by that outlive their owner.
var uncounted = struct {
	count   prometheus.Counter
	added   prometheus.Observer
	watches prometheus.Gauge
}{
	prometheus.NewCounter(prometheus.CounterOpts{Name: "uncounted"}),
	prometheus.NewHistogram(prometheus.HistogramOpts{Name: "uncounted"}),
	prometheus.NewGauge(prometheus.GaugeOpts{Name: "uncounted"}),
}

// series finds one of the owner's.
func series[M any](o *owner, in interface{ WithLabelValues(...string) M }, gone M, labels ...string) M {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if o.gone {
		return gone
	}
	return in.WithLabelValues(append([]string{o.namespace, o.workload, o.shard}, labels...)...)
}

func (o *owner) counter(in *prometheus.CounterVec, labels ...string) prometheus.Counter {
	return series(o, in, uncounted.count, labels...)
}

// uncount is for a pod of which no more is counted. A policy may come even then, by
// whoever waits for the pod to be quiet.
func (p *Pod) uncount() {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	if p.removed {
		return
	}
	p.policy.Load().release()
	p.server.metrics.owners.release(p.nobody)
	p.removed = true
}

// owner is who the pod's connections are counted of.
func (p *Pod) owner() *owner {
	if pol := p.policy.Load(); pol != nil {
		return pol.owner
	}
	return p.nobody
}
