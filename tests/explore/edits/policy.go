package edits

import (
	"slices"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"

	"k8s.io/apimachinery/pkg/types"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// policyID is the number of a policy.
type policyID int16

const (
	unknown policyID = iota
	// removed refuses a pod: of an agent that has no policy for it.
	removed
)

// policies are numbered.
type policies struct {
	all       []policyInfo
	ids       map[string]policyID
	conflicts map[[2]policyID]bool
}

func newPolicies() *policies {
	return &policies{all: make([]policyInfo, removed+1), ids: map[string]policyID{}, conflicts: map[[2]policyID]bool{}}
}

// policyInfo is what worlds need to know of a policy.
type policyInfo struct {
	version          string
	serial, required int64
	refuse, sealed   bool
	acts             acts
}

// acts is what a pod may act on under a policy, if it leads.
type acts struct {
	kind extent
	// shard and scope are those of Scoped.
	shard    string
	scope    sharding.Scope
	byObject bool
	// meant and divided are the resources of the shard, as bits.
	meant, divided uint8
	// locks are those that the shard has in its own names, as bits.
	locks uint8
}

type extent uint8

const (
	nothing extent = iota
	scoped         // what its shard owns, and all that is not divided
	everything
)

func (p *policies) number(c compile.Policy) policyID {
	key := c.Uid + " " + c.Version + " " + string(rune('0'+c.RequiredSerial))
	id, ok := p.ids[key]
	if !ok {
		id = policyID(len(p.all))
		p.ids[key] = id
		p.all = append(p.all, policyInfo{c.Version, int64(c.Serial), int64(c.RequiredSerial), c.Refuse != "", true, actsBy(c.PodPolicy)})
	}
	return id
}

// actsBy returns what a pod may act on under a policy.
func actsBy(p *meshv1.PodPolicy) acts {
	s := p.GetSharding()
	switch {
	case p.Refuse != "" || s.GetStandby():
		return acts{}
	case s == nil || s.GetDryRun():
		return acts{kind: everything}
	}
	out := acts{kind: scoped, shard: s.Shard, byObject: s.Key == meshv1.Key_KEY_OBJECT}
	for _, limit := range s.Limits {
		out.scope, _ = sharding.FromProto(limit.Scope) // all have the same
		for _, group := range limit.Resources {
			for _, name := range group.Resources {
				i := slices.IndexFunc(resourceList[:], func(r resource) bool { return r.name == name })
				out.meant |= resourceList[i].meant
				out.divided |= resourceList[i].divided
			}
		}
	}
	for _, l := range s.Locks {
		if lock := lockOf(lockNameOf(l)); lock != NoLock {
			out.locks |= 1 << lock
		}
	}
	return out
}

// conflict reports whether pods of two shards may act on one object by two policies.
func (p *policies) conflict(a, b policyID) bool {
	key := [2]policyID{min(a, b), max(a, b)}
	found, ok := p.conflicts[key]
	if !ok {
		found = p.all[a].acts.overlap(p.all[b].acts)
		p.conflicts[key] = found
	}
	return found
}

func (a acts) overlap(b acts) bool {
	if a.shard == b.shard {
		return false
	}
	for bit := uint8(1); bit <= a.meant|b.meant; bit <<= 1 {
		if (a.meant|b.meant)&bit == 0 {
			continue
		}
		of := func(x acts) sharding.Scope {
			if x.divided&bit == 0 || a.byObject != b.byObject && !x.scope.Empty() {
				return sharding.All()
			}
			return x.scope
		}
		if of(a).Overlaps(of(b)) {
			return true
		}
	}
	return false
}

// same reports whether an agent that was sent a policy need not be sent another one.
func (p *policies) same(a, b policyID) bool {
	return a == b || p.all[a].sealed && p.all[a].version == p.all[b].version
}

func lockNameOf(l *meshv1.Lock) types.NamespacedName {
	return types.NamespacedName{Namespace: l.Namespace, Name: l.Name}
}
