package compile

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// NamedLocks returns the operator locks that a configuration names, without duplicates:
// first leaderElectionName, then the list of locks.
func NamedLocks(c *v1alpha1.ShardingConfig) []types.NamespacedName {
	ctl := c.Spec.Controller
	if ctl == nil {
		return nil
	}
	var out []types.NamespacedName
	if ctl.LeaderElectionName != "" {
		out = append(out, types.NamespacedName{Namespace: c.Namespace, Name: ctl.LeaderElectionName})
	}
	for _, l := range ctl.Locks {
		if name := (types.NamespacedName{Namespace: l.Namespace, Name: l.Name}); !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}

// ExcludesLock reports whether a configuration says that an object is not a lock of the operator.
func ExcludesLock(c *v1alpha1.ShardingConfig, name types.NamespacedName) bool {
	ctl := c.Spec.Controller
	return ctl != nil && slices.ContainsFunc(ctl.ExcludedLocks, func(e v1alpha1.ExcludedLock) bool {
		prefix, isPrefix := strings.CutSuffix(e.Name, "*")
		return e.Namespace == name.Namespace && (e.Name == name.Name || isPrefix && strings.HasPrefix(name.Name, prefix))
	})
}

// excludedLocks renders the objects that are not locks of the operator.
func excludedLocks(c *v1alpha1.ShardingConfig) []*meshv1.ExcludedLock {
	if c.Spec.Controller == nil {
		return nil
	}
	return collect.Map(c.Spec.Controller.ExcludedLocks, func(e v1alpha1.ExcludedLock) *meshv1.ExcludedLock {
		return &meshv1.ExcludedLock{Namespace: e.Namespace, Name: e.Name}
	})
}

// OperatorLocks returns the locks that a configuration names, then those that were
// discovered, as its status lists them, except those that it excludes.
func OperatorLocks(c *v1alpha1.ShardingConfig, known []v1alpha1.LockStatus) []types.NamespacedName {
	out := NamedLocks(c)
	for _, l := range known {
		if name := (types.NamespacedName{Namespace: l.Namespace, Name: l.Name}); l.Discovered && !slices.Contains(out, name) && !ExcludesLock(c, name) {
			out = append(out, name)
		}
	}
	return out
}

// renamedLocks returns the locks that members may acquire under their shards' names.
// A lock that the mesh does not hold is not among them, because a pod outside the mesh
// may hold it: members must not lead beside that pod. If the status lists no locks yet,
// an earlier version of the manager wrote it, which renamed all named locks.
func renamedLocks(c *v1alpha1.ShardingConfig, known []v1alpha1.LockStatus) []types.NamespacedName {
	if len(known) == 0 {
		return NamedLocks(c)
	}
	return slices.DeleteFunc(OperatorLocks(c, known), func(name types.NamespacedName) bool {
		return !slices.ContainsFunc(known, func(l v1alpha1.LockStatus) bool {
			return l.HeldByMesh && l.Namespace == name.Namespace && l.Name == name.Name
		})
	})
}

// Unheld says why members of a hand-written configuration are in standby while the mesh does not hold a
// lock that it names.
func Unheld(lock types.NamespacedName) string {
	return fmt.Sprintf("the mesh does not hold lock %s, so a pod outside the mesh may lead", lock)
}

// shardLocks renders the locks of a shard; under the operator's own names, for pods in
// standby, if shard is empty.
func shardLocks(locks []types.NamespacedName, shard string) (out []*meshv1.Lock) {
	for _, l := range locks {
		upstream := l.Name
		if shard != "" {
			upstream = UpstreamLock(l.Name, shard)
		}
		out = append(out, &meshv1.Lock{Namespace: l.Namespace, Name: l.Name, UpstreamName: upstream})
	}
	return out
}

// firstLock returns the upstream name of the first lock; empty without one.
func firstLock(locks []*meshv1.Lock) string {
	if len(locks) == 0 {
		return ""
	}
	return locks[0].GetUpstreamName()
}
