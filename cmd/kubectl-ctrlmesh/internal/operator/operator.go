// Package operator says which shards an operator has, what each owns, and who leads it, from the
// state in force. It is pure. It never computes who should own a key.
package operator

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/readiness"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// Shard is a shard of an operator.
type Shard struct {
	// Status is what the root's status says about the shard. For a hand-written shard, only the
	// name and the counts of pods are set.
	Status v1alpha1.ShardStatus
	// Owned are the keys of the shard. Target are those that it is to own, and Wanted those that
	// are planned for it.
	Owned, Target, Wanted sharding.Scope
	Leader                Leader
	// Pods are its labelled pods.
	Pods []*corev1.Pod
	// Members is what the status says about them, at most 200 of all shards.
	Members []v1alpha1.MemberStatus
}

// LeaderState says whether a shard has a leader.
type LeaderState string

// States of the leader of a shard.
const (
	// Leads: a pod holds the shard's lock.
	Leads LeaderState = "Leads"
	// Missing: the shard's lock has no holder.
	Missing LeaderState = "Missing"
	// Unneeded: the shard owns nothing, or the mesh knows no lock of the operator.
	Unneeded LeaderState = "Unneeded"
	// Unknown: the lock cannot be read, and the status names no leader.
	Unknown LeaderState = "Unknown"
)

// Leader is the leader of a shard.
type Leader struct {
	State LeaderState
	// Pod is the name of the leader; it is the identity in the lock if that names no pod.
	Pod string
	// Node of the leader; empty if it is unknown.
	Node string
	// Lock of the shard, as namespace/name; empty if it is unknown.
	Lock string
	// Since is since when there has been no leader; zero if that is unknown.
	Since time.Time
}

// Shards returns the shards of a configuration. It returns an error if its status is invalid.
func Shards(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) ([]Shard, error) {
	if c.Spec.Root == nil {
		return []Shard{handWritten(s, c)}, nil
	}
	if c.Status.Root == nil {
		return nil, nil
	}
	shardOf := map[types.UID]string{}
	for _, a := range c.Status.Root.Assignments {
		shardOf[types.UID(a.UID)] = a.Shard
	}
	var out []Shard
	for _, status := range c.Status.Root.Shards {
		one := Shard{Status: status}
		for _, scope := range []struct {
			of   []string
			into *sharding.Scope
		}{{status.Held, &one.Owned}, {status.Target, &one.Target}, {status.Wanted, &one.Wanted}} {
			var err error
			if *scope.into, err = sharding.Parse(scope.of); err != nil {
				return nil, fmt.Errorf("reading what shard %s of %s/%s owns: %w", status.Name, c.Namespace, c.Name, err)
			}
		}
		one.Pods = podsOf(s, c.Namespace, func(pod *corev1.Pod) bool {
			return cmp.Or(shardOf[pod.UID], pod.Labels[v1alpha1.ShardLabel]) == status.Name
		})
		one.complete(s, c, !one.Owned.Empty())
		out = append(out, one)
	}
	return out, nil
}

// handWritten returns the shard of a configuration that selects its pods itself.
func handWritten(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) Shard {
	out := Shard{Status: v1alpha1.ShardStatus{Name: c.Name, Members: c.Status.Members, ReadyMembers: c.Status.ReadyMembers}}
	selects, problem := compile.Selects(c)
	if problem == nil {
		out.Pods = podsOf(s, c.Namespace, func(pod *corev1.Pod) bool { return selects(pod) })
	}
	out.complete(s, c, compile.HandWritten(c) && c.Status.ReadyMembers > 0)
	return out
}

// complete fills in the members of a shard, and its leader. acts reports whether it should have one.
func (o *Shard) complete(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig, acts bool) {
	o.Members = collect.Filter(c.Status.Pods, func(m v1alpha1.MemberStatus) bool { return o.pod(m.Name) != nil })
	if o.Leader = (Leader{State: Unneeded}); acts {
		o.Leader = o.leader(s, c)
	}
}

func podsOf(s *snapshot.Snapshot, namespace string, is func(*corev1.Pod) bool) (out []*corev1.Pod) {
	out = collect.Filter(collect.Pointers(s.Pods), func(pod *corev1.Pod) bool { return pod.Namespace == namespace && is(pod) })
	slices.SortFunc(out, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func (o *Shard) pod(name string) *corev1.Pod {
	i := slices.IndexFunc(o.Pods, func(pod *corev1.Pod) bool { return pod.Name == name })
	if i < 0 {
		return nil
	}
	return o.Pods[i]
}

// Ready returns how many pods are ready by the status and still are by the kubelet.
func (o *Shard) Ready() int32 {
	return min(int32(collect.Count(o.Pods, readiness.Of)), o.Status.ReadyMembers)
}

// Unready says why members are not ready, by what the status says about them, or else by the kubelet.
func (o *Shard) Unready() (out []string) {
	for _, pod := range o.Pods {
		why := ""
		if m := collect.Find(o.Members, func(m v1alpha1.MemberStatus) bool { return m.Name == pod.Name }); m != nil {
			why = m.Message
		}
		if why == "" && !readiness.Of(pod) {
			why = "the kubelet says that it is not ready"
		}
		if why != "" {
			out = append(out, fmt.Sprintf("pod %s on node %s: %s", pod.Name, cmp.Or(pod.Spec.NodeName, "NONE"), why))
		}
	}
	return out
}

// Captures returns the capture modes of the members, sorted.
func (o *Shard) Captures() (modes []string) {
	for _, m := range o.Members {
		if m.Capture != "" && !slices.Contains(modes, m.Capture) {
			modes = append(modes, m.Capture)
		}
	}
	slices.Sort(modes)
	return modes
}

// leader finds the holder of the shard's locks. The Leases show it even if no manager runs.
func (o *Shard) leader(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) Leader {
	out := Leader{State: Unneeded}
	for _, l := range c.Status.Locks {
		if !l.HeldByMesh {
			continue
		}
		is := o.holder(s, l)
		if is.State == Missing {
			return is
		}
		if out.State != Leads {
			out = is
		}
	}
	if reported := o.reported(); out.State == Unknown && reported != "" {
		out.State, out.Pod = Leads, reported
		if pod := o.pod(reported); pod != nil {
			out.Node = pod.Spec.NodeName
		}
	}
	return out
}

// reported returns the leader that the manager reported last; empty if it reported none.
func (o *Shard) reported() string {
	if m := collect.Find(o.Members, func(m v1alpha1.MemberStatus) bool { return m.LockHolder }); o.Status.Leader == "" && m != nil {
		return m.Name
	}
	return o.Status.Leader
}

// holder returns who holds the lock of the shard for one lock of the operator.
func (o *Shard) holder(s *snapshot.Snapshot, l v1alpha1.LockStatus) Leader {
	name := types.NamespacedName{Namespace: l.Namespace, Name: compile.UpstreamLock(l.Name, o.Status.Name)}
	out := Leader{State: Unknown, Lock: name.String()}
	if !s.LeasesRead[l.Namespace] || len(l.Resources) > 0 && !slices.Contains(l.Resources, "leases") {
		return out // only the manager can say
	}
	var lease *coordinationv1.Lease
	if found, ok := s.Leases[name]; ok {
		lease = &found
	}
	out.Pod, out.Since = snapshot.Holder(lease, s.Now)
	if out.Pod == "" {
		out.State = Missing
		return out
	}
	out.State = Leads
	podName, _, _ := strings.Cut(out.Pod, "_") // client-go appends a random suffix
	if pod := o.pod(podName); pod != nil {
		out.Pod, out.Node = pod.Name, pod.Spec.NodeName
	} else if pod := o.pod(o.reported()); pod != nil {
		out.Pod, out.Node = pod.Name, pod.Spec.NodeName // the operator chooses identities by itself
	}
	return out
}

// Condition returns a condition of a configuration; a zero one if it has none of that type.
func Condition(c *v1alpha1.ShardingConfig, kind string) metav1.Condition {
	if is := meta.FindStatusCondition(c.Status.Conditions, kind); is != nil {
		return *is
	}
	return metav1.Condition{Type: kind}
}

// True reports whether a condition of a configuration is true.
func True(c *v1alpha1.ShardingConfig, kind string) bool {
	return meta.IsStatusConditionTrue(c.Status.Conditions, kind)
}

// Pinned reports whether the root names the keys of a shard, so that its weight says nothing about
// the balance of the others.
func Pinned(root *v1alpha1.RootConfig, shard string) bool {
	return slices.ContainsFunc(layout.Shards(root), func(s layout.Shard) bool { return s.Pinned && s.Name == shard })
}

// KeyOf returns what the shards of a root assign objects by now. A change of the spec takes effect once
// no shard owns anything.
func KeyOf(c *v1alpha1.ShardingConfig) v1alpha1.Key {
	if c.Status.Root != nil && c.Status.Root.Acting != nil {
		return cmp.Or(c.Status.Root.Acting.Key, v1alpha1.KeyNamespace)
	}
	return cmp.Or(c.Spec.Root.Key, v1alpha1.KeyNamespace)
}

// Short returns the name of a shard without the prefix of its root.
func Short(root *v1alpha1.RootConfig, shard string) string {
	return strings.TrimPrefix(shard, root.Prefix+"-")
}
