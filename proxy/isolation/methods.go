package isolation

import (
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// How lists and watches were narrowed.
const (
	ServerSide = string(v1alpha1.MethodServerSide)
	ByLabels   = string(v1alpha1.MethodLabels)
	Filtered   = string(v1alpha1.MethodFilter)
)

// Methods records how a pod's divided resources were narrowed last. It is safe for
// concurrent use.
type Methods struct {
	mu    sync.Mutex
	known map[schema.GroupResource]string
}

// Note records the method of a resource.
func (m *Methods) Note(res schema.GroupResource, method string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.known[res]; !ok && (len(m.known) >= meshv1.MaxMethods || !match.Storable(res.Group, res.Resource)) {
		return
	}
	if m.known == nil {
		m.known = map[schema.GroupResource]string{}
	}
	m.known[res] = method
}

// Of returns the methods by resource.group. Resources that d does not divide are left out.
func (m *Methods) Of(d *Division) map[string]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make(map[string]string, len(m.known))
	for res, method := range m.known {
		if _, ok := d.Filters(res); ok || d.Selects(res) {
			out[res.String()] = method
		}
	}
	return out
}
