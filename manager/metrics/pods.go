package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
)

// PodsOf is a gauge of pods by object.
type PodsOf struct {
	*prometheus.GaugeVec

	mu  sync.Mutex
	has map[types.NamespacedName]int32
}

func podsOf(v *prometheus.GaugeVec) *PodsOf { return &PodsOf{GaugeVec: v} }

// Set replaces all numbers. A concurrent scrape misses none of the objects that stay.
func (p *PodsOf) Set(now map[types.NamespacedName]int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, n := range now {
		p.WithLabelValues(name.Namespace, name.Name).Set(float64(n))
	}
	for name := range p.has {
		if _, still := now[name]; !still {
			p.DeleteLabelValues(name.Namespace, name.Name)
		}
	}
	p.has = now
}
