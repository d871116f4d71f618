package status

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// RootInput is what is known of one configuration with spec.root.
type RootInput struct {
	Config *v1alpha1.ShardingConfig
	State  handover.State
	// Root is State as it is to be written, with what else the caller knows: the
	// counts of namespaces, weights, skew and suggestion. Of Handovers WaitsFor is
	// missing, and Handover.
	Root v1alpha1.RootStatus
	// Pods are those of the workload that are on the mesh and have not ended.
	Pods []*corev1.Pod
	// Problem says why nothing can be done for the configuration; nil if there is none.
	Problem error
	// Restarting says which eviction is under way or what keeps it, for people.
	Restarting string
	// Wanted is the version of a pod's policy, and Observe tells what the agent of
	// a node said of a pod.
	Wanted  func(uid string) string
	Observe func(node, uid string) push.Observation
	// Now and Since are as in Input.
	Now, Since time.Time
}

// OfRoot computes the status of a configuration with spec.root. What is not to be
// forgotten is in it as it was given.
func OfRoot(in RootInput) v1alpha1.ShardingConfigStatus {
	out := v1alpha1.ShardingConfigStatus{
		ObservedGeneration: in.Config.Generation,
		Conditions:         slices.Clone(in.Config.Status.Conditions),
		Shards:             int32(len(in.Root.Shards)),
		Members:            int32(len(in.Pods)),
		Root:               &in.Root,
	}
	return out
}
