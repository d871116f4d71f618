package proxy

import (
	"cmp"
	"slices"

	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/narrow"
)

// shared are objects of one resource that every shard reads, or writes.
type shared []sharedObjects

// sharedObjects are those of some namespaces and names. An empty list has any.
type sharedObjects struct{ namespaces, names []string }

// shared returns what a policy shares of a resource: for reading, or for writing.
func (p *policy) shared(res groupResource, writing bool) (out shared) {
	for _, m := range p.message.GetSharding().GetShared() {
		if narrow.Matches(m.GetResources(), res.group, res.resource) && (m.GetWriteAll() || !writing) {
			out = append(out, sharedObjects{m.GetNamespaces(), m.GetNames()})
		}
	}
	return out
}

// all reports whether each object of a namespace is shared; with "", each of all
// namespaces.
func (s shared) all(namespace string) bool {
	return slices.ContainsFunc(s, func(o sharedObjects) bool {
		return len(o.names) == 0 && (len(o.namespaces) == 0 || slices.Contains(o.namespaces, namespace))
	})
}

// some reports whether an object of a namespace may be shared.
func (s shared) some(namespace string) bool {
	return slices.ContainsFunc(s, func(o sharedObjects) bool {
		return len(o.namespaces) == 0 || slices.Contains(o.namespaces, namespace)
	})
}

// has reports whether an object is shared. With the namespace "" that is every object
// of its name, or a cluster-scoped one.
func (s shared) has(namespace, name string) bool {
	return slices.ContainsFunc(s, func(o sharedObjects) bool {
		return (len(o.namespaces) == 0 || slices.Contains(o.namespaces, namespace)) && (len(o.names) == 0 || slices.Contains(o.names, name))
	})
}

// hasKey is has of an object in an answer.
func (s shared) hasKey(namespace, name []byte) bool {
	for _, o := range s {
		if (len(o.namespaces) == 0 || containsBytes(o.namespaces, namespace)) && (len(o.names) == 0 || containsBytes(o.names, name)) {
			return true
		}
	}
	return false
}

// containsBytes allocates nothing: it is asked about each object of an answer.
func containsBytes(list []string, b []byte) bool {
	return slices.ContainsFunc(list, func(s string) bool { return s == string(b) })
}

// namespaces returns all objects that are shared as the keys of their namespaces; not
// ok where the names of objects decide.
func (s shared) namespaces() (keys sharding.Scope, ok bool) {
	var names []string
	for _, o := range s {
		if len(o.names) > 0 || len(o.namespaces) == 0 {
			return sharding.Scope{}, false
		}
		names = append(names, o.namespaces...)
	}
	return sharding.Keys(names...), true
}

// exemptsAs reports whether two policies exempt the same requests.
func (p *policy) exemptsAs(next *policy) bool {
	a, b := p.message.GetSharding(), next.message.GetSharding()
	return a.GetReadAll() == b.GetReadAll() && slices.EqualFunc(a.GetShared(), b.GetShared(), func(x, y *meshv1.SharedObjects) bool { return proto.Equal(x, y) })
}

// exemptStage exempts requests for objects that every shard reads, or writes, from what
// narrows and fences.
type exemptStage struct {
	shared shared
	// single: lists and watches of one object are exempt. Across namespaces they are of
	// one only if their keys are uids, or if the objects are namespaces.
	single, across bool
	// self: the objects are namespaces, which are in themselves.
	self bool
	// inBody: a create's name decides.
	inBody bool
}

// exemptStage returns nil where no request is exempt.
func (p *policy) exemptStage(key planKey) *exemptStage {
	_, divided := p.limits.Scope(key.group, key.resource)
	if !divided && p.limits.For(key.group, key.resource) == nil {
		return nil
	}
	s := &exemptStage{self: key.groupResource == namespaces}
	switch writes := key.writes() || key.connects(); {
	case writes && (p.standby || key.verb == "deletecollection"):
		return nil
	case writes:
		s.shared = p.shared(key.groupResource, true)
		s.inBody = key.verb == "create" && key.subresource == ""
	case key.verb == "list" || key.verb == "watch":
		s.shared = p.shared(key.groupResource, false)
		s.single, s.across = p.fence.readAll, p.key == meshv1.Key_KEY_OBJECT
	case key.verb == "get" && !p.fence.readAll:
		s.shared = p.shared(key.groupResource, false)
	}
	if !s.single && len(s.shared) == 0 {
		return nil
	}
	return s
}

func (s *exemptStage) apply(x *exchange) *outcome {
	if x.exempt {
		return nil
	}
	namespace, name := x.req.info.Namespace, x.req.info.Name
	if s.inBody && name == "" && s.shared.some(namespace) && !s.shared.all(namespace) {
		var refused *apierrors.StatusError
		if name, refused = nameInBody(x); refused != nil {
			return refusal(refused)
		}
	}
	if s.self {
		namespace = cmp.Or(namespace, name)
	}
	switch {
	case name == "":
		x.exempt = s.shared.all(namespace)
	case s.single && (namespace != "" || s.across):
		x.exempt = true
	default:
		x.exempt = s.shared.has(namespace, name)
	}
	return nil
}

// nameInBody returns the name of the object that is to be created; empty if it cannot
// be read.
func nameInBody(x *exchange) (string, *apierrors.StatusError) {
	raw, refused := x.readBody(lock.MaxObject)
	if refused != nil {
		return "", refused
	}
	x.out.replace(raw)
	_, name, _, err := filter.KeyOf(cmp.Or(x.out.header.get("Content-Type"), typeJSON), raw)
	if err != nil {
		return "", nil
	}
	return name, nil
}
