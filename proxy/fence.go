package proxy

import (
	"cmp"
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/narrow"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// fence is what a policy says of requests for single objects.
type fence struct {
	off, observe bool
	// readAll: objects of other shards may be read.
	readAll bool
	// widened, if not nil: writes to any resource are foreign in namespaces that it
	// does not own.
	widened *sharding.Scope
}

func fenceOf(p *policy, s *meshv1.Sharding) fence {
	f := fence{
		off:     s.GetIsolation() == meshv1.Isolation_ISOLATION_OFF,
		observe: s.GetIsolation() == meshv1.Isolation_ISOLATION_OBSERVE,
		readAll: s.GetReadAll(),
	}
	if owned, divided := p.limits.Owned(); divided && s.GetFenceNamespaces() && p.key == meshv1.Key_KEY_NAMESPACE {
		f.widened = &owned
	}
	return f
}

// writes reports whether a request changes something, as far as its verb says.
func (k planKey) writes() bool {
	switch k.verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return true
	}
	return false
}

// connects reports whether a request opens a connection into a pod or a service,
// by any verb.
func (k planKey) connects() bool {
	switch k.subresource {
	case "exec", "attach", "portforward", "proxy":
		return k.group == ""
	}
	return false
}

// single reports whether a request is for one object, or for all of one namespace.
func (k planKey) single() bool { return k.verb == "get" || k.writes() || k.connects() }

// border is what is the shard's of what requests may be about.
type border struct {
	owned  sharding.Scope
	except string // a namespace that is never foreign
}

// border returns that of a resource; false where everything is the shard's.
func (p *policy) border(key planKey) (b border, ok bool) {
	owned, divided := p.limits.Scope(key.group, key.resource)
	switch {
	case divided:
		b.owned = owned
	case p.fence.widened != nil && (key.writes() || key.connects()):
		b.owned, b.except = *p.fence.widened, p.pod.info.Namespace
	default:
		return b, false
	}
	return b, !b.owned.Everything()
}

// foreign reports whether a namespace is another shard's. What is in none is
// everybody's.
func (b border) foreign(namespace string) bool {
	return namespace != "" && namespace != b.except && !b.owned.Owns(namespace)
}

// sweepStage has a deletecollection in a namespace of another shard delete nothing,
// as a list finds nothing there.
type sweepStage struct{ border }

func (s sweepStage) apply(x *exchange) *outcome {
	if x.exempt || !s.foreign(x.req.info.Namespace) {
		return nil
	}
	return (&scopeStage{selector: narrow.Nothing}).apply(x)
}

// applies reports whether requests for objects are refused where they are another
// shard's. A created object has no uid yet.
func (f *fence) applies(key planKey, byObject bool) bool {
	switch {
	case f.off || !key.single():
		return false
	case key.verb == "deletecollection":
		return byObject
	case key.verb == "get" && !key.connects():
		return !f.readAll
	case key.verb == "create" && key.subresource == "" && key.groupResource != bindings:
		return !byObject
	}
	return true
}

// fenceStage returns what decides about requests for single objects; nil when they
// are all the shard's. Where the uid decides, it decides about deletecollections too.
func (p *policy) fenceStage(key planKey) *fenceStage {
	byObject := p.key == meshv1.Key_KEY_OBJECT
	if !p.fence.applies(key, byObject) {
		return nil
	}
	b, ok := p.border(key)
	if !ok {
		return nil
	}
	s := &fenceStage{border: b, resource: key.groupResource, byObject: byObject, observe: p.fence.observe}
	if _, divided := p.limits.Scope(key.group, key.resource); divided && !byObject {
		s.inBody = key.groupResource == namespaces && key.verb == "create" && key.subresource == ""
	}
	count := func(action string) prometheus.Counter {
		return p.metrics.Counter(p.pod.server.metrics.Foreign, metrics.Verb(key.verb), action)
	}
	if s.observe {
		s.foreigners, s.unknowns = count("observed"), count("unknown")
	} else {
		s.foreigners = count("refused")
	}
	return s
}

// refuses reports whether a request with this key and namespace is refused as it
// stands. One that would have to be asked about is.
func (p *policy) refuses(key planKey, namespace string) bool {
	if s := p.standbyStage(key); s != nil {
		return s.refuses(namespace)
	}
	s := p.fenceStage(key)
	return s != nil && !s.observe && (s.byObject || s.foreign(namespace))
}

var (
	namespaces = groupResource{resource: "namespaces"}
	bindings   = groupResource{resource: "bindings"}
)

// fenceStage refuses, or counts, requests for objects that are another shard's.
type fenceStage struct {
	border
	resource   groupResource
	byObject   bool
	inBody     bool // the key is the name in the body
	observe    bool
	foreigners prometheus.Counter
	unknowns   prometheus.Counter // of observe
	dryRun     *dryRun            // not nil: observed for this alone
}

func (s *fenceStage) apply(x *exchange) *outcome {
	switch {
	case x.exempt:
		return nil
	case s.byObject:
		return s.object(x)
	case s.inBody:
		return s.create(x)
	case s.foreign(x.req.info.Namespace):
		return s.encounter(x, "namespace "+x.req.info.Namespace, x.req.info.Namespace)
	}
	return nil
}

// encounter deals with a request for what is another shard's; the key is empty if it is not
// known.
func (s *fenceStage) encounter(x *exchange, what, key string) *outcome {
	if s.dryRun != nil {
		s.dryRun.note(x)
		return nil
	}
	s.foreigners.Inc()
	if s.observe {
		return nil
	}
	return x.policy.forbidden(x.req.info, what, key)
}

// unknown deals with a request of which it cannot be told whose object it is for.
func (s *fenceStage) unknown(x *exchange, refused *apierrors.StatusError) *outcome {
	if s.observe {
		s.unknowns.Inc()
		return nil
	}
	return refusalBy("unknown", refused)
}

// create decides on a Namespace that is to be made by the name in the body.
func (s *fenceStage) create(x *exchange) *outcome {
	if s.observe && x.out.header.get("Content-Encoding") != "" {
		return s.unknown(x, nil)
	}
	raw, refused := x.readBody(lock.MaxObject)
	if refused != nil {
		return refusal(refused)
	}
	x.out.replace(raw)
	_, name, _, err := filter.KeyOf(cmp.Or(x.out.header.get("Content-Type"), typeJSON), raw)
	switch {
	case errors.Is(err, filter.ErrType):
		return s.unknown(x, status.UnsupportedMediaType("the name of a namespace must be read: %v", err))
	case err != nil:
		return s.unknown(x, status.BadRequest("the name of a namespace must be read: %v", err))
	case name == "": // generated: nobody knows whose it will be
		return s.encounter(x, "a namespace whose name is to be generated", "")
	case s.foreign(name):
		return s.encounter(x, "namespace "+name, name)
	}
	return nil
}
