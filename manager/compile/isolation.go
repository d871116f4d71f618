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

// isolate renders what members may do with objects of other shards. If resources are
// divided by namespace, all shards may read the namespace of the configuration, because
// members keep their own objects there.
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

// dividesNamespaces reports whether all divided resources are divided by namespace. A
// division by uid, or by the operator's own labels, also divides the objects within one
// namespace; listing all of them would undo it.
func dividesNamespaces(s *meshv1.Sharding, c *v1alpha1.ShardingConfig) bool {
	unscoped := func(l *meshv1.Limit) bool { return l.GetScope() == nil }
	if s.Key != meshv1.Key_KEY_NAMESPACE || slices.ContainsFunc(s.Limits, unscoped) {
		return false
	}
	if s.Method != meshv1.Method_METHOD_LABELS {
		return true // other methods apply selectors separately from scopes
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

// ownersOf renders the scopes that shards own, sorted by name. It omits shards that own
// nothing.
func ownersOf(owned map[string]sharding.Scope) (out []*meshv1.Owner) {
	for _, name := range slices.Sorted(maps.Keys(owned)) {
		if !owned[name].Empty() {
			out = append(out, &meshv1.Owner{Shard: name, Scope: owned[name].Proto()})
		}
	}
	return out
}
