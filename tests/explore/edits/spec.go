package edits

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Spec is the part of a root's spec that the user edits.
type Spec struct {
	Lock      Lock
	Resources Resources
	ByObject  bool // objects are assigned by their uid, not by their namespace
	DryRun    bool
	Retarget  bool // to the second workload
}

// Lock is the operator's lock that a spec names.
type Lock uint8

// The locks. An operator without a lock elects no leader.
const (
	LockA Lock = iota
	LockB
	NoLock
)

// lockNames are those of the locks. Both are in the namespace of the first root.
var lockNames = [NoLock]types.NamespacedName{{Namespace: "ns", Name: "a"}, {Namespace: "ns", Name: "b"}}

func lockOf(name types.NamespacedName) Lock {
	for i, n := range lockNames {
		if n == name {
			return Lock(i)
		}
	}
	return NoLock
}

// Resources are the divided resources that a spec names.
type Resources uint8

// The resources that a spec may name.
const (
	ConfigMaps Resources = iota
	Secrets
	// Misspelt are ConfigMaps for the user, and nothing for the apiserver.
	Misspelt
	// Later are served by the apiserver from some time on.
	Later
)

// resource is a resource by its name, what the user means by it and what is divided by it, as
// bits.
type resource struct {
	name           string
	meant, divided uint8
}

var resourceList = [...]resource{ConfigMaps: {"configmaps", 1, 1}, Secrets: {"secrets", 2, 2}, Misspelt: {"configmap", 1, 0}, Later: {"tallies", 4, 4}}

// unserved reports whether the apiserver does not serve the resources of a spec.
func (s Spec) unserved(later bool) bool {
	return s.Resources == Misspelt || s.Resources == Later && !later
}

// config returns a root as the apiserver has it. The second root has one shard, and a workload of
// its own.
func (r root) config(i int, namespace string) *v1alpha1.ShardingConfig {
	name, size, target := fmt.Sprintf("root%d", i), int32(2), workloads[i][0]
	if i > 0 {
		size = 1
	}
	if r.spec.Retarget {
		target = workloads[i][1]
	}
	c := &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name), Generation: int64(r.generation)},
		Spec: v1alpha1.ShardingConfigSpec{
			DryRun: r.spec.DryRun,
			Root: &v1alpha1.RootConfig{
				Prefix: name, TargetStatefulSet: target, OnChange: v1alpha1.OnChangeRelist,
				Auto: &v1alpha1.AutoConfig{ShardingSize: size, EveryShardReplicas: 1},
				ResourceSelector: []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{
					{APIGroups: []string{""}, Resources: []string{resourceList[r.spec.Resources].name}}}}},
			},
		},
	}
	if r.deleted {
		c.DeletionTimestamp = &metav1.Time{Time: now}
	}
	if r.spec.ByObject {
		c.Spec.Root.Key = v1alpha1.KeyObject
	}
	if r.spec.Lock != NoLock {
		l := lockNames[r.spec.Lock]
		c.Spec.Controller = &v1alpha1.ControllerConfig{Locks: []v1alpha1.LockReference{{Namespace: l.Namespace, Name: l.Name}}}
	}
	return c
}

// workloads are the StatefulSets that each root may target.
var workloads = [2][2]string{{"p", "q"}, {"r", "r"}}

// now does not pass: all agents have connected, and nothing is waited for by time.
var now = time.UnixMilli(1)

const nodeName = "node"

// object returns a pod as the apiserver has it.
func (i identity) object(slot int, namespace string) *corev1.Pod {
	name := fmt.Sprintf("%s-%d", i.workload(), i.ordinal)
	trust := v1alpha1.TrustMesh
	if i.both {
		trust = v1alpha1.TrustBoth
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: types.UID(podName(slot)),
			Labels:          map[string]string{v1alpha1.EnableProxyLabel: "true"},
			Annotations:     map[string]string{v1alpha1.TrustAnnotation: trust},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: i.workload(), Controller: new(true)}},
		},
		Spec:   corev1.PodSpec{NodeName: nodeName},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

func podName(slot int) string { return fmt.Sprintf("pod%d", slot) }
