package locks

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// Obstacle is the reason why shards do not act, or do not act as a whole.
type Obstacle struct {
	// Reason is a condition's reason.
	Reason  v1alpha1.Reason
	Message string
}

// Sighting is a lock that a pod of a configuration tried to acquire or polls.
type Sighting struct {
	Pod *corev1.Pod
	push.ObservedLock
}

// Sightings returns the locks for which agents have seen pods contend.
func Sightings(pods []*corev1.Pod, observe func(node, uid string) push.Observation) (out []Sighting) {
	for _, p := range pods {
		for _, l := range observe(p.Spec.NodeName, string(p.UID)).ObservedLocks {
			out = append(out, Sighting{Pod: p, ObservedLock: l})
		}
	}
	return out
}

// proves reports whether the lock is the operator's: the pod tried to acquire it, or reads
// it while a pod of the same workload holds it. Clients do not try to acquire a lock
// before the holder's lease has ended, which may take minutes.
func (s Sighting) proves() bool { return s.Written || sameWorkload(s.Pod, s.Holder) }

var (
	ordinal = regexp.MustCompile(`^[0-9]+$`)
	// generated is what controllers append to the names of pods, after the hash of the
	// template in those of a Deployment. Kubernetes uses these characters alone for it.
	generated = regexp.MustCompile(`^([bcdfghjklmnpqrstvwxz2456789]{1,10}-)?[bcdfghjklmnpqrstvwxz2456789]{5}$`)
)

// sameWorkload reports whether the identity of a holder, as client-go and
// controller-runtime form it, is the name of a pod of the same workload as another pod.
func sameWorkload(pod *corev1.Pod, holder string) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	host, _, _ := strings.Cut(holder, "_")
	suffix, ok := strings.CutPrefix(host, compile.Workload(pod)+"-")
	if owner == nil || !ok {
		return false
	}
	if owner.Kind == layout.StatefulSet {
		return ordinal.MatchString(suffix)
	}
	return generated.MatchString(suffix)
}

func (s Sighting) name() types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

// Reader reads what is known of locks. It is a [Keeper].
type Reader interface {
	// States returns a function that returns what is known of a lock for a configuration.
	States(config types.NamespacedName) func(lock types.NamespacedName) (State, bool)
	// Refuses reports whether the mesh may not have a lock for a configuration, or has not asked.
	Refuses(config, lock types.NamespacedName) bool
}

// Survey returns the locks of a configuration's operator and their holders. before is
// status.locks. A lock that is not named is discovered if a sighting proves that it is the
// operator's, unless another configuration has it, or too many were discovered: then
// undiscovered says so.
func Survey(config *v1alpha1.ShardingConfig, before []v1alpha1.LockStatus, sightings []Sighting,
	others []*v1alpha1.ShardingConfig, keeper Reader) (out []v1alpha1.LockStatus, undiscovered *Obstacle) {
	state := keeper.States(client.ObjectKeyFromObject(config))
	known := slices.Clone(before)
	for _, s := range sightings {
		if !s.proves() || compile.ExcludesLock(config, s.name()) && !slices.Contains(compile.NamedLocks(config), s.name()) {
			continue
		}
		var obstacle *Obstacle
		if known, obstacle = discover(config, known, s, others, keeper); obstacle != nil {
			undiscovered = obstacle
		}
	}
	named := compile.NamedLocks(config)
	for _, name := range compile.OperatorLocks(config, known) {
		l := v1alpha1.LockStatus{Namespace: name.Namespace, Name: name.Name}
		if i := slices.IndexFunc(known, is(name)); i >= 0 {
			l = *known[i].DeepCopy()
		}
		l.Discovered = !slices.Contains(named, name)
		if s, ok := state(name); ok { // else the recorded state applies
			l.Holder, l.HeldByMesh = s.Holder, s.Held
			l.Resources = append(l.Resources, s.Resources...)
		}
		slices.Sort(l.Resources)
		l.Resources = slices.Compact(l.Resources)
		out = append(out, l)
	}
	return out, undiscovered
}

func is(name types.NamespacedName) func(v1alpha1.LockStatus) bool {
	return func(l v1alpha1.LockStatus) bool { return l.Namespace == name.Namespace && l.Name == name.Name }
}

// discover adds a lock of the operator.
func discover(config *v1alpha1.ShardingConfig, known []v1alpha1.LockStatus, s Sighting, others []*v1alpha1.ShardingConfig, keeper Reader) ([]v1alpha1.LockStatus, *Obstacle) {
	if s.Namespace == corev1.NamespaceNodeLease {
		return known, nil // heartbeats of nodes
	}
	if i := slices.IndexFunc(known, is(s.name())); i >= 0 {
		if !slices.Contains(known[i].Resources, s.Resource) {
			known[i].Resources = append(slices.Clone(known[i].Resources), s.Resource)
		}
		return known, nil
	}
	named := compile.NamedLocks(config)
	l := v1alpha1.LockStatus{Namespace: s.Namespace, Name: s.Name, Resources: []string{s.Resource}}
	if slices.Contains(named, s.name()) {
		return append(known, l), nil
	}
	if other := Claimed(config, s.name(), others, keeper); other != "" {
		return known, &Obstacle{v1alpha1.ReasonUnknownLock,
			fmt.Sprintf("pod %s contends for lock %s, which ShardingConfig %s has as well: if the operators share it and divide different objects, name it in spec.controller.locks of both", s.Pod.Name, s.name(), other)}
	}
	discovered := len(collect.Filter(known, func(k v1alpha1.LockStatus) bool { return k.Discovered }))
	if all := discovered + len(named); all >= meshv1.MaxLocks {
		return known, &Obstacle{v1alpha1.ReasonUnknownLock,
			fmt.Sprintf("pod %s contends for lock %s, but the operator has %d locks already, which is the maximum: give it fewer", s.Pod.Name, s.name(), all)}
	}
	l.Discovered = true
	return append(known, l), nil
}

// Claimed returns another configuration that has a lock; empty if none has. Hand-written shards
// of one namespace commonly belong to one operator, so they share discovered locks. One that
// names a lock without permission does not have it.
func Claimed(config *v1alpha1.ShardingConfig, name types.NamespacedName, others []*v1alpha1.ShardingConfig, keeper Reader) string {
	for _, o := range others {
		if o.UID == config.UID || compile.Derived(o) || keeper.Refuses(client.ObjectKeyFromObject(o), name) || !slices.Contains(compile.OperatorLocks(o, o.Status.Locks), name) {
			continue
		}
		if o.Namespace != config.Namespace || o.Spec.Root != nil || config.Spec.Root != nil {
			return o.Namespace + "/" + o.Name
		}
	}
	return ""
}

// Unheld returns the first obstacle among locks: a lock held outside the mesh, else one that the
// mesh does not hold yet; nil if it holds all. holder describes an identity.
func Unheld(locks []v1alpha1.LockStatus, state func(types.NamespacedName) (State, bool), holder func(string) string) *Obstacle {
	var out *Obstacle
	for _, l := range locks {
		name := types.NamespacedName{Namespace: l.Namespace, Name: l.Name}
		switch s, _ := state(name); {
		case l.HeldByMesh:
		case l.Holder != "":
			return &Obstacle{v1alpha1.ReasonHeldOutside, fmt.Sprintf("lock %s is held outside the mesh by %s%s", name, holder(l.Holder), s.untilExpiry())}
		case out != nil:
		case s.Problem != "":
			out = &Obstacle{v1alpha1.ReasonWaiting, fmt.Sprintf("lock %s: %s", name, s.Problem)}
		default:
			out = &Obstacle{v1alpha1.ReasonWaiting, fmt.Sprintf("lock %s is not acquired yet", name)}
		}
	}
	return out
}

// untilExpiry describes how long a lock stays held if its holder has stopped renewing it.
func (s State) untilExpiry() string {
	if s.Expires.IsZero() {
		return ""
	}
	return fmt.Sprintf(", which does not renew it: its lease ends at %s", s.Expires.UTC().Format(time.RFC3339))
}
