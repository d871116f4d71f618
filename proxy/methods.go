package proxy

import (
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// How lists and watches are narrowed in fact.
const (
	serverSide = "ServerSide"
	byLabels   = "Labels"
	filtering  = "Filter"
)

// maxMethods bounds the resources that a pod reports on.
const maxMethods = 64

// methods remembers how a pod's divided resources were narrowed last.
type methods struct {
	mu    sync.Mutex
	known map[schema.GroupResource]string
}

func (m *methods) note(res schema.GroupResource, method string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.known[res]; !ok && (len(m.known) >= maxMethods || !match.Storable(res.Group, res.Resource)) {
		return
	}
	if m.known == nil {
		m.known = map[schema.GroupResource]string{}
	}
	m.known[res] = method
}

// Methods are how lists and watches of divided resources, as resource.group, were
// narrowed last: "ServerSide", "Labels" or "Filter". Those that the policy in force
// does not divide are left out.
func (p *Pod) Methods() map[string]string {
	pol := p.policy.Load()
	if pol == nil {
		return nil
	}
	p.methods.mu.Lock()
	defer p.methods.mu.Unlock()
	out := make(map[string]string, len(p.methods.known))
	for res, method := range p.methods.known {
		if _, ok := pol.Filters(res); ok || pol.Selector(res) != nil {
			out[res.String()] = method
		}
	}
	return out
}
