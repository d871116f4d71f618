package isolation

import (
	"slices"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Division is the compiled sharding of a policy.
type Division struct {
	Limits
	Standby    bool
	KeepCaches bool // of clients, when the policy changes

	message   *meshv1.Sharding
	namespace string // of the pod
	by        Assignment
	method    meshv1.Method
	// widened, if not nil: writes to any resource are foreign in namespaces that it does
	// not own.
	widened        *sharding.Scope
	memberClusters *MemberClusters
	owners         owners
}

// Compile compiles the sharding of a pod in a namespace; nil divides nothing.
func Compile(s *meshv1.Sharding, namespace string) (*Division, error) {
	limits, err := compileLimits(s.GetLimits())
	if err != nil {
		return nil, err
	}
	d := &Division{
		Limits: limits, Standby: s.GetStandby(), KeepCaches: s.GetKeepCaches(),
		message: s, namespace: namespace, by: assignmentOf(s.GetKey()), method: s.GetMethod(),
	}
	if d.Standby {
		d.Limits = limits.emptied()
	}
	if owned, divided := d.owned(); divided && s.GetFenceNamespaces() && d.by == ByNamespace {
		d.widened = &owned
	}
	d.memberClusters = d.compileMemberClusters()
	return d, nil
}

// SelectsShared reports whether selectors also apply to lists of shared objects: they do
// unless they select the shard's objects by label.
func (d *Division) SelectsShared() bool { return d.Standby || d.method != meshv1.Method_METHOD_LABELS }

// Filters returns the keys that the shard owns, if lists and watches of a resource leave
// out all others.
func (d *Division) Filters(res schema.GroupResource) (owned sharding.Scope, ok bool) {
	owned, divided := d.Scope(res)
	return owned, divided && d.method != meshv1.Method_METHOD_LABELS && !owned.Everything()
}

// Redivides reports whether next differs from d.
func (d *Division) Redivides(next *Division) bool { return !proto.Equal(d.message, next.message) }

// Affects reports whether clients get other objects of a resource under next than under
// d, or must drop under next what they could keep under d.
func (d *Division) Affects(next *Division, res schema.GroupResource) bool {
	before, filtered := d.Filters(res)
	after, filters := next.Filters(res)
	_, divided := d.Scope(res)
	selector := d.Selector(res)
	confined, _ := d.Within(res)
	confines, _ := next.Within(res)
	return selector.String() != next.Selector(res).String() ||
		filtered != filters || filtered && (d.message.GetKey() != next.message.GetKey() || !before.Equal(after)) ||
		divided && d.KeepCaches && !next.KeepCaches ||
		!slices.Equal(d.message.GetDeniedUserAgents(), next.message.GetDeniedUserAgents()) ||
		!confined.Equal(confines) || (divided || selector != nil) && !d.exemptsAs(next)
}

// exemptsAs reports whether two divisions exempt the same requests.
func (d *Division) exemptsAs(next *Division) bool {
	a, b := d.message, next.message
	return a.GetReadAll() == b.GetReadAll() && slices.EqualFunc(a.GetShared(), b.GetShared(), func(x, y *meshv1.SharedObjects) bool { return proto.Equal(x, y) })
}

// Border is what the shard owns of the objects that requests are for.
type Border struct {
	owned  sharding.Scope
	except string // a namespace that is never foreign
}

// Foreign reports whether another shard owns a key. Every shard may write objects without one,
// such as those in no namespace.
func (b Border) Foreign(key string) bool {
	return key != "" && key != b.except && !b.owned.Owns(key)
}

// Owns reports whether the shard owns a key.
func (b Border) Owns(key string) bool { return b.owned.Owns(key) }

func (d *Division) border(k match.Kind) (b Border, ok bool) {
	owned, divided := d.Scope(k.GroupResource())
	switch {
	case divided:
		b.owned = owned
	case d.widened != nil && (k.Writes() || k.Connects()):
		if b.owned = *d.widened; !k.MemberCluster { // the pod itself is in no member cluster
			b.except = d.namespace
		}
	default:
		return b, false
	}
	return b, !b.owned.Everything()
}

// Sweep returns the border for a deletecollection, which deletes nothing in namespaces of
// other shards; false if all its objects are the shard's.
func (d *Division) Sweep(k match.Kind) (Border, bool) {
	b, ok := d.border(k)
	return b, ok && d.by == ByNamespace
}

// Fence decides on requests for single objects of other shards, or of none.
type Fence struct {
	Border
	// Passes: requests for objects of other shards pass.
	Passes bool
	// Observe: requests for objects of other shards are counted, not refused.
	Observe bool
	// Limit, if not nil: no shard reads or writes what is foreign to it.
	Limit *Border
	// By is what decides.
	By Assignment
	// InBody: the name in the body decides.
	InBody bool
}

var (
	namespaces = schema.GroupResource{Resource: "namespaces"}
	bindings   = schema.GroupResource{Resource: "bindings"}
)

// Outside reports whether no shard reads or writes in a namespace.
func (f *Fence) Outside(namespace string) bool { return f.Limit != nil && f.Limit.Foreign(namespace) }

// Fence returns nil if no request is refused or counted.
func (d *Division) Fence(k match.Kind) *Fence {
	b, ok := d.border(k)
	f := &Fence{
		Border: b, Passes: !ok || !d.fences(k), Limit: d.limit(k),
		By: d.by, Observe: d.message.GetIsolation() == meshv1.Isolation_ISOLATION_OBSERVE,
	}
	if f.Passes && f.Limit == nil {
		return nil
	}
	if _, divided := d.Scope(k.GroupResource()); divided && d.by != ByUID {
		f.InBody = (d.by == ByName || k.GroupResource() == namespaces) && creates(k)
	}
	return f
}

// limit returns the border beyond which no shard reads or writes single objects; nil: there is
// none. What is narrowed needs none.
func (d *Division) limit(k match.Kind) *Border {
	if within, confined := d.Within(k.GroupResource()); confined && d.by == ByNamespace && k.Verb != "deletecollection" && (k.Verb == "get" || k.Writes() || k.Connects()) {
		return &Border{owned: within}
	}
	return nil
}

func creates(k match.Kind) bool { return k.Verb == "create" && k.Subresource == "" }

// fences reports whether requests for foreign objects are refused. An object that is to
// be created has no uid yet.
func (d *Division) fences(k match.Kind) bool {
	switch {
	case d.message.GetIsolation() == meshv1.Isolation_ISOLATION_OFF:
		return false
	case k.Connects():
		return true
	case k.Verb == "deletecollection":
		return d.by != ByNamespace
	case k.Verb == "get":
		return !d.message.GetReadAll()
	case creates(k) && k.GroupResource() != bindings:
		return d.by != ByUID
	}
	return k.Writes()
}

// Waiting decides on the writes of a member in standby, which owns nothing yet, whatever
// its isolation.
type Waiting struct {
	Border
	all bool // else only those in namespaces of other shards
}

// Waiting returns nil if the division is no standby, or requests are not fenced.
func (d *Division) Waiting(k match.Kind) *Waiting {
	if !d.Standby || !k.Writes() && !k.Connects() || d.message.GetClusterScopedOwner() != "" && Reviews(k) {
		return nil
	}
	b, ok := d.border(k)
	if !ok {
		return nil
	}
	_, divided := d.Scope(k.GroupResource())
	return &Waiting{b, divided}
}

// Refuses reports whether a write in a namespace is refused. All writes of divided
// resources are: this pod does not own the objects in no namespace yet.
func (w *Waiting) Refuses(namespace string) bool { return w.all || w.Foreign(namespace) }

// Refuses reports whether a request is refused by its kind and path. One that needs a look at
// the object is.
func (d *Division) Refuses(k match.Kind, namespace, name string) bool {
	if c := d.ClusterScoped(k); c != nil && !c.Observe && c.Refuses(namespace) {
		return true
	}
	if w := d.Waiting(k); w != nil {
		return w.Refuses(namespace)
	}
	f := d.Fence(k)
	return f != nil && (f.Outside(namespace) || !f.Passes && !f.Observe && (f.By == ByUID || f.Foreign(d.by.key(namespace, name))))
}

// InStandby returns the division before the shard was given keys.
func (d *Division) InStandby() *Division {
	out := &Division{Limits: d.emptied(), Standby: true, message: d.message, namespace: d.namespace, by: d.by, method: d.method}
	if d.widened != nil {
		out.widened = &sharding.Scope{}
	}
	out.memberClusters = out.compileMemberClusters()
	return out
}

// Gains reports whether d lets the shard write an object of a namespace that it did not own
// under the division before. By uid, that is known of what is created: anything may belong
// to an object that the shard gained. GainsKey is about the others, and about clusters.
func (d *Division) Gains(before *Division, k match.Kind, namespace, name string) bool {
	if w := before.Waiting(k); w != nil {
		return w.Refuses(namespace)
	}
	if c := before.ClusterScoped(k); c != nil && c.Refuses(namespace) {
		return c.Exemption == nil || !c.Exemption.Covers(namespace, name)
	}
	had, divided := before.border(k)
	switch {
	case !divided:
		return false
	case d.by != ByUID:
		return had.Foreign(d.by.key(namespace, name))
	case !creates(k):
		return false
	}
	has, divided := d.border(k)
	return !divided || !has.owned.Minus(had.owned).Empty()
}

// GainsKey reports whether the shard did not own the uid of an object under the division
// before.
func (d *Division) GainsKey(before *Division, k match.Kind, uid string) bool {
	had, divided := before.border(k)
	return divided && d.by == ByUID && !had.Owns(uid)
}
