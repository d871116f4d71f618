// Package status writes the statuses of ShardingConfigs that are one shard. Those of roots
// are written by package roots, together with the state that they contain.
package status

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
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// Controller writes statuses and the Events of their changes.
type Controller struct {
	// Client writes; Cache has the newest statuses.
	Client   client.Client
	Cache    client.Reader
	Recorder events.EventRecorder
	Keeper   *locks.Keeper
	Sweeper  *label.Sweeper
	Push     *push.Server
	State    *controllers.State

	since time.Time // of the first run
	// written are the statuses that were written last, by uid.
	written map[types.UID]*writtenStatus
	// leaderless is since when hand-written shards, as namespace/name, have had no leader.
	leaderless map[string]time.Time
	metrics    status.LeaderMetrics // of hand-written shards
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	changed := &r.State.Changed
	return controllers.Spec{
		Name: "status", Reconcile: r.Reconcile, Debounce: controllers.DebounceStatus, Resync: 10 * time.Second, Rests: true, Next: r.settles,
		On: []controllers.Source{&r.State.Compiled, &r.State.MissingBundles, &changed.Agents, &changed.Locks, &changed.Stamping},
	}
}

// settles returns when what the last leader wrote about pods does not apply any more.
func (r *Controller) settles() time.Time {
	if end := r.since.Add(status.Grace); time.Now().Before(end) {
		return end
	}
	return time.Time{}
}

// Reconcile writes the status of every configuration that has a new one.
func (r *Controller) Reconcile(ctx context.Context) error {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	if r.since.IsZero() {
		r.since = time.Now()
	}
	r.countPolicies(c)
	countUnready(c.Configs)
	newest, err := r.newest(ctx, c)
	errs := []error{err}
	w := round{c, r.lead(ctx, c), r.transfers(c, newest)}
	for _, shard := range c.Shards {
		if shard.Config != nil && newest[shard.Config.UID] != nil {
			errs = append(errs, r.write(ctx, w, shard, newest[shard.Config.UID]))
		}
	}
	r.written = newest
	return errors.Join(errs...)
}

// round is what the statuses of one run follow from.
type round struct {
	*controllers.Compiled
	leaders   map[string]status.Leader
	transfers transfers
}

// newest returns the configurations whose statuses are written here, by uid, as they are now.
// Those that changed since they were compiled are left out.
func (r *Controller) newest(ctx context.Context, c *controllers.Compiled) (map[types.UID]*writtenStatus, error) {
	out := map[types.UID]*writtenStatus{}
	var errs []error
	for _, shard := range c.Shards {
		if shard.Config == nil || shard.Config.Spec.Root != nil {
			continue // there is no object yet, or package roots writes it
		}
		// The spec is the one compiled; the status the newest known.
		current := &v1alpha1.ShardingConfig{TypeMeta: shard.Config.TypeMeta}
		switch err := r.Cache.Get(ctx, shard.NamespacedName, current); {
		case apierrors.IsNotFound(err), err == nil && (current.UID != shard.Config.UID || current.Generation != shard.Config.Generation):
			// It will be compiled soon.
		case err != nil:
			errs = append(errs, err)
		default:
			out[current.UID] = r.written[current.UID].since(current)
		}
	}
	return out, errors.Join(errs...)
}

// write writes the status of a shard if it has a new one.
func (r *Controller) write(ctx context.Context, w round, shard compile.Shard, last *writtenStatus) error {
	current := last.object
	shard.Config = current
	known, obstacle := r.surveyHandWritten(shard, w.Compiled)
	acting, waits := w.transfers.record(current)
	in := status.Input{Shard: shard, Leader: w.leaders[shard.String()], Acting: acting, Waits: waits, Common: status.Common{
		Locks: known, Obstacle: obstacle, Stamping: r.Sweeper.Status(current), MissingBundle: r.State.MissingBundle(current.Namespace),
		Wanted:  func(uid string) string { return w.Policies[types.UID(uid)].GetVersion() },
		Observe: r.Push.Observe, Now: time.Now(), Since: r.since,
	}}
	next := status.Of(in)
	if equality.Semantic.DeepEqual(current.Status, next) || in.Awaits(next) {
		return nil
	}
	before := current.Status
	updated := current.DeepCopy()
	updated.Status = next
	if err := r.Client.Status().Update(ctx, updated); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("writing the status of %s: %w", origin.Of(current), err)
	}
	last.replaced, last.object = append(last.replaced, current.ResourceVersion), updated
	r.report(updated, before, next)
	return nil
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

// report sends Events of the changes that matter.
func (r *Controller) report(c *v1alpha1.ShardingConfig, before, after v1alpha1.ShardingConfigStatus) {
	news := func(kind string) (metav1.Condition, bool) {
		is := meta.FindStatusCondition(after.Conditions, kind)
		was := meta.FindStatusCondition(before.Conditions, kind)
		if is == nil || is.Status != metav1.ConditionTrue {
			return metav1.Condition{}, false
		}
		return *is, was == nil || was.Status != is.Status || was.Reason != is.Reason || was.Message != is.Message
	}
	if is, new := news(v1alpha1.ConditionLeaderMissing); new {
		r.Recorder.Eventf(c, nil, corev1.EventTypeWarning, "LeaderMissing", "Lead", "%s", status.Note(is.Message))
	}
	if is, new := news(v1alpha1.ConditionDegraded); new {
		r.Recorder.Eventf(c, nil, corev1.EventTypeWarning, is.Reason, "Compile", "%s", status.Note(is.Message))
	}
	if is, _ := news(v1alpha1.ConditionReady); is.Status == metav1.ConditionTrue && !meta.IsStatusConditionTrue(before.Conditions, v1alpha1.ConditionReady) {
		r.Recorder.Eventf(c, nil, corev1.EventTypeNormal, is.Reason, "Compile", "%s", status.Note(is.Message))
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

func (r *Controller) countPolicies(c *controllers.Compiled) {
	states := map[string]int{"applied": 0, "pending": 0, "rejected": 0, "unscheduled": 0}
	for uid, p := range c.Policies {
		o := r.Push.Observe(p.Node, string(uid))
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

// surveyHandWritten finds out which locks the members of a hand-written shard have, and
// what keeps them from acting.
func (r *Controller) surveyHandWritten(shard compile.Shard, c *controllers.Compiled) ([]v1alpha1.LockStatus, *locks.Obstacle) {
	if shard.Root != nil || !compile.HandWritten(shard.Config) || shard.Problem != nil {
		return nil, nil
	}
	sightings := locks.Sightings(shard.Members, r.Push.Observe)
	known, obstacle := locks.Survey(shard.Config, shard.Config.Status.Locks, sightings, c.Configs, r.Keeper)
	if u := c.Unknown[shard.Config.UID]; u.Message != "" && !u.Undetermined {
		return known, &locks.Obstacle{Reason: v1alpha1.ReasonUnknownResource, Message: u.Message + "; members are in standby until the apiserver serves it"}
	}
	if obstacle == nil && len(shard.Members) > 0 && !compile.Shadows(shard.Config) {
		obstacle = locks.Unheld(known, r.Keeper.States(shard.NamespacedName), func(identity string) string { return fmt.Sprintf("%q", identity) })
	}
	if forbidden := r.State.ForbiddenLocks.Load(); obstacle == nil && forbidden != nil && (*forbidden)[shard.Config.UID] != "" {
		obstacle = &locks.Obstacle{Reason: v1alpha1.ReasonLockForbidden, Message: (*forbidden)[shard.Config.UID]}
	}
	return known, obstacle
}

// lead finds out who leads the hand-written shards that are to act, by namespace/name.
func (r *Controller) lead(ctx context.Context, c *controllers.Compiled) map[string]status.Leader {
	var shards []status.Led
	series := map[string]metrics.Shard{}
	for _, s := range c.Shards {
		if s.Config == nil || s.Root != nil || s.Problem != nil || !compile.HandWritten(s.Config) || len(s.Members) == 0 {
			continue
		}
		led := status.Led{Name: s.String(), Config: s.NamespacedName, Locks: s.Locks, Listed: s.Config.Status.Locks}
		waits := false
		for _, p := range s.Members {
			policy := c.Policies[p.UID]
			o := r.Push.Observe(p.Spec.NodeName, string(p.UID))
			waits = waits || policy.GetSharding().GetStandby()
			led.Members = append(led.Members, status.LedMember{Name: p.Name, Account: compile.AccountOf(p), Ready: status.Serves(p, o), Observation: o})
		}
		if !waits {
			shards = append(shards, led)
			series[led.Name] = metrics.Shard{Namespace: s.Namespace, Config: s.Name, Name: s.Name}
		}
	}
	holder := func(namespace, name string) string { return roots.HolderOf(ctx, r.Client, namespace, name) }
	var leaders map[string]status.Leader
	leaders, r.leaderless = status.FindLeaders(shards, r.leaderless, holder, time.Now())
	counted := map[metrics.Shard]status.Leader{}
	for name, leader := range leaders {
		counted[series[name]] = leader
	}
	r.metrics.Set(counted)
	return leaders
}
