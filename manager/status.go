package manager

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// keepStatus writes the status of every configuration that has a new one.
func (w *world) keepStatus(ctx context.Context) error {
	c := w.Compiled.Load()
	if c == nil {
		return nil
	}
	if w.since.IsZero() {
		w.since = time.Now()
	}
	w.countPolicies(c)
	countUnready(c.Configs)
	leaders := w.lead(ctx, c)
	wanted := func(uid string) string { return c.Policies[types.UID(uid)].GetVersion() }
	var errs []error
	statuses := map[types.UID]*writtenStatus{}
	for _, shard := range c.Shards {
		if shard.Config == nil || shard.Config.Spec.Root != nil {
			continue // there is no object yet, or the roots loop writes it
		}
		// The spec is the one compiled; the status the newest known.
		current := &v1alpha1.ShardingConfig{}
		err := w.cache.Get(ctx, shard.NamespacedName, current)
		if apierrors.IsNotFound(err) || err == nil && (current.UID != shard.Config.UID || current.Generation != shard.Config.Generation) {
			continue // the policies loop will be here soon
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		last := w.statuses[current.UID].since(current)
		statuses[current.UID] = last
		current = last.object
		shard.Config = current
		known, obstacle := w.surveyHandWritten(shard, c.Configs)
		next := status.Of(status.Input{
			Shard:    shard,
			Locks:    known,
			Obstacle: obstacle,
			Leader:   leaders[shard.String()],
			Wanted:   wanted,
			Observe:  w.push.Observe,
			Stamping: w.sweeper.Status(current),
			Now:      time.Now(),
			Since:    w.since,
		})
		if equality.Semantic.DeepEqual(current.Status, next) {
			continue
		}
		before := current.Status
		updated := current.DeepCopy()
		updated.Status = next
		if err := w.live.Status().Update(ctx, updated); err != nil {
			if !apierrors.IsNotFound(err) {
				errs = append(errs, fmt.Errorf("status of ShardingConfig %s/%s: %w", current.Namespace, current.Name, err))
			}
			continue
		}
		last.replaced, last.object = append(last.replaced, current.ResourceVersion), updated
		w.tell(updated, before, next)
	}
	w.statuses = statuses
	return errors.Join(errs...)
}

// writtenStatus is a configuration with the status that this leader wrote last.
type writtenStatus struct {
	object *v1alpha1.ShardingConfig
	// replaced are the resource versions that the writes replaced. The cache may still
	// have one of them, on which another write would conflict.
	replaced []string
}

// since returns what is known of an object, given what the cache has.
func (s *writtenStatus) since(cached *v1alpha1.ShardingConfig) *writtenStatus {
	if s == nil || !slices.Contains(s.replaced, cached.ResourceVersion) {
		return &writtenStatus{object: cached}
	}
	return s
}

// tell makes Events of the changes that matter.
func (w *world) tell(c *v1alpha1.ShardingConfig, before, after v1alpha1.ShardingConfigStatus) {
	news := func(kind string) (metav1.Condition, bool) {
		is := meta.FindStatusCondition(after.Conditions, kind)
		was := meta.FindStatusCondition(before.Conditions, kind)
		if is == nil || is.Status != metav1.ConditionTrue {
			return metav1.Condition{}, false
		}
		return *is, was == nil || was.Status != is.Status || was.Reason != is.Reason || was.Message != is.Message
	}
	if is, new := news(v1alpha1.ConditionLeaderMissing); new {
		w.recorder.Eventf(c, nil, corev1.EventTypeWarning, "LeaderMissing", "Lead", "%s", status.Note(is.Message))
	}
	if is, new := news(v1alpha1.ConditionDegraded); new {
		w.recorder.Eventf(c, nil, corev1.EventTypeWarning, is.Reason, "Compile", "%s", status.Note(is.Message))
	}
	if is, _ := news(v1alpha1.ConditionReady); is.Status == metav1.ConditionTrue && !meta.IsStatusConditionTrue(before.Conditions, v1alpha1.ConditionReady) {
		w.recorder.Eventf(c, nil, corev1.EventTypeNormal, is.Reason, "Compile", "%s", status.Note(is.Message))
	}
}

// countUnready counts the configurations that users wrote and that are not Ready.
func countUnready(configs []*v1alpha1.ShardingConfig) {
	metrics.NotReady.Reset()
	for _, c := range configs {
		ready := meta.FindStatusCondition(c.Status.Conditions, v1alpha1.ConditionReady)
		if !compile.Derived(c) && ready != nil && ready.Status != metav1.ConditionTrue {
			metrics.NotReady.WithLabelValues(c.Namespace, c.Name, ready.Reason).Set(1)
		}
	}
}

func (w *world) countPolicies(c *controllers.Compiled) {
	states := map[string]int{"applied": 0, "pending": 0, "rejected": 0, "unscheduled": 0}
	for uid, p := range c.Policies {
		o := w.push.Observe(p.Node, string(uid))
		switch {
		case p.Node == "":
			states["unscheduled"]++
		case o.Nacked == p.Version:
			states["rejected"]++
		case o.Version == p.Version:
			states["applied"]++
		default:
			states["pending"]++
		}
	}
	for s, n := range states {
		metrics.Policies.WithLabelValues(s).Set(float64(n))
	}
	metrics.UnappliedPods.Set(float64(states["pending"] + states["rejected"]))
}
