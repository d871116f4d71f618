package isolation

import (
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/internal/sample"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Activity is how the writes and watches of a resource are counted.
type Activity struct {
	// Divided reports whether the division divides the resource.
	Divided bool

	byObject  bool                                         // objects are compared, and not namespaces
	key       func(cluster, namespace, name string) string // by which a border decides
	everyones shared
	border    *Border // of a divided resource; nil if a namespace does not show the owner
}

// uncounted are API groups whose objects no two shards reconcile: elections and Events, objects
// of the mesh, and what is not stored.
var uncounted = []string{
	"coordination.k8s.io", "events.k8s.io", "authentication.k8s.io", "authorization.k8s.io",
	"ctrlmesh.kusionstack.io", "ctrlmesh.kruise.io", "kridge.kusionstack.io",
}

// Contended reports whether two shards may write the same objects of a resource by mistake.
func Contended(r schema.GroupResource) bool {
	return !slices.Contains(uncounted, r.Group) && r != schema.GroupResource{Resource: "events"}
}

// Activity returns nil for requests that are not counted, and for all unless the shard is one of
// several of a root.
func (d *Division) Activity(k match.Kind) *Activity {
	res := k.GroupResource()
	switch {
	case len(d.message.GetOwners()) < 2 || d.Standby || k.Connects() || k.Subresource == "token",
		!k.Writes() && (k.Verb != "watch" || k.Subresource != ""),
		!Contended(res):
		return nil
	}
	if k.MemberCluster && !d.DividesMemberClusters() {
		if d.by != ByName {
			return nil
		}
		owned, _ := d.owned()
		return &Activity{Divided: true, border: &Border{owned: owned}, key: func(cluster, _, _ string) string { return cluster }}
	}
	owned, divided := d.Scope(res)
	a := &Activity{
		Divided: divided || d.Selects(res), byObject: d.by != ByNamespace,
		key: func(_, namespace, name string) string { return d.by.key(namespace, name) },
	}
	switch {
	case !a.Divided:
		a.everyones = d.shared(res, true)
	case divided && d.by != ByUID && k.Verb != "deletecollection": // that deletes nothing of other shards
		a.border = &Border{owned: owned}
	}
	return a
}

// Foreign reports whether a path shows that an object belongs to another shard.
func (a *Activity) Foreign(cluster, namespace, name string) bool {
	return a.border != nil && a.border.Foreign(a.key(cluster, namespace, name))
}

// Everyones reports whether every shard may write an object; the name "" is not known yet.
func (a *Activity) Everyones(namespace, name string) bool {
	return has(a.everyones, namespace, name) || name == "" && a.everyones.some(namespace)
}

// Key returns the key of a written object; 0 if it has none: of a divided resource, and of an
// object whose name is not known yet.
func (a *Activity) Key(namespace, name string) uint64 {
	switch {
	case a.Divided:
		return 0
	case namespace != "" && !a.byObject:
		return sample.Key(namespace, "")
	case name == "":
		return 0
	}
	return sample.Key(namespace, name)
}
