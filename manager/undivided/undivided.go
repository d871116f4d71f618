// Package undivided finds resources that several shards of a root write although the root does
// not divide them. It compares what agents count, and does no I/O.
package undivided

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

const (
	// maxResources bounds the lists of resources in a status.
	maxResources = 16
	// maxNamespaces bounds the namespaces that a status names for one resource.
	maxNamespaces = 5
	// minWrites is how often a shard must have written a resource to be compared. Operators
	// write some objects once, when they start.
	minWrites = 3
)

// Member is what a pod of a shard did to objects lately.
type Member struct {
	Shard    string
	Activity []*meshv1.ResourceActivity
}

// Result is what members did beyond what their shards own.
type Result struct {
	// Undivided are the resources that several shards write and the root does not divide, those
	// with something in common first.
	Undivided []v1alpha1.UndividedResource
	// Foreign are writes of divided resources to objects of other shards.
	Foreign []v1alpha1.ForeignWrites
}

// Compare compares the members of a root's shards. It names namespaces only if they are among
// those given.
func Compare(members []Member, namespaces []string) (out Result) {
	undivided, foreign := map[schema.GroupResource]byShard{}, map[schema.GroupResource]byShard{}
	for _, m := range members {
		for _, a := range m.Activity {
			res := schema.GroupResource{Group: a.GetGroup(), Resource: a.GetResource()}
			switch {
			case !a.GetDivided():
				add(undivided, res, m.Shard, a, a.GetWrites())
			case a.GetForeignWrites() > 0:
				add(foreign, res, m.Shard, a, a.GetForeignWrites())
			}
		}
	}
	for res, shards := range undivided {
		if u, found := shards.compare(res, namespaces); found {
			out.Undivided = append(out.Undivided, u)
		}
	}
	for res, shards := range foreign {
		out.Foreign = append(out.Foreign, v1alpha1.ForeignWrites{Group: res.Group, Resource: res.Resource, Shards: shards.names(), Writes: shards.writes()})
	}
	slices.SortFunc(out.Undivided, func(a, b v1alpha1.UndividedResource) int {
		return cmp.Or(-cmp.Compare(min(a.Common, 1), min(b.Common, 1)), strings.Compare(a.Group, b.Group), strings.Compare(a.Resource, b.Resource))
	})
	slices.SortFunc(out.Foreign, func(a, b v1alpha1.ForeignWrites) int {
		return cmp.Or(strings.Compare(a.Group, b.Group), strings.Compare(a.Resource, b.Resource))
	})
	out.Undivided = out.Undivided[:min(len(out.Undivided), maxResources)]
	out.Foreign = out.Foreign[:min(len(out.Foreign), maxResources)]
	return out
}

// byShard is what shards did to the objects of one resource.
type byShard map[string]*done

type done struct {
	writes  uint64
	watched bool
	keys    []uint64
}

func add(to map[schema.GroupResource]byShard, res schema.GroupResource, shard string, a *meshv1.ResourceActivity, writes uint64) {
	if to[res] == nil {
		to[res] = byShard{}
	}
	d := to[res][shard]
	if d == nil {
		d = &done{}
		to[res][shard] = d
	}
	d.writes += writes
	d.watched = d.watched || a.GetWatched()
	d.keys = sample.Merge(d.keys, a.GetKeys())
}

// compare reports whether several shards write a resource in the same namespaces, or while they
// watch all of them.
func (s byShard) compare(res schema.GroupResource, namespaces []string) (out v1alpha1.UndividedResource, found bool) {
	maps.DeleteFunc(s, func(_ string, d *done) bool { return d.writes < minWrites })
	watching := 0
	var samples [][]uint64
	for _, d := range s {
		samples = append(samples, d.keys)
		if d.watched {
			watching++
		}
	}
	common := sample.Common(samples...)
	if len(s) < 2 || len(common) == 0 && watching < 2 {
		return out, false
	}
	out = v1alpha1.UndividedResource{Group: res.Group, Resource: res.Resource, Shards: s.names(), Writes: s.writes(), Common: int32(len(common))}
	if len(common) > 0 {
		out.Namespaces = named(common, namespaces)
	}
	return out, true
}

// named returns some of the namespaces that have one of the keys, sorted.
func named(keys []uint64, namespaces []string) (out []string) {
	wanted := sets.New(keys...)
	for _, ns := range slices.Sorted(slices.Values(namespaces)) {
		if len(out) == maxNamespaces {
			break
		}
		if wanted.Has(sample.Key(ns, "")) {
			out = append(out, ns)
		}
	}
	return out
}

func (s byShard) names() []string { return slices.Sorted(maps.Keys(s)) }

func (s byShard) writes() (n int64) {
	for _, d := range s {
		n += int64(d.writes)
	}
	return n
}
