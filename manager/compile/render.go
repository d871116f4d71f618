package compile

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// Values that are missing here mean the default, which is the zero value.
var (
	isolations = map[v1alpha1.Isolation]meshv1.Isolation{
		v1alpha1.IsolationObserve: meshv1.Isolation_ISOLATION_OBSERVE,
		v1alpha1.IsolationOff:     meshv1.Isolation_ISOLATION_OFF,
	}
	keys = map[v1alpha1.Key]meshv1.Key{
		v1alpha1.KeyObject:  meshv1.Key_KEY_OBJECT,
		v1alpha1.KeyCluster: meshv1.Key_KEY_CLUSTER,
	}
	methods = map[v1alpha1.Method]meshv1.Method{
		v1alpha1.MethodServerSide: meshv1.Method_METHOD_SERVER_SIDE,
		v1alpha1.MethodLabels:     meshv1.Method_METHOD_LABELS,
		v1alpha1.MethodFilter:     meshv1.Method_METHOD_FILTER,
	}
)

// UpstreamLock returns the name of a shard's lock at the apiserver.
func UpstreamLock(leaderElectionName, shard string) string {
	return leaderElectionName + "---" + shard
}

// render returns the sharding of a hand-written configuration's members; nil if it
// divides nothing.
func render(c *v1alpha1.ShardingConfig, known Root, read objectLimits) (*meshv1.Sharding, *Problem) {
	if PassesThrough(c) {
		if len(c.Spec.Limits) > 0 || c.Spec.Controller != nil {
			return nil, &Problem{v1alpha1.ReasonInvalid, "spec.clientCertificates: Passthrough leaves requests unread, so nothing can be divided: remove spec.limits and spec.controller, or choose Refuse"}
		}
		return nil, nil
	}
	if read.problem != nil {
		return nil, read.problem
	}
	shadow, problem := shadow(c)
	if problem != nil {
		return nil, problem
	}
	out := &meshv1.Sharding{
		Shard:  c.Name,
		Limits: read.render(),
		Method: meshv1.Method_METHOD_LABELS,
		Shadow: shadow,

		ExcludedLocks: excludedLocks(c),
	}
	if known.Standby != "" && !c.Spec.DryRun {
		standby(out, OperatorLocks(c, known.Locks), known.Standby)
		isolate(out, c)
		out.FenceNamespaces = out.FenceNamespaces || known.Undivided
		return out, nil
	}
	locks := renamedLocks(c, known.Locks)
	if c.Spec.DryRun || Shadows(c) { // the mesh holds none of the operator's locks for them
		locks = OperatorLocks(c, known.Locks)
	}
	out.Locks = shardLocks(locks, c.Name)
	for i, l := range out.Limits {
		l.Scope = read.limits[i].asked()
	}
	isolate(out, c)
	return out, nil
}

// standby renders a sharding in which a pod owns nothing and leads nothing.
func standby(s *meshv1.Sharding, locks []types.NamespacedName, reason string) {
	s.Standby, s.StandbyReason = true, reason
	s.Locks = shardLocks(locks, "")
	nothing := sharding.Scope{}.Proto()
	for _, l := range s.Limits {
		l.Scope = nothing
	}
}

// isolate renders what members may do with objects of other shards. If resources are
// divided by namespace, all shards may read the namespace of the configuration, because
// members keep their own objects there.
func isolate(s *meshv1.Sharding, c *v1alpha1.ShardingConfig) {
	s.Isolation = isolations[c.Spec.Isolation]
	s.FenceNamespaces = c.Spec.Fence == v1alpha1.FenceNamespace
	s.ReadAll = c.Spec.Reads != v1alpha1.ReadsOwn
	s.DryRun = c.Spec.DryRun && !s.Standby // as while a root in a dry run is withdrawn
	if u := c.Spec.UserAgent; u != nil {
		s.UserAgent, s.UserAgentPrefix = u.Value, u.Prefix
	}
	if r := c.Spec.Root; r != nil {
		// Pods in standby own nothing yet. Their shard is named like the root.
		if owner := layout.DefaultShard(r); r.ClusterScoped == v1alpha1.ClusterScopedDefaultOnly && s.Shard != owner {
			s.ClusterScopedOwner = owner
		}
		if !s.Standby && s.Shard != layout.DefaultShard(r) {
			s.DeniedUserAgents = r.DefaultOnlyUserAgents
		}
		s.Shared = collect.Map(c.Spec.Root.Shared, func(o v1alpha1.SharedObjects) *meshv1.SharedObjects {
			return &meshv1.SharedObjects{
				Resources:  []*meshv1.ResourceGroup{{ApiGroups: o.APIGroups, Resources: o.Resources}},
				Namespaces: o.Namespaces, Names: o.Names, WriteAll: o.Writes == v1alpha1.SharedWritesEveryone,
			}
		})
	}
	if dividesNamespaces(s, c) {
		s.Shared = append(s.Shared, &meshv1.SharedObjects{
			Resources:  []*meshv1.ResourceGroup{{ApiGroups: []string{"*"}, Resources: []string{"*"}}},
			Namespaces: []string{c.Namespace},
		})
	}
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

func labelKeys(s *metav1.LabelSelector) []string {
	if s == nil {
		return nil
	}
	keys := collect.Map(s.MatchExpressions, func(e metav1.LabelSelectorRequirement) string { return e.Key })
	return slices.AppendSeq(keys, maps.Keys(s.MatchLabels))
}

// ownedBy returns what each shard of a root owns.
func ownedBy(s handover.State) map[string]sharding.Scope {
	out := make(map[string]sharding.Scope, len(s.Shards))
	for name, shard := range s.Shards {
		out[name] = shard.Owned
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
