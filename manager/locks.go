package manager

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// membersGone is how long a hand-written configuration must be without members for its
// locks to be released: a pod may just be replaced.
const membersGone = 30 * time.Second

// keepOperatorLocks acquires, renews and releases the operators' own locks.
func (w *world) keepOperatorLocks(ctx context.Context) error {
	l := w.Listed.Load()
	if l == nil {
		return nil
	}
	demands, ok := w.roots.Demands()
	if !ok {
		return nil // whether members of roots act is not known yet
	}
	demands = slices.Concat(demands, w.handWrittenDemands(l, time.Now()))
	changed, err := w.locks.Round(ctx, demands, func(c types.NamespacedName) bool { return w.nobodyActs(l, c) })
	if err != nil {
		w.Log.Warn("failed to look for locks that nobody needs", "error", err) // renewals must not wait
	}
	if changed || !w.LocksKnown.Swap(true) {
		w.Changed.Locks.Notify()
	}
	return nil
}

// handWrittenDemands are what hand-written configurations ask for while they have
// members: all locks that they name together, and each one that was discovered.
func (w *world) handWrittenDemands(l *controllers.Listed, now time.Time) (out []locks.Demand) {
	emptySince := map[types.UID]time.Time{}
	for _, c := range l.Configs {
		if !handWritten(c) {
			continue
		}
		config := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
		mode, accounts := locks.Acquire, accountsOf(l.Pods, c)
		if len(accounts) == 0 {
			since, empty := w.emptySince[c.UID]
			if !empty {
				since = now
			}
			emptySince[c.UID] = since
			if mode = locks.Watch; now.Sub(since) >= membersGone && w.nobodyActs(l, config) {
				mode = locks.Release
			}
		} else if w.holdsSome(c) && !w.nobodyActs(l, config) {
			mode = locks.Keep // members may act
		}
		named := compile.NamedLocks(c)
		one := locks.Demand{Config: config, Mode: mode, Accounts: accounts}
		found := one
		if found.Mode == locks.Acquire {
			found.Mode = locks.Keep
		}
		for _, name := range compile.OperatorLocks(c, c.Status.Locks) {
			lock := locks.Lock{NamespacedName: name, Resources: resourcesOf(c.Status.Locks, name)}
			if slices.Contains(named, name) {
				one.Locks = append(one.Locks, lock)
			} else {
				found.Locks = append(found.Locks, lock)
			}
		}
		out = append(out, one, found)
	}
	w.emptySince = emptySince
	return out
}

// holdsSome reports whether the mesh holds a lock that a configuration names.
func (w *world) holdsSome(c *v1alpha1.ShardingConfig) bool {
	return slices.ContainsFunc(compile.NamedLocks(c), func(name types.NamespacedName) bool {
		s, _ := w.locks.State(name)
		return s.Held
	})
}

// handWritten reports whether a configuration names its shard's pods itself, and divides
// anything.
func handWritten(c *v1alpha1.ShardingConfig) bool {
	return c.Spec.Root == nil && !compile.Derived(c) && !compile.PassesThrough(c) && !c.Spec.DryRun
}

func resourcesOf(known []v1alpha1.LockStatus, name types.NamespacedName) []string {
	for _, l := range known {
		if l.Namespace == name.Namespace && l.Name == name.Name {
			return l.Resources
		}
	}
	return nil
}

// accountsOf returns the ServiceAccounts of the members of a hand-written configuration.
func accountsOf(pods []*corev1.Pod, c *v1alpha1.ShardingConfig) (out []string) {
	selects, problem := compile.Selects(c)
	if problem != nil {
		return nil
	}
	for _, p := range pods {
		if p.Namespace != c.Namespace || !compile.Labelled(p) || compile.Ended(p) || p.Annotations[v1alpha1.TrustAnnotation] == "" || !selects(p) {
			continue
		}
		if account := cmp.Or(p.Spec.ServiceAccountName, "default"); !slices.Contains(out, account) {
			out = append(out, account)
		}
	}
	return out
}

// nobodyActs reports whether no pod acts for a configuration any more, which may have
// been deleted: the agent of each pod on the mesh in its namespace has confirmed the
// pod's present policy. l is what the configuration was looked for in.
func (w *world) nobodyActs(l *controllers.Listed, config types.NamespacedName) bool {
	c := w.Compiled.Load()
	if c == nil || c.Listed != l {
		return false // policies are older than that
	}
	for uid, p := range c.Policies {
		if p.GetNamespace() == config.Namespace && p.Node != "" && w.push.Observe(p.Node, string(uid)).Version != p.GetVersion() {
			return false
		}
	}
	return true
}

// withHandWritten adds what is known of hand-written configurations: whether their
// members must be in standby, because a pod outside the mesh may lead. It is not ok
// before the locks were looked at.
func (w *world) withHandWritten(known map[types.NamespacedName]compile.Root, configs []*v1alpha1.ShardingConfig) (ok bool) {
	for _, c := range configs {
		if !handWritten(c) || len(compile.OperatorLocks(c, c.Status.Locks)) == 0 {
			continue
		}
		if !w.LocksKnown.Load() {
			return false
		}
		one := compile.Root{}
		one.Locks, _ = locks.Survey(c, c.Status.Locks, nil, nil, w.locks.State)
		for _, name := range compile.NamedLocks(c) {
			if s, _ := w.locks.State(name); !s.Held {
				one.Standby = fmt.Sprintf("the mesh does not hold lock %s, so a pod outside the mesh may lead", name)
				break
			}
		}
		known[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}] = one
	}
	return true
}

// mayUpdate asks the API server whether a ServiceAccount may update a lock.
func (w *world) mayUpdate(ctx context.Context, account, lock types.NamespacedName) (bool, error) {
	review, err := w.kube.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User:   serviceaccount.MakeUsername(account.Namespace, account.Name),
			Groups: append(serviceaccount.MakeGroupNames(account.Namespace), user.AllAuthenticated),
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: lock.Namespace, Name: lock.Name, Verb: "update", Group: "coordination.k8s.io", Resource: "leases",
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("asking for the rights of ServiceAccount %s: %w", account, err)
	}
	return review.Status.Allowed, nil
}

// surveyHandWritten finds out which locks the members of a hand-written shard have, and
// what keeps them from leading.
func (w *world) surveyHandWritten(shard compile.Shard, configs []*v1alpha1.ShardingConfig) ([]v1alpha1.LockStatus, *locks.Obstacle) {
	if shard.Root != nil || !handWritten(shard.Config) || shard.Problem != nil {
		return nil, nil
	}
	var sightings []locks.Sighting
	for _, p := range shard.Members {
		for _, l := range w.push.Observe(p.Spec.NodeName, string(p.UID)).ObservedLocks {
			sightings = append(sightings, locks.Sighting{Pod: p, ObservedLock: l})
		}
	}
	known, obstacle := locks.Survey(shard.Config, shard.Config.Status.Locks, sightings, configs, w.locks.State)
	if obstacle == nil && len(shard.Members) > 0 {
		obstacle = locks.Unheld(known, w.locks.State, func(identity string) string { return fmt.Sprintf("%q", identity) })
	}
	return known, obstacle
}

// lead finds out who leads the hand-written shards that are to act, by namespace/name.
func (w *world) lead(ctx context.Context, c *controllers.Compiled) map[string]status.Leader {
	var shards []status.Led
	names := map[string]types.NamespacedName{}
	elects := map[string]bool{}
	for _, s := range c.Shards {
		if s.Config == nil || s.Root != nil || s.Problem != nil || !handWritten(s.Config) || len(s.Members) == 0 {
			continue
		}
		led := status.Led{Name: s.String(), Locks: s.Locks, Known: s.Config.Status.Locks}
		waits := false
		for _, p := range s.Members {
			policy := c.Policies[p.UID]
			o := w.push.Observe(p.Spec.NodeName, string(p.UID))
			waits = waits || policy.GetSharding().GetStandby()
			led.Members = append(led.Members, status.LedMember{Name: p.Name, Ready: status.Serves(p, o), Observation: o})
		}
		if waits {
			continue
		}
		shards = append(shards, led)
		names[led.Name], elects[led.Name] = s.NamespacedName, len(s.Locks) > 0
	}
	before := w.led
	leaders := w.leaders.Round(shards, func(namespace, name string) string { return roots.HolderOf(ctx, w.live, namespace, name) }, time.Now())
	for name, l := range leaders {
		metrics.CountLeader(names[name].Namespace, names[name].Name, names[name].Name, elects[name] || l.Contends(), l.Pod != "" && l.Working, l.Ready)
	}
	for name, was := range before {
		if _, still := leaders[name]; !still {
			metrics.ForgetLeader(was.Namespace, was.Name, was.Name)
		}
	}
	w.led = names
	return leaders
}
