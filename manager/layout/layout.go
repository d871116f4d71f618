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
	"k8s.io/apimachinery/pkg/labels"
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
	// Name is `<prefix>-0-canary` or `<prefix>-<i>-normal`, i from 1; of a root with subsets,
	// `<prefix>-<subset>` or `<prefix>-default`.
	Name string
	// Pinned shards own the keys that the root names; the others divide the rest.
	Pinned bool
	// Replicas is the number of its pods; 0 for all remaining pods.
	Replicas int
}

// Shards returns the shards of a root, pinned ones first. A disabled root has none. An invalid
// root has at most MaxShards automatic shards, too: anybody can have one divided.
func Shards(root *v1alpha1.RootConfig) []Shard {
	if ptr.Deref(root.Disable, false) {
		return nil
	}
	var out []Shard
	if ByLabels(root) {
		for _, s := range root.Subsets {
			out = append(out, Shard{Name: subsetName(root, s.Name), Pinned: true})
		}
		return append(out, Shard{Name: subsetName(root, v1alpha1.DefaultSubset)})
	}
	if c := root.Canary; c != nil {
		out = append(out, Shard{Name: canaryName(root), Pinned: true, Replicas: int(ptr.Deref(c.Replicas, 1))})
	}
	n, replicas := 1, 0
	if root.Auto != nil {
		n, replicas = int(min(root.Auto.ShardingSize, MaxShards)), int(root.Auto.EveryShardReplicas)
	}
	for i := range n {
		out = append(out, Shard{Name: fmt.Sprintf("%s-%d-normal", root.Prefix, i+1), Replicas: replicas})
	}
	return out
}

// ByLabels reports whether labels decide which shard of a root a pod belongs to.
func ByLabels(root *v1alpha1.RootConfig) bool {
	return len(root.Subsets) > 0 || root.TargetSelector != nil
}

// ByNamespace reports whether objects are assigned by their namespace.
func ByNamespace(root *v1alpha1.RootConfig) bool {
	return root.Key == "" || root.Key == v1alpha1.KeyNamespace
}

func canaryName(root *v1alpha1.RootConfig) string { return root.Prefix + "-0-canary" }

func subsetName(root *v1alpha1.RootConfig, subset string) string { return root.Prefix + "-" + subset }

// DefaultShard returns the name of the shard of the default subset; empty for a root whose pods
// are not assigned by label.
func DefaultShard(root *v1alpha1.RootConfig) string {
	if !ByLabels(root) {
		return ""
	}
	return subsetName(root, v1alpha1.DefaultSubset)
}

// Workload is a StatefulSet or Deployment in the namespace of a root.
type Workload struct{ Kind, Name string }

func (w Workload) String() string { return w.Kind + " " + w.Name }

// Argument returns the workload as an argument of kubectl, such as statefulset/NAME.
func (w Workload) Argument() string { return strings.ToLower(w.Kind) + "/" + w.Name }

// Target returns the workload that a root names. It is the zero Workload if the root selects
// its pods by label.
func Target(root *v1alpha1.RootConfig) Workload {
	switch {
	case root.TargetRef != nil:
		return Workload{root.TargetRef.Kind, root.TargetRef.Name}
	case root.TargetSelector != nil:
		return Workload{}
	}
	return Workload{StatefulSet, root.TargetStatefulSet}
}

// Describe names the pods of a root for users.
func Describe(root *v1alpha1.RootConfig) string {
	if root.TargetSelector != nil {
		return "selector " + metav1.FormatLabelSelector(root.TargetSelector)
	}
	return Target(root).String()
}

// Selects returns a function that reports whether a pod belongs to the root: by its labels, or
// by its controller, which is the StatefulSet or a ReplicaSet of the Deployment. Admission uses
// it too. Call it once for many pods: to read a long selector takes milliseconds.
func Selects(root *v1alpha1.RootConfig) func(pod metav1.Object) bool {
	if root.TargetSelector == nil {
		target := Target(root)
		return func(pod metav1.Object) bool {
			workload, ok := WorkloadOf(pod)
			return ok && workload == target
		}
	}
	selector, err := metav1.LabelSelectorAsSelector(root.TargetSelector)
	if err != nil || selector.Empty() { // Validate reports the error
		selector = labels.Nothing()
	}
	return func(pod metav1.Object) bool { return selector.Matches(labels.Set(pod.GetLabels())) }
}

// WorkloadOf returns the workload that controls a pod. ok is false for pods of other kinds of
// controllers, and of none.
func WorkloadOf(pod metav1.Object) (w Workload, ok bool) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || !strings.HasPrefix(owner.APIVersion, "apps/") {
		return Workload{}, false
	}
	if owner.Kind == StatefulSet {
		return Workload{StatefulSet, owner.Name}, true
	}
	hash := pod.GetLabels()[templateHash]
	name, ok := strings.CutSuffix(owner.Name, "-"+hash)
	return Workload{Deployment, name}, ok && hash != "" && owner.Kind == "ReplicaSet"
}

// templateHash is the label by which a Deployment distinguishes its ReplicaSets and their
// pods.
const templateHash = "pod-template-hash"

// pinned returns the scopes of the pinned shards of a root, which [Resolve] has completed, and the
// namespaces that labels pin to the others. taken is their union.
func pinned(root *v1alpha1.RootConfig) (scopes map[string]sharding.Scope, taken sharding.Scope) {
	scopes = map[string]sharding.Scope{}
	for _, s := range Shards(root) {
		if names := root.PinnedNamespaces[s.Name]; len(names) > 0 {
			scopes[s.Name] = sharding.Keys(names...)
			taken = sharding.Union(taken, scopes[s.Name])
		}
	}
	pin := func(shard string, own sharding.Scope) {
		own = own.Minus(taken)
		scopes[shard] = sharding.Union(scopes[shard], own)
		taken = sharding.Union(taken, own)
	}
	if c := root.Canary; c != nil {
		pin(canaryName(root), sharding.Union(sharding.Keys(c.InNamespaces...), sharding.Keys(c.InClusters...), bucketsOf(c)))
	}
	for _, s := range root.Subsets {
		pin(subsetName(root, s.Name), sharding.Keys(Named(s.Namespaces)...))
	}
	return scopes, taken
}

// takenBy returns the keys of a root that are not divided by weight.
func takenBy(root *v1alpha1.RootConfig) sharding.Scope {
	_, taken := pinned(root)
	return taken
}

func bucketsOf(c *v1alpha1.CanaryConfig) sharding.Scope {
	var buckets []int
	for _, b := range c.InShardHash {
		if n, err := strconv.Atoi(b); err == nil { // else Validate says so
			buckets = append(buckets, n)
		}
	}
	return sharding.InBuckets(buckets...)
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
