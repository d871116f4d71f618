package shadow

import (
	"cmp"
	"slices"
	"strings"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

// Result is how writes of a shadow to an object ended.
type Result string

// Results of writes.
const (
	Agreed     Result = "agreed"
	Differed   Result = "differed"
	Refused    Result = "refused"
	Uncompared Result = "uncompared"
)

// counts are the results of a pod's writes. The zero value is ready to use.
type counts struct {
	results     map[Result]uint64
	differences map[kind]*difference
}

// kind is what differences are counted by.
type kind struct{ group, resource, verb string }

type difference struct {
	fields []string
	writes uint64
}

func (c *counts) add(r Result) {
	if c.results == nil {
		c.results = map[Result]uint64{}
	}
	c.results[r]++
}

// differ counts writes that lacked a part of a change.
func (c *counts) differ(k kind, missing Change) {
	c.add(Differed)
	d := c.differences[k]
	if d == nil {
		if len(c.differences) >= meshv1.MaxShadowDifferences {
			return
		}
		if c.differences == nil {
			c.differences = map[kind]*difference{}
		}
		d = &difference{}
		c.differences[k] = d
	}
	d.writes++
	d.fields = sample.Least(meshv1.MaxShadowFields, d.fields, missing.Paths())
}

func (c *counts) report() *meshv1.ShadowReport {
	out := &meshv1.ShadowReport{Agreed: c.results[Agreed], Differed: c.results[Differed], Refused: c.results[Refused], Uncompared: c.results[Uncompared]}
	for k, d := range c.differences {
		out.Differences = append(out.Differences, &meshv1.ShadowDifference{Group: k.group, Resource: k.resource, Verb: k.verb, Fields: d.fields, Writes: d.writes})
	}
	slices.SortFunc(out.Differences, func(a, b *meshv1.ShadowDifference) int {
		return cmp.Or(strings.Compare(a.GetGroup(), b.GetGroup()), strings.Compare(a.GetResource(), b.GetResource()), strings.Compare(a.GetVerb(), b.GetVerb()))
	})
	return out
}
