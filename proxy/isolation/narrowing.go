package isolation

import (
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

// Narrowing narrows lists and watches of a resource to the keys that the shard owns.
type Narrowing struct {
	owned  sharding.Scope
	shared shared // objects that stay although another shard owns them
	by     Assignment
	// selector is sent as shardSelector; "": none describes the keys.
	selector string
}

// NoObjects narrows lists and watches of any resource to nothing.
var NoObjects = &Narrowing{by: ByUID}

// Narrowing returns nil where scopes narrow nothing.
func (d *Division) Narrowing(res schema.GroupResource) *Narrowing {
	owned, ok := d.Filters(res)
	if !ok {
		return nil
	}
	n := &Narrowing{owned: owned, shared: d.shared(res, false)}
	switch {
	case d.by == ByUID:
		n.by = ByUID
		n.selector, _ = owned.ShardSelector(n.by.field())
	case d.by == ByName || res == namespaces:
		n.by = ByName // which no shardSelector reads
	default:
		// Every shard gets the objects without a namespace. Their resources cannot be
		// distinguished by path, so the namespace "" is always selected.
		if others, ok := n.shared.keys(); ok {
			n.selector, _ = sharding.Union(owned, others, sharding.Keys("")).ShardSelector(n.by.field())
		}
	}
	if d.method == meshv1.Method_METHOD_FILTER {
		n.selector = ""
	}
	return n
}

// Narrows reports whether a list or watch of a namespace is narrowed; "" is all.
func (n *Narrowing) Narrows(namespace string) bool {
	return n.by != ByNamespace || namespace == "" || !n.owned.Owns(namespace)
}

// Selector returns the shardSelector for a list or watch of a namespace that is narrowed;
// "" is none. nothing means that no object is passed on.
func (n *Narrowing) Selector(namespace string) (selector string, nothing bool) {
	switch {
	case n.by == ByNamespace && namespace != "":
		return "", !n.shared.some(namespace)
	case n.by == ByUID && (namespace == "" && len(n.shared) > 0 || n.shared.some(namespace)):
		selector = "" // it cannot select namespaces
	default:
		selector = n.selector
	}
	return selector, n.owned.Empty() && n.by != ByNamespace && len(n.shared) == 0
}

// Shows reports whether a list or watch of a namespace can show how it was narrowed.
func (n *Narrowing) Shows(namespace string) bool { return n.by != ByNamespace || namespace == "" }

// Assigned reports whether an object belongs to one shard, and not to all.
func (n *Narrowing) Assigned(k filter.Key) bool { return n.by != ByNamespace || len(k.Namespace) > 0 }

// Owns reports whether an object is passed on.
func (n *Narrowing) Owns(k filter.Key) bool {
	namespace := k.Namespace
	if n.by == ByName {
		namespace = k.Name
	}
	if has(n.shared, namespace, k.Name) {
		return true
	}
	switch n.by {
	case ByUID:
		return n.owned.OwnsHash(sharding.Hash(k.UID))
	case ByName:
		return n.owned.OwnsHash(sharding.Hash(k.Name))
	}
	return len(k.Namespace) == 0 || n.owned.OwnsHash(sharding.Hash(k.Namespace))
}
