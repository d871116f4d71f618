package roots

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// askAgain is how long the eviction of a pod is not asked for again.
const askAgain = 10 * time.Second

// restarting is what is known of the evictions of stale members.
type restarting struct {
	evicted string    // uid of the last
	name    string    // of the same
	at      time.Time // it was asked for
	retry   time.Time // of a refused one
	why     string    // what is under way, or keeps it, for people

	owed  int             // pods that were evicted since
	there map[string]bool // these were the workload's, by uid
	asked time.Time       // for the size of the workload
}

// restart evicts the next pod that is to be replaced, if one may go now.
func (rt *root) restart(ctx context.Context, v view, now time.Time) error {
	if v.problem != nil && !compile.Withdrawn(v.config) {
		return nil
	}
	if err := rt.forgive(ctx, v, now); err != nil {
		return err
	}
	uid, why := rt.mayRestart(v)
	pod := v.all[uid]
	if uid == "" {
		rt.awaitsSuccessor(v, now)
		return nil
	}
	if now.Before(rt.retry) || uid == rt.evicted && now.Sub(rt.at) < askAgain {
		return nil
	}
	switch err := rt.evict(ctx, pod); {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil // it is gone already
	case apierrors.IsTooManyRequests(err):
		rt.retry = now.Add(askAgain)
		rt.why = fmt.Sprintf("pod %s is to be restarted, and may not be evicted now: %v", pod.Name, err)
		return nil
	case err != nil:
		return fmt.Errorf("evicting pod %s: %w", pod.Name, err)
	}
	if rt.lacking(v) == 0 {
		rt.owed, rt.there = 0, map[string]bool{}
		for _, p := range v.pods {
			rt.there[string(p.UID)] = true
		}
	}
	rt.owed++
	rt.evicted, rt.name, rt.at = uid, pod.Name, now
	rt.why = fmt.Sprintf("pod %s is being restarted", pod.Name)
	rt.Recorder.Eventf(v.config, pod, corev1.EventTypeNormal, "Restarting", "Evict", "pod %s is restarted: %s", pod.Name, why)
	return nil
}

func (rt *root) evict(ctx context.Context, pod *corev1.Pod) error {
	meta := metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}
	return rt.Client.SubResource("eviction").Create(ctx, &corev1.Pod{ObjectMeta: meta}, &policyv1.Eviction{
		ObjectMeta:    meta,
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	})
}

// awaitsSuccessor says what restarts wait for while no pod may be evicted.
func (rt *root) awaitsSuccessor(v view, now time.Time) {
	if now.After(rt.retry) {
		rt.why = ""
	}
	if rt.lacking(v) > 0 {
		rt.why = fmt.Sprintf("pod %s was evicted, and its successor is not there yet", rt.name)
	}
}

// mayRestart says which pod may be evicted now, and why it is to be replaced.
func (rt *root) mayRestart(v view) (uid, why string) {
	if compile.Withdrawn(v.config) && (rt.state.Holds() || rt.unreleased(v)) {
		return "", "" // its successor could not lead yet
	}
	if p := rt.misfit(v); p != nil {
		return string(p.UID), "its clients do not trust what they must: the mesh CA alone in a shard, the cluster's CA too once there are no shards"
	}
	return rt.state.Restarts(rt.wanted(v),
		func(uid string) handover.Health { return rt.health(v, rt.state.Members[uid]) },
		func(uid string) bool { return rt.Observe(rt.state.Members[uid].Node, uid).LockHolder }), "it is of another shard now, or holds objects in its caches that are"
}

// misfits are the pods that act on nothing and cannot become what they are to be: members,
// or, when the root is deleted, pods that run unsharded.
func misfits(v view, members map[string]handover.Member) (out []*corev1.Pod) {
	deleted := v.config.DeletionTimestamp != nil
	for _, p := range v.pods {
		_, member := members[string(p.UID)]
		if member || p.DeletionTimestamp != nil || p.Spec.NodeName == "" {
			continue
		}
		if deleted && p.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustMesh || !deleted && !compile.Withdrawn(v.config) && !admitted(v, p) {
			out = append(out, p)
		}
	}
	return out
}

// misfit is the next of them to be evicted: one after the other, and while all others are
// ready.
func (rt *root) misfit(v view) *corev1.Pod {
	candidates := misfits(v, rt.state.Members)
	if len(candidates) == 0 || rt.lacking(v) > 0 {
		return nil
	}
	var unready []*corev1.Pod
	for _, p := range v.pods {
		if !status.PodReady(p) {
			unready = append(unready, p)
		}
	}
	switch {
	case len(unready) == 0:
		return slices.MinFunc(candidates, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	case len(unready) == 1 && slices.Contains(candidates, unready[0]):
		return unready[0]
	}
	return nil
}

// wanted is how many members are to be up before another is evicted: all that are
// there, and those that shards have room for and that are to join, or to come.
func (rt *root) wanted(v view) int {
	shards := layout.Shards(v.config.Spec.Root)
	room, open := 0, len(shards) == 0
	for _, s := range shards {
		room += s.Replicas
		open = open || s.Replicas == 0
	}
	members, coming := 0, rt.lacking(v)
	for _, m := range rt.state.Members {
		if !isThere(v, m) {
			continue
		}
		members++
		if slices.ContainsFunc(shards, func(s layout.Shard) bool { return s.Name == m.Shard }) {
			room--
		}
	}
	for _, p := range v.pods {
		if _, ok := rt.state.Members[string(p.UID)]; !ok && p.DeletionTimestamp == nil && !rt.unsharded(v, p) {
			coming++
		}
	}
	if !open {
		coming = min(coming, max(room, 0))
	}
	return members + coming
}

// lacking is how many evicted pods have no successor yet.
func (rt *root) lacking(v view) int {
	n := rt.owed
	for _, p := range v.pods {
		if !rt.there[string(p.UID)] {
			n--
		}
	}
	return max(n, 0)
}

// forgive stops waiting for successors that will not come, because the workload has been scaled
// down since.
func (rt *root) forgive(ctx context.Context, v view, now time.Time) error {
	lacking := rt.lacking(v)
	if lacking == 0 || now.Sub(rt.at) < askAgain || now.Sub(rt.asked) < askAgain {
		return nil
	}
	rt.asked = now
	replicas, err := rt.replicas(ctx, v.config)
	if err != nil {
		return err
	}
	for _, p := range v.pods {
		if p.DeletionTimestamp == nil {
			replicas--
		}
	}
	rt.owed -= lacking - min(lacking, max(replicas, 0))
	return nil
}

// replicas is how many pods the workload is to have, 0 if there is no workload.
func (rt *root) replicas(ctx context.Context, c *v1alpha1.ShardingConfig) (int, error) {
	kind, name := layout.Target(c.Spec.Root)
	meta := metav1.ObjectMeta{Namespace: c.Namespace, Name: name}
	var workload client.Object = &appsv1.StatefulSet{ObjectMeta: meta}
	if kind != layout.StatefulSet {
		workload = &appsv1.Deployment{ObjectMeta: meta}
	}
	scale := &autoscalingv1.Scale{}
	err := rt.Client.SubResource("scale").Get(ctx, workload, scale)
	if client.IgnoreNotFound(err) != nil {
		return 0, fmt.Errorf("reading the scale of %s %s: %w", kind, name, err)
	}
	return int(scale.Spec.Replicas), nil
}

// unsharded reports whether a pod is up that need not be a member.
func (rt *root) unsharded(v view, p *corev1.Pod) bool {
	o, policy := rt.Observe(p.Spec.NodeName, string(p.UID)), v.world.Compiled.Policies[p.UID]
	return status.PodReady(p) && policy.PodPolicy != nil && policy.Refuse == "" && policy.Sharding == nil && o.Connected && o.Version == policy.Version
}

// health of a member. Only the API tells that one is down: its agent may be away,
// or slow, while it serves.
func (rt *root) health(v view, m handover.Member) handover.Health {
	o := rt.Observe(m.Node, m.UID)
	switch {
	case !isThere(v, m):
		return handover.Unknown
	case !status.PodReady(v.all[m.UID]):
		return handover.Down
	case serves(v, m, o) && o.Connected && o.Version == v.world.Compiled.Policies[types.UID(m.UID)].GetVersion():
		return handover.Up
	}
	return handover.Unknown
}

func isThere(v view, m handover.Member) bool {
	pod := v.all[m.UID]
	return pod != nil && pod.DeletionTimestamp == nil && !compile.Ended(pod)
}
