package isolation

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// shared are objects of one resource that every shard reads, or writes.
type shared []sharedObjects

// sharedObjects are those of some namespaces and names. An empty list matches any.
type sharedObjects struct{ namespaces, names []string }

func (o sharedObjects) in(namespace string) bool { return matches(o.namespaces, namespace) }

// matches allocates nothing: it is called for each object of a response.
func matches[S string | []byte](list []string, s S) bool {
	return len(list) == 0 || slices.ContainsFunc(list, func(one string) bool { return one == string(s) })
}

func (d *Division) shared(res schema.GroupResource, writing bool) (out shared) {
	for _, m := range d.message.GetShared() {
		if matchesGroups(m.GetResources(), res) && (m.GetWriteAll() || !writing) {
			out = append(out, sharedObjects{m.GetNamespaces(), m.GetNames()})
		}
	}
	return out
}

func (s shared) equal(t shared) bool {
	return slices.EqualFunc(s, t, func(a, b sharedObjects) bool {
		return slices.Equal(a.namespaces, b.namespaces) && slices.Equal(a.names, b.names)
	})
}

// all reports whether every object of a namespace is shared; "" is all namespaces.
func (s shared) all(namespace string) bool {
	return slices.ContainsFunc(s, func(o sharedObjects) bool { return len(o.names) == 0 && o.in(namespace) })
}

// some reports whether an object of a namespace may be shared.
func (s shared) some(namespace string) bool {
	return slices.ContainsFunc(s, func(o sharedObjects) bool { return o.in(namespace) })
}

// has reports whether an object is shared. The namespace "" stands for every object of
// the name, or for a cluster-scoped one.
func has[S string | []byte](s shared, namespace, name S) bool {
	return slices.ContainsFunc(s, func(o sharedObjects) bool { return matches(o.namespaces, namespace) && matches(o.names, name) })
}

// keys returns all shared objects as the keys of their namespaces; not ok where the names
// of objects decide.
func (s shared) keys() (keys sharding.Scope, ok bool) {
	var names []string
	for _, o := range s {
		if len(o.names) > 0 || len(o.namespaces) == 0 {
			return sharding.Scope{}, false
		}
		names = append(names, o.namespaces...)
	}
	return sharding.Keys(names...), true
}

// Exemption exempts requests for objects that every shard reads, or writes.
type Exemption struct {
	shared shared
	// single: lists and watches of one object are exempt. Across namespaces they are for
	// one object only if its key is a uid, or if it is a namespace.
	single, across bool
	// self: the objects are namespaces, which are in themselves.
	self bool
	// InBody: a create's name decides.
	InBody bool
	// limit, if not nil: what is foreign to it is not exempt by being single.
	limit *Border
}

// Exemption returns nil where no request is exempt.
func (d *Division) Exemption(k match.Kind) *Exemption {
	res := k.GroupResource()
	if _, divided := d.Scope(res); !divided && !d.Selects(res) {
		return nil
	}
	e := &Exemption{self: res == namespaces}
	readAll := d.message.GetReadAll()
	within, confined := d.Within(res)
	if confined {
		e.limit = &Border{owned: within}
	}
	switch writes := k.Writes() || k.Connects(); {
	case writes && (d.Standby || k.Verb == "deletecollection"):
		return nil
	case writes:
		e.shared, e.InBody = d.shared(res, true), creates(k)
	case k.Verb == "list" || k.Verb == "watch":
		e.shared, e.single, e.across = d.shared(res, false), readAll, d.by != ByNamespace
	case k.Verb == "get" && (!readAll || confined):
		e.shared = d.shared(res, false)
	}
	if !e.single && len(e.shared) == 0 {
		return nil
	}
	return e
}

// NeedsName reports whether the name in the body decides on a create.
func (e *Exemption) NeedsName(namespace, name string) bool {
	return e.InBody && name == "" && (e.self || e.shared.some(namespace)) && !e.shared.all(namespace)
}

// Covers reports whether a request for an object is exempt; the name "" is all objects of
// the namespace.
func (e *Exemption) Covers(namespace, name string) bool {
	if e.self {
		namespace = cmp.Or(namespace, name)
	}
	switch {
	case name == "":
		return e.shared.all(namespace)
	case e.single && (namespace != "" || e.across) && (e.limit == nil || !e.limit.Foreign(namespace)):
		return true
	}
	return has(e.shared, namespace, name)
}

// EveryoneWrites reports whether every shard may write an object.
func (d *Division) EveryoneWrites(res schema.GroupResource, namespace, name string) bool {
	return has(d.shared(res, true), namespace, name)
}
