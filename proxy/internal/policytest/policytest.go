// Package policytest has policies that tests of the proxy and of its stages share.
package policytest

import (
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Paths of member clusters: all of them, one that a shard of Clusters("own") owns, and one of another shard.
const (
	Inventory = "/apis/cluster.karmada.io/v1alpha1/clusters"
	InOwn     = Inventory + "/own/proxy"
	InOther   = Inventory + "/other/proxy"
)

// LimitTo is a shard that a selector limits.
func LimitTo(selector string) *meshv1.Sharding {
	return &meshv1.Sharding{Shard: "s1", Limits: []*meshv1.Limit{{Selector: selector}}}
}

// Core are resources of the core group.
func Core(resources ...string) []*meshv1.ResourceGroup {
	return []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: resources}}
}

// Owning is a shard that owns some keys of pods and namespaces.
func Owning(keys ...string) *meshv1.Sharding {
	return &meshv1.Sharding{Shard: "s1", Method: meshv1.Method_METHOD_LABELS, Limits: []*meshv1.Limit{{
		Scope: sharding.Keys(keys...).Proto(), Resources: Core("pods", "namespaces"),
	}}}
}

// ByObject is a shard that owns the objects of resources whose uid is "mine".
func ByObject(resources ...string) *meshv1.Sharding {
	s := Owning("mine")
	s.Key, s.Limits[0].Resources = meshv1.Key_KEY_OBJECT, Core(resources...)
	return s
}

// Divided is a shard that owns a scope of all resources.
func Divided(owned sharding.Scope, method meshv1.Method) *meshv1.Sharding {
	return &meshv1.Sharding{Shard: "s1", Method: method, Limits: []*meshv1.Limit{{Scope: owned.Proto()}}}
}

// Locked is a shard with a lock.
func Locked(shard string, limits ...*meshv1.Limit) *meshv1.Sharding {
	return &meshv1.Sharding{
		Shard:  shard,
		Limits: limits,
		// As hard as it gets: namespace, resource and lock share a name.
		Locks: []*meshv1.Lock{{Namespace: "leases", Name: "leases", UpstreamName: "leases---" + shard}},
	}
}

// Standby is a shard that divides resources and owns nothing, with locks in two namespaces.
func Standby(method meshv1.Method) *meshv1.Sharding {
	return &meshv1.Sharding{
		Shard: "s1", Standby: true, ReadAll: true, Method: method,
		Limits: []*meshv1.Limit{{
			Scope:     sharding.Scope{}.Proto(),
			Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"", "coordination.k8s.io"}, Resources: []string{"pods", "nodes", "namespaces", "configmaps", "leases"}}},
		}},
		Locks: []*meshv1.Lock{
			{Namespace: "kube-system", Name: "op", UpstreamName: "op---s1"},
			{Namespace: "ns", Name: "op", UpstreamName: "op---s1"},
		},
	}
}

// Clusters is a shard that owns the member clusters of some names.
func Clusters(names ...string) *meshv1.Sharding {
	return &meshv1.Sharding{
		Shard: "s1", Key: meshv1.Key_KEY_CLUSTER, ReadAll: true,
		Limits: []*meshv1.Limit{{
			Scope:     sharding.Keys(names...).Proto(),
			Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"cluster.karmada.io"}, Resources: []string{"clusters"}}},
		}},
		Owners: []*meshv1.Owner{{Shard: "s1", Scope: sharding.Keys(names...).Proto()}, {Shard: "s2", Scope: sharding.Keys("other").Proto()}},
	}
}

// ThroughClusters is a policy under which requests reach member clusters.
func ThroughClusters(s *meshv1.Sharding, of *meshv1.Traffic) *meshv1.PodPolicy {
	return &meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", ClusterPaths: []string{Inventory + "/*/proxy"}, Sharding: s, Traffic: of}
}
