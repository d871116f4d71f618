package layout

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/proxy/scope"
)

// Shard is one that a root means.
type Shard struct {
	// Name is `<prefix>-0-canary` or `<prefix>-<i>-normal`, i from 1.
	Name   string
	Canary bool
	// Replicas is the number of its pods; 0 for all that are left.
	Replicas int
}

// Shards are those that a root means, the canary first. None under disable.
func Shards(root *v1alpha1.RootConfig) []Shard { panic("not written yet") }

// Target is the workload of a root: its kind and name.
func Target(root *v1alpha1.RootConfig) (kind, name string) { panic("not written yet") }

// Selects tells whether a pod is one of the root's workload, by its controller: a
// StatefulSet, or a ReplicaSet that a Deployment named. It holds at admission too.
func Selects(root *v1alpha1.RootConfig, pod metav1.Object) bool { panic("not written yet") }

// Place says which shards pods belong to that have none yet, by uid: those of a
// StatefulSet by ordinal, others to the shard that lacks most, the first of them.
// Pods that no shard has room for are left out. Outdated are the assigned pods
// that belong elsewhere by now.
func Place(root *v1alpha1.RootConfig, pods []*corev1.Pod, assigned map[string]handover.Member) (placed map[string]string, outdated []string) {
	panic("not written yet")
}

// Weights are what there is to do for each key that exists: namespaces, or for
// key Object none.
type Weights map[string]int64

// Skew is the weight of the heaviest automatic shard over the mean; 1 when there
// is nothing to weigh.
func Skew(held map[string]scope.Scope, root *v1alpha1.RootConfig, w Weights) float64 {
	panic("not written yet")
}

// First is what the shards of a root are to hold when none has held anything.
// Scopes are disjoint and complete, and every shard has at least one of the keys
// that exist if there are enough.
func First(root *v1alpha1.RootConfig, w Weights) map[string]scope.Scope { panic("not written yet") }

// Next is what the shards of a root are to hold, given what they were to hold last.
// As few keys move as need be: a canary that grows takes only its own, a shard
// that goes gives to its neighbours. Weights that have grown apart are no reason.
func Next(root *v1alpha1.RootConfig, last map[string]scope.Scope, w Weights) map[string]scope.Scope {
	panic("not written yet")
}

// Balance is Next, with weights a reason: as much of the way to even shards as one
// round of handovers goes, or last itself when the skew is within the hysteresis.
// It says in words what it moves.
func Balance(root *v1alpha1.RootConfig, last map[string]scope.Scope, w Weights) (next map[string]scope.Scope, what string) {
	panic("not written yet")
}

// Validate finds what cannot be meant by a root: keys that would have no owner,
// or two, are named by an example.
func Validate(root *v1alpha1.RootConfig, path *field.Path) field.ErrorList {
	panic("not written yet")
}
