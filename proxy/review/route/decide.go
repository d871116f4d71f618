package route

import (
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Routes is by what reviews are routed that arrive at one pod.
type Routes struct {
	// Shard is the pod's own.
	Shard string
	// Default is the shard that answers reviews of objects in no namespace; if it is empty,
	// the pod that is asked answers.
	Default string
	// Owners are the shards of the operator. While keys move between hand-written shards, none
	// owns them. Between those of a root, the former owner does until it has released them.
	Owners []Owner
	// ByUID: keys are the uids of objects, which a review does not name before it names the
	// whole object. The pod that is asked answers all reviews.
	ByUID bool
	// Shared reports whether every shard may answer for the object; nil: for none.
	Shared func(Head) bool
	// Limited reports whether the operator is responsible for the object at all; nil: it is
	// for all.
	Limited func(Head) bool
}

// Owner is a shard and the keys that it owns.
type Owner struct {
	Shard string
	Scope sharding.Scope
}

// Action is what to do with a review.
type Action int

// Actions.
const (
	Local   Action = iota // the application in this pod answers
	Forward               // a ready pod of the Decision's shard answers; this pod if there is none
	Allow                 // see Allowed
)

// Reason is why a review is answered where it is.
type Reason string

// Reasons.
const (
	Owned         Reason = "owned"          // by the shard that answers
	ClusterScoped Reason = "cluster_scoped" // the object is in no namespace
	Shared        Reason = "shared"         // every shard may answer
	NoAdmission   Reason = "no_admission"   // it is a ConversionReview
	Received      Reason = "received"       // another pod sent it here
	Unknown       Reason = "unknown"        // no shard owns the key, or several do
	OutsideLimits Reason = "outside_limits" // the operator is not responsible
)

// Decision is where a review is answered.
type Decision struct {
	Action Action
	Shard  string // of Forward
	Reason Reason
}

var namespaces = schema.GroupResource{Resource: "namespaces"}

// Key returns the namespace that decides: for a namespace itself, its name. It is empty for
// other objects in no namespace.
func (h Head) Key() string {
	if h.Namespace == "" && h.Resource.GroupResource() == namespaces {
		return h.Name
	}
	return h.Namespace
}

// Decide decides where a review is answered. received means that another pod sent it: a
// review is forwarded once at most.
func (r *Routes) Decide(h Head, received bool) Decision {
	switch {
	case h.Review != Admission:
		return Decision{Reason: NoAdmission}
	case received:
		return Decision{Reason: Received}
	case r.Limited != nil && !r.Limited(h):
		return Decision{Action: Allow, Reason: OutsideLimits}
	case r.Shared != nil && r.Shared(h):
		return Decision{Reason: Shared}
	}
	key := h.Key()
	switch {
	case r.ByUID:
		return Decision{Reason: Unknown}
	case key == "":
		return r.to(r.Default, ClusterScoped)
	}
	owner := ""
	for _, o := range r.Owners {
		if !o.Scope.Owns(key) {
			continue
		}
		if owner != "" {
			return Decision{Reason: Unknown}
		}
		owner = o.Shard
	}
	if owner == "" {
		return Decision{Reason: Unknown}
	}
	return r.to(owner, Owned)
}

// to returns the decision that a shard answers.
func (r *Routes) to(shard string, reason Reason) Decision {
	if shard == "" || shard == r.Shard {
		return Decision{Reason: reason}
	}
	return Decision{Action: Forward, Shard: shard, Reason: reason}
}
