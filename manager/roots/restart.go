package roots

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

const (
	// refusedFor is how long a refused eviction is not asked for again.
	refusedFor = 10 * time.Second
	// backWithin is how long the successor of an evicted pod is waited for. If none
	// comes by then, there is to be none: the workload was scaled down.
	backWithin = 2 * time.Minute
)

// restarting is what is known of the evictions of stale members.
type restarting struct {
	evicted string    // uid of the last
	members int       // there were before it
	at      time.Time // it was asked for
	retry   time.Time // of a refused one
	why     string    // what is under way, or keeps it, for people
}

// restart evicts the next stale member, if one may go now.
func (rt *root) restart(ctx context.Context, v view, now time.Time) error {
	if v.config.DeletionTimestamp != nil || v.problem != nil {
		return nil
	}
	uid := rt.mayRestart(v, now)
	pod := v.all[uid]
	if uid == "" {
		if now.After(rt.retry) {
			rt.why = ""
		}
		return nil
	}
	if now.Before(rt.retry) || uid == rt.evicted && now.Sub(rt.at) < backWithin {
		return nil
	}
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	}
	err := rt.Client.SubResource("eviction").Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}, eviction)
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil // it is gone already
	case apierrors.IsTooManyRequests(err):
		rt.retry = now.Add(refusedFor)
		rt.why = fmt.Sprintf("pod %s is to be restarted, and may not be evicted now: %v", pod.Name, err)
		return nil
	case err != nil:
		return fmt.Errorf("evicting pod %s: %w", pod.Name, err)
	}
	rt.evicted, rt.at, rt.members = uid, now, rt.living(v)
	rt.why = fmt.Sprintf("pod %s is being restarted", pod.Name)
	rt.Recorder.Eventf(v.config, pod, corev1.EventTypeNormal, "Restarting", "Evict", "pod %s is restarted, for it is of another shard now or holds objects in its caches that are", pod.Name)
	return nil
}

func (rt *root) mayRestart(v view, now time.Time) (uid string) {
	wanted := rt.living(v)
	if now.Sub(rt.at) < backWithin {
		wanted = max(wanted, rt.members)
	}
	return rt.state.Restarts(wanted,
		func(uid string) handover.Health { return rt.health(v, rt.state.Members[uid]) },
		func(uid string) bool { return rt.Observe(rt.state.Members[uid].Node, uid).LockHolder })
}

// health of a member. Only the API tells that one is down: its agent may be away,
// or slow, while it serves.
func (rt *root) health(v view, m handover.Member) handover.Health {
	o := rt.Observe(m.Node, m.UID)
	switch {
	case !isThere(v, m):
		return handover.Unknown
	case !isReady(v.all[m.UID]):
		return handover.Down
	case serves(v, m, o) && o.Connected && o.Version == v.world.Compiled.Policies[types.UID(m.UID)].GetVersion():
		return handover.Up
	}
	return handover.Unknown
}

// living are the members that are there.
func (rt *root) living(v view) (n int) {
	for _, m := range rt.state.Members {
		if isThere(v, m) {
			n++
		}
	}
	return n
}

func isThere(v view, m handover.Member) bool {
	pod := v.all[m.UID]
	return pod != nil && pod.DeletionTimestamp == nil && !compile.Ended(pod)
}
