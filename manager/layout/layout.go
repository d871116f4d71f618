// Package layout computes the shards of a root configuration: their names, the pods of
// each, and the keys that each should own. It divides the key space by weight, so that the
// shards have equal load.
//
// It is pure.
package layout

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Kinds of workload.
const (
	StatefulSet = "StatefulSet"
	Deployment  = "Deployment"
)

// Shard is a shard of a root.
type Shard struct {
	// Name is `<prefix>-0-canary` or `<prefix>-<i>-normal`, i from 1.
	Name   string
	Canary bool
	// Replicas is the number of its pods; 0 for all remaining pods.
	Replicas int
}

// Shards returns the shards of a root, the canary first. A disabled root has none.
func Shards(root *v1alpha1.RootConfig) []Shard {
	if ptr.Deref(root.Disable, false) {
		return nil
	}
	var out []Shard
	if c := root.Canary; c != nil {
		out = append(out, Shard{Name: canaryName(root), Canary: true, Replicas: int(ptr.Deref(c.Replicas, 1))})
	}
	n, replicas := 1, 0
	if root.Auto != nil {
		n, replicas = int(root.Auto.ShardingSize), int(root.Auto.EveryShardReplicas)
	}
	for i := range n {
		out = append(out, Shard{Name: fmt.Sprintf("%s-%d-normal", root.Prefix, i+1), Replicas: replicas})
	}
	return out
}

func canaryName(root *v1alpha1.RootConfig) string { return root.Prefix + "-0-canary" }

// Target returns the kind and name of the workload of a root.
func Target(root *v1alpha1.RootConfig) (kind, name string) {
	if root.TargetRef != nil {
		return root.TargetRef.Kind, root.TargetRef.Name
	}
	return StatefulSet, root.TargetStatefulSet
}

// Selects reports whether a pod belongs to the root's workload, by its controller: the
// StatefulSet, or a ReplicaSet of the Deployment. Admission uses it too.
func Selects(root *v1alpha1.RootConfig, pod metav1.Object) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || !strings.HasPrefix(owner.APIVersion, "apps/") {
		return false
	}
	kind, name := Target(root)
	if kind == StatefulSet {
		return owner.Kind == kind && owner.Name == name
	}
	hash := pod.GetLabels()[templateHash]
	return owner.Kind == "ReplicaSet" && hash != "" && owner.Name == name+"-"+hash
}

// templateHash is the label by which a Deployment distinguishes its ReplicaSets and their
// pods.
const templateHash = "pod-template-hash"

// canary returns the scope of a root's canary; empty without a canary.
func canary(root *v1alpha1.RootConfig) sharding.Scope {
	if root.Canary == nil {
		return sharding.Scope{}
	}
	var buckets []int
	for _, b := range root.Canary.InShardHash {
		if n, err := strconv.Atoi(b); err == nil { // else Validate says so
			buckets = append(buckets, n)
		}
	}
	return sharding.Union(sharding.Keys(root.Canary.InNamespaces...), sharding.InBuckets(buckets...))
}

// ordinal returns the ordinal of a pod in its StatefulSet. It reads the name, because the
// label apps.kubernetes.io/pod-index, which repeats it, can be changed.
func ordinal(set, pod string) (n int, ok bool) {
	suffix, ok := strings.CutPrefix(pod, set+"-")
	if !ok {
		return 0, false
	}
	v, err := strconv.ParseUint(suffix, 10, 31)
	return int(v), err == nil
}

// ofOrdinal returns the shard of a StatefulSet's pod by its ordinal.
func ofOrdinal(shards []Shard, n int) (name string, ok bool) {
	for _, s := range shards {
		size := s.Replicas
		if size == 0 {
			size = math.MaxInt
		}
		if n < size {
			return s.Name, true
		}
		n -= size
	}
	return "", false
}

// Rebalance returns what to do about shards whose weights have grown apart.
func Rebalance(root *v1alpha1.RootConfig) v1alpha1.Rebalance {
	if root.Auto == nil {
		return v1alpha1.RebalanceOff
	}
	return cmp.Or(root.Auto.Rebalance, v1alpha1.RebalanceAutomatic)
}
