package isolation

import (
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// ClusterScoped decides on writes of objects in no namespace that another shard alone may
// send. The namespace in the path of a request decides.
type ClusterScoped struct {
	// Observe: requests are counted, not refused.
	Observe bool
	// Exemption, if not nil: every shard writes some of the objects.
	Exemption *Exemption
	// Owner is the shard that may.
	Owner string

	all bool // whatever namespace the path has
}

// ClusterScoped returns nil where every shard may send such requests, or none of a kind is
// about objects in no namespace. A Namespace belongs to the owner of its name if namespaces
// are divided or fenced, and is an object in no namespace if not.
func (d *Division) ClusterScoped(k match.Kind) *ClusterScoped {
	owner := d.message.GetClusterScopedOwner()
	if owner == "" || !k.Writes() && !k.Connects() || Reviews(k) || !d.Standby && d.message.GetIsolation() == meshv1.Isolation_ISOLATION_OFF {
		return nil
	}
	c := &ClusterScoped{Owner: owner, Observe: !d.Standby && d.message.GetIsolation() == meshv1.Isolation_ISOLATION_OBSERVE}
	if k.GroupResource() == namespaces {
		if _, divided := d.Scope(namespaces); divided && d.by != ByUID {
			return nil
		}
		c.all = d.widened == nil
	}
	if everyones := d.shared(k.GroupResource(), true); len(everyones) > 0 && !d.Standby && k.Verb != "deletecollection" {
		c.Exemption = &Exemption{shared: everyones, InBody: creates(k), self: k.GroupResource() == namespaces}
	}
	return c
}

// Refuses reports whether requests with a namespace in their path are refused; "" is none.
func (c *ClusterScoped) Refuses(namespace string) bool { return c.all || namespace == "" }

// Reviews reports whether a request only asks the apiserver who may do what. Nothing is
// stored.
func Reviews(k match.Kind) bool {
	return creates(k) && slices.Contains([]string{"authentication.k8s.io", "authorization.k8s.io"}, k.Group)
}
