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
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// askAgain is the time after which a refused eviction is requested again.
const askAgain = 10 * time.Second

// evictions evicts the members of a root that must be replaced, one after the other.
type evictions struct {
	client   client.Client
	recorder events.EventRecorder

	evicted string    // uid of the pod that was evicted last
	name    string    // of the same pod
	at      time.Time // when its eviction was requested
	retry   time.Time // when a refused eviction may be requested again
	why     string    // what is in progress, or blocks it

	owed   int             // number of pods that were evicted since known was set
	known  map[string]bool // the workload's pods at that time, by uid
	scaled time.Time       // when the size of the workload was read
}

// restart evicts the next pod that must be replaced, if one may be evicted now.
func (e *evictions) restart(ctx context.Context, v view, state handover.State, locks []v1alpha1.LockStatus, now time.Time) error {
	if v.problem != nil && !compile.Withdrawn(v.config) {
		return nil
	}
	if err := e.forgive(ctx, v, now); err != nil {
		return err
	}
	uid, why := e.mayRestart(v, state, locks)
	pod := v.all[uid]
	if uid == "" {
		e.awaitSuccessor(v, now)
		return nil
	}
	if now.Before(e.retry) || uid == e.evicted && now.Sub(e.at) < askAgain {
		return nil
	}
	switch err := e.evict(ctx, pod); {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil // it was deleted
	case apierrors.IsTooManyRequests(err):
		e.retry = now.Add(askAgain)
		e.why = fmt.Sprintf("pod %s must be restarted, and may not be evicted now: %v", pod.Name, err)
		return nil
	case err != nil:
		return fmt.Errorf("evicting pod %s: %w", pod.Name, err)
	}
	if e.lacking(v) == 0 {
		e.owed, e.known = 0, map[string]bool{}
		for _, p := range v.pods {
			e.known[string(p.UID)] = true
		}
	}
	e.owed++
	e.evicted, e.name, e.at = uid, pod.Name, now
	e.why = fmt.Sprintf("pod %s is being restarted", pod.Name)
	e.recorder.Eventf(v.config, pod, corev1.EventTypeNormal, "Restarting", "Evict", "pod %s is restarted: %s", pod.Name, why)
	return nil
}

func (e *evictions) evict(ctx context.Context, pod *corev1.Pod) error {
	meta := metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}
	return e.client.SubResource("eviction").Create(ctx, &corev1.Pod{ObjectMeta: meta}, &policyv1.Eviction{
		ObjectMeta:    meta,
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	})
}

// awaitSuccessor sets why while no pod may be evicted.
func (e *evictions) awaitSuccessor(v view, now time.Time) {
	if now.After(e.retry) {
		e.why = ""
	}
	if e.lacking(v) > 0 {
		e.why = fmt.Sprintf("pod %s was evicted, and its successor does not exist yet", e.name)
	}
}

// mayRestart returns the pod that may be evicted now, and why it must be replaced.
func (e *evictions) mayRestart(v view, state handover.State, locks []v1alpha1.LockStatus) (uid, why string) {
	if compile.Withdrawn(v.config) && (state.Holds() || v.unreleased(locks)) {
		return "", "" // its successor could not lead yet
	}
	if p := e.misfit(v, state.Members); p != nil {
		return string(p.UID), "its clients trust the wrong CAs: pods in a shard must trust the mesh CA alone, pods without shards the cluster's CA too"
	}
	return state.Restarts(e.wanted(v, state.Members),
		func(uid string) handover.Health { return v.health(state.Members[uid]) },
		func(uid string) bool { return v.observe(state.Members[uid].Node, uid).LockHolder }), "it is in another shard now, or has objects of other shards in its caches"
}

// misfit returns the next misfit to evict: one after the other, and while all other pods are
// ready.
func (e *evictions) misfit(v view, members map[string]handover.Member) *corev1.Pod {
	candidates := v.misfits(members)
	if len(candidates) == 0 || e.lacking(v) > 0 {
		return nil
	}
	unready := collect.Filter(v.pods, func(p *corev1.Pod) bool { return !status.PodReady(p) })
	switch {
	case len(unready) == 0:
		return slices.MinFunc(candidates, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	case len(unready) == 1 && slices.Contains(candidates, unready[0]):
		return unready[0]
	}
	return nil
}

// wanted returns how many members must be ready before another one is evicted: all that
// exist, and the pods and successors that will join, as far as shards have room.
func (e *evictions) wanted(v view, assigned map[string]handover.Member) int {
	shards := layout.Shards(v.config.Spec.Root)
	room, open := 0, len(shards) == 0
	for _, s := range shards {
		room += s.Replicas
		open = open || s.Replicas == 0
	}
	members, coming := 0, e.lacking(v)
	for _, m := range assigned {
		if !v.exists(m) {
			continue
		}
		members++
		if slices.ContainsFunc(shards, func(s layout.Shard) bool { return s.Name == m.Shard }) {
			room--
		}
	}
	for _, p := range v.pods {
		if _, ok := assigned[string(p.UID)]; !ok && p.DeletionTimestamp == nil && !v.unsharded(p) {
			coming++
		}
	}
	if !open {
		coming = min(coming, max(room, 0))
	}
	return members + coming
}

// lacking returns how many evicted pods have no successor yet.
func (e *evictions) lacking(v view) int {
	n := e.owed
	for _, p := range v.pods {
		if !e.known[string(p.UID)] {
			n--
		}
	}
	return max(n, 0)
}

// forgive stops waiting for successors that will not be created, because the workload has been
// scaled down since.
func (e *evictions) forgive(ctx context.Context, v view, now time.Time) error {
	lacking := e.lacking(v)
	if lacking == 0 || now.Sub(e.at) < askAgain || now.Sub(e.scaled) < askAgain {
		return nil
	}
	e.scaled = now
	replicas, err := e.replicas(ctx, v)
	if err != nil {
		return err
	}
	for _, p := range v.pods {
		if p.DeletionTimestamp == nil {
			replicas--
		}
	}
	e.owed -= lacking - min(lacking, max(replicas, 0))
	return nil
}

// replicas returns the desired number of pods of all workloads of the root; workloads that do
// not exist count as 0. If the root selects its pods by label, its workloads are those of the
// pods that exist: the successor of a workload's only pod is then not waited for.
func (e *evictions) replicas(ctx context.Context, v view) (n int, err error) {
	workloads := map[layout.Workload]bool{}
	if target := layout.Target(v.config.Spec.Root); target.Name != "" {
		workloads[target] = true
	} else {
		for _, p := range v.pods {
			if w, ok := layout.WorkloadOf(p); ok {
				workloads[w] = true
			}
		}
	}
	for w := range workloads {
		meta := metav1.ObjectMeta{Namespace: v.config.Namespace, Name: w.Name}
		var workload client.Object = &appsv1.StatefulSet{ObjectMeta: meta}
		if w.Kind != layout.StatefulSet {
			workload = &appsv1.Deployment{ObjectMeta: meta}
		}
		scale := &autoscalingv1.Scale{}
		err := e.client.SubResource("scale").Get(ctx, workload, scale)
		if client.IgnoreNotFound(err) != nil {
			return 0, fmt.Errorf("reading the scale of %s: %w", w, err)
		}
		n += int(scale.Spec.Replicas)
	}
	return n, nil
}
