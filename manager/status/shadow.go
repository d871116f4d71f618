package status

import (
	"cmp"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// shadow returns what the agents have counted of the writes of a shadow; nil for other
// configurations.
func (in Input) shadow() *v1alpha1.ShadowStatus {
	if !compile.Shadows(in.Shard.Config) {
		return nil
	}
	out := &v1alpha1.ShadowStatus{}
	all := map[shadowed]*v1alpha1.ShadowDifference{}
	for _, pod := range in.Shard.Members {
		s := in.Observe(pod.Spec.NodeName, string(pod.UID)).Shadow
		if s == nil {
			continue
		}
		out.Agreed += int64(s.Agreed)
		out.Differed += int64(s.Differed)
		out.Refused += int64(s.Refused)
		out.Uncompared += int64(s.Uncompared)
		for _, d := range s.Differences {
			add(all, d)
		}
	}
	for _, d := range all {
		out.Differences = append(out.Differences, *d)
	}
	slices.SortFunc(out.Differences, func(a, b v1alpha1.ShadowDifference) int {
		return cmp.Or(strings.Compare(a.Group, b.Group), strings.Compare(a.Resource, b.Resource), strings.Compare(a.Verb, b.Verb))
	})
	out.Differences = out.Differences[:min(len(out.Differences), meshv1.MaxShadowDifferences)]
	return out
}

// shadowed is what differences are counted by.
type shadowed struct{ group, resource, verb string }

// add adds what a pod differed in to what all pods did.
func add(all map[shadowed]*v1alpha1.ShadowDifference, d push.ShadowDifference) {
	key := shadowed{d.Group, d.Resource, d.Verb}
	if all[key] == nil {
		all[key] = &v1alpha1.ShadowDifference{Group: d.Group, Resource: d.Resource, Verb: d.Verb}
	}
	sum := all[key]
	sum.Writes += int64(d.Writes)
	sum.Fields = sample.Least(meshv1.MaxShadowFields, sum.Fields, d.Fields)
}
