// Package transfer lets hand-written shards take objects only once no other pod may act on them.
//
// Users edit the limits of one configuration after the other, and agents apply policies one
// after the other. So the status of a configuration records the limits that its members act by.
// If the spec has others, members own only what both select:
//
//  1. Members are sent the limits on record together with those of the spec.
//  2. All pods of the operator's configurations have confirmed their policies: the record is
//     replaced by the limits that were sent.
//  3. That is so for all configurations of the operator: the record is replaced by the limits
//     of the spec, and members are sent these.
//
// A record is written before it has an effect. So members always act on a part of what is on
// record, and no object is on two records if the limits of specs exclude each other, which
// admission requires.
//
// It is pure.
package transfer

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// None is the hash on record while members own nothing.
const None = "none"

// Standby is why members are in standby meanwhile.
const Standby = "pods of other shards may act on its objects until they have confirmed their policies"

// maxRecorded bounds the limits in a status, in bytes of JSON.
const maxRecorded = 128 << 10

// Divides reports whether a configuration owns objects that another hand-written one may own
// later.
func Divides(c *v1alpha1.ShardingConfig) bool {
	return compile.HandWritten(c) && !compile.Shadows(c) && len(c.Spec.Limits) > 0
}

// Share reports whether two configurations may belong to one operator: they are in one
// namespace, and do not name different locks.
func Share(a, b *v1alpha1.ShardingConfig) bool {
	mine, theirs := compile.NamedLocks(a), compile.NamedLocks(b)
	return a.Namespace == b.Namespace && (len(mine) == 0 || len(theirs) == 0 ||
		slices.ContainsFunc(mine, func(l types.NamespacedName) bool { return slices.Contains(theirs, l) }))
}

// Hash identifies limits.
func Hash(limits []v1alpha1.ObjectLimiter) string {
	text, err := json.Marshal(limits)
	if err != nil {
		panic(err) // they have no types that JSON lacks
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// both returns limits that select what a and b select: all limits that name a resource apply
// together.
func both(a, b []v1alpha1.ObjectLimiter) []v1alpha1.ObjectLimiter {
	out := slices.Clone(a)
	for _, l := range b {
		if !slices.ContainsFunc(a, func(o v1alpha1.ObjectLimiter) bool { return equality.Semantic.DeepEqual(o, l) }) {
			out = append(out, l)
		}
	}
	return out
}

// Acting is what the members of one configuration act by.
type Acting struct {
	// Recorded, Sent and Wanted are hashes: of the limits on record, empty if there is no
	// record; of those that members are sent; and of those in the spec.
	Recorded, Sent, Wanted string

	generation int64                               // that has Wanted
	known      map[string][]v1alpha1.ObjectLimiter // by hash
}

// Memory is what the members of each configuration act by, by its uid.
type Memory map[types.UID]Acting

// Complete reports whether the members of all configurations act by the limits of the spec.
func (m Memory) Complete() bool {
	for _, a := range m {
		if a.Recorded != a.Wanted {
			return false
		}
	}
	return true
}

// Enact replaces the limits of configurations by those that their members are sent. The
// configurations are replaced, not changed in place. It returns what is known next. Members of
// a configuration whose record is unknown are sent none; the caller must see to that.
func (m Memory) Enact(configs []*v1alpha1.ShardingConfig) Memory {
	next := Memory{}
	for i, c := range configs {
		if !Divides(c) {
			continue
		}
		a := m[c.UID].follow(c)
		if a.Sent != None && a.Sent != a.Wanted {
			configs[i] = c.DeepCopy()
			configs[i].Spec.Limits = a.known[a.Sent]
		}
		next[c.UID] = a
	}
	return next
}

// follow returns what members act by next.
func (a Acting) follow(c *v1alpha1.ShardingConfig) Acting {
	limits := c.Spec.Limits
	next := Acting{Wanted: a.Wanted, generation: c.Generation}
	if a.Wanted == "" || a.generation != c.Generation { // long limits take a while to hash
		next.Wanted = Hash(limits)
	}
	next.known = map[string][]v1alpha1.ObjectLimiter{next.Wanted: limits}
	record := c.Status.Acting
	if record == nil {
		next.Sent = None
		if c.Generation != 0 && c.Status.ObservedGeneration == c.Generation {
			next.Sent = next.Wanted // members have acted by it since before there were records
		}
		return next
	}
	next.Recorded = record.Hash
	recorded, ok := a.known[record.Hash]
	if !ok && len(record.Limits) > 0 && Hash(record.Limits) == record.Hash {
		recorded, ok = record.Limits, true
	}
	switch {
	case record.Hash == next.Wanted:
		next.Sent = next.Wanted
	case ok:
		sent := both(recorded, limits)
		next.Sent = Hash(sent)
		next.known[record.Hash], next.known[next.Sent] = recorded, sent
	default:
		next.Sent = None
	}
	return next
}

// Record returns what is to be on record of a configuration. others has the other
// configurations of the operator. confirmed reports whether all pods that may act on its
// objects have confirmed their policies.
func (a Acting) Record(others []Acting, confirmed bool) *v1alpha1.ActingLimits {
	return a.record(a.next(others, confirmed))
}

func (a Acting) next(others []Acting, confirmed bool) string {
	switch {
	case a.Sent == a.Wanted:
		return a.Wanted
	case !confirmed:
		return cmp.Or(a.Recorded, None)
	case !a.released():
		return a.Sent
	case slices.ContainsFunc(others, func(o Acting) bool { return !o.released() }):
		return a.Recorded
	}
	return a.Wanted
}

// released reports whether members own nothing that is not on record.
func (a Acting) released() bool { return cmp.Or(a.Recorded, None) == a.Sent }

// record returns a record. It has the limits that the next manager could not read in the spec,
// if there is room.
func (a Acting) record(hash string) *v1alpha1.ActingLimits {
	out := &v1alpha1.ActingLimits{Hash: hash}
	if hash == a.Wanted || hash == None {
		return out
	}
	if text, err := json.Marshal(a.known[hash]); err == nil && len(text) <= maxRecorded {
		out.Limits = a.known[hash]
	}
	return out
}
