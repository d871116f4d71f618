package compile

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// isolate renders what members may do with objects of other shards. The namespace of the
// configuration, in which members keep their own, is shared for reading if namespaces
// are what is divided.
func isolate(s *meshv1.Sharding, c *v1alpha1.ShardingConfig) {
	s.Isolation = isolations[c.Spec.Isolation]
	s.FenceNamespaces = c.Spec.Fence == v1alpha1.FenceNamespace
	s.ReadAll = c.Spec.Reads != v1alpha1.ReadsOwn
	s.DryRun = c.Spec.DryRun
	if c.Spec.Root != nil {
		s.Shared = sharedOf(c.Spec.Root.Shared)
	}
	if dividesNamespaces(s, c) {
		s.Shared = append(s.Shared, &meshv1.SharedObjects{
			Resources:  []*meshv1.ResourceGroup{{ApiGroups: []string{"*"}, Resources: []string{"*"}}},
			Namespaces: []string{c.Namespace},
		})
	}
}

func sharedOf(in []v1alpha1.SharedObjects) (out []*meshv1.SharedObjects) {
	for _, o := range in {
		out = append(out, &meshv1.SharedObjects{
			Resources:  []*meshv1.ResourceGroup{{ApiGroups: o.APIGroups, Resources: o.Resources}},
			Namespaces: o.Namespaces,
			Names:      o.Names,
			WriteAll:   o.Writes == v1alpha1.SharedWritesEveryone,
		})
	}
	return out
}

// dividesNamespaces reports whether all that is divided is divided by namespace. By uid,
// or by labels of the operator's own, the objects of one namespace are divided too, and
// to list them all would undo that.
func dividesNamespaces(s *meshv1.Sharding, c *v1alpha1.ShardingConfig) bool {
	unscoped := func(l *meshv1.Limit) bool { return l.GetScope() == nil }
	if s.Key != meshv1.Key_KEY_NAMESPACE || slices.ContainsFunc(s.Limits, unscoped) {
		return false
	}
	if s.Method != meshv1.Method_METHOD_LABELS {
		return true // the labels are imposed apart
	}
	limits := c.Spec.Limits
	if c.Spec.Root != nil {
		limits = slices.Concat(limits, c.Spec.Root.ResourceSelector)
	}
	return !slices.ContainsFunc(limits, func(l v1alpha1.ObjectLimiter) bool {
		return slices.ContainsFunc(labelKeys(l.Selector), func(key string) bool {
			return key != v1alpha1.NamespaceLabel && key != v1alpha1.ShardingHashLabel
		})
	})
}

func labelKeys(s *metav1.LabelSelector) (keys []string) {
	if s == nil {
		return nil
	}
	for _, e := range s.MatchExpressions {
		keys = append(keys, e.Key)
	}
	return slices.AppendSeq(keys, maps.Keys(s.MatchLabels))
}

// heldBy returns what each shard of a root owns.
func heldBy(s handover.State) map[string]sharding.Scope {
	out := make(map[string]sharding.Scope, len(s.Shards))
	for name, shard := range s.Shards {
		out[name] = shard.Held
	}
	return out
}

// ownersOf renders what shards own, by name. Those that own nothing are left out.
func ownersOf(owned map[string]sharding.Scope) (out []*meshv1.Owner) {
	for _, name := range slices.Sorted(maps.Keys(owned)) {
		if !owned[name].Empty() {
			out = append(out, &meshv1.Owner{Shard: name, Scope: owned[name].Proto()})
		}
	}
	return out
}
