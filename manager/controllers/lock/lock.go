// Package lock acquires, renews and releases the locks that operators elect their leaders by.
package lock

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
)

// membersGone is how long a hand-written configuration must have no members before its locks are
// released: a pod may be being replaced.
const membersGone = 30 * time.Second

// Controller runs the rounds of a Keeper. Nothing else runs on its queue, so that renewals
// never wait.
type Controller struct {
	Keeper *locks.Keeper
	Roots  *roots.Roots
	Push   *push.Server
	State  *controllers.State
	Log    *slog.Logger

	overlaps overlaps
	// emptySince is since when hand-written configurations, by uid, have no members.
	emptySince map[types.UID]time.Time
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "locks", Reconcile: r.Reconcile, Debounce: controllers.DebounceAcks, Resync: locks.Every,
		On: []controllers.Source{&r.State.Changed.Demands},
	}
}

// Reconcile acquires, renews and releases the locks that configurations demand.
func (r *Controller) Reconcile(ctx context.Context) error {
	l := r.State.Listed.Load()
	if l == nil {
		return nil
	}
	demands, ok := r.Roots.Demands()
	if !ok {
		return nil // it is not known yet whether members of roots act
	}
	demands = slices.Concat(demands, r.handWrittenDemands(l, time.Now()))
	nobodyActs := func(c types.NamespacedName) bool { return r.nobodyActs(l, c) }
	changed, err := r.Keeper.Round(ctx, demands, nobodyActs, r.overlaps.round(ctx, l, nobodyActs).overlap)
	if err != nil {
		r.Log.Warn("failed to search for unneeded locks", "error", err) // renewals must not wait
	}
	if changed || !r.State.LocksRead.Swap(true) {
		r.State.Changed.Locks.Notify()
	}
	return nil
}

// handWrittenDemands returns the demands of hand-written configurations while they have members:
// all named locks together, and each discovered lock.
func (r *Controller) handWrittenDemands(l *controllers.Listed, now time.Time) (out []locks.Demand) {
	emptySince := map[types.UID]time.Time{}
	pods := map[string][]*corev1.Pod{} // by namespace
	for _, p := range l.Pods {
		pods[p.Namespace] = append(pods[p.Namespace], p)
	}
	for _, c := range l.Configs {
		if !compile.HandWritten(c) || compile.Shadows(c) {
			continue
		}
		config := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
		// Before a release, rounds have watched for membersGone: members that are seen meanwhile
		// wait until a round has asked for the lock again.
		one := locks.Demand{Config: config, Mode: locks.Acquire, Accounts: accountsOf(pods[c.Namespace], c), Asked: 1}
		if len(one.Accounts) == 0 {
			since := collect.Since(r.emptySince, c.UID, now)
			emptySince[c.UID] = since
			if one.Mode, one.Asked = locks.Watch, 0; now.Sub(since) >= membersGone && r.nobodyActs(l, config) {
				one.Mode = locks.Release
			}
		} else if r.holdsSome(c) && !r.nobodyActs(l, config) {
			one.Mode = locks.Keep // members may act
		}
		named := compile.NamedLocks(c)
		found := one
		if found.Mode == locks.Acquire {
			found.Mode = locks.Keep
		}
		for _, name := range compile.OperatorLocks(c, c.Status.Locks) {
			lock := locks.LockOf(name, c.Status.Locks)
			if slices.Contains(named, name) {
				one.Locks = append(one.Locks, lock)
			} else {
				found.Locks = append(found.Locks, lock)
			}
		}
		out = append(out, one, found)
	}
	r.emptySince = emptySince
	return out
}

// holdsSome reports whether the mesh holds a lock that a configuration names.
func (r *Controller) holdsSome(c *v1alpha1.ShardingConfig) bool {
	return slices.ContainsFunc(compile.NamedLocks(c), func(name types.NamespacedName) bool {
		s, _ := r.Keeper.States(client.ObjectKeyFromObject(c))(name)
		return s.Held
	})
}

// accountsOf returns the ServiceAccounts of the members of a hand-written configuration, which are
// among the pods of its namespace.
func accountsOf(pods []*corev1.Pod, c *v1alpha1.ShardingConfig) (out []string) {
	selects, problem := compile.Selects(c)
	if problem != nil {
		return nil
	}
	for _, p := range pods {
		if !compile.Labelled(p) || compile.Ended(p) || p.Annotations[v1alpha1.TrustAnnotation] == "" || !selects(p) {
			continue
		}
		if account := compile.AccountOf(p); !slices.Contains(out, account) {
			out = append(out, account)
		}
	}
	return out
}

// nobodyActs reports whether no pod acts for a configuration any more, which may have been
// deleted. l is the list that was searched for the configuration.
func (r *Controller) nobodyActs(l *controllers.Listed, config types.NamespacedName) bool {
	c := r.State.Compiled.Load()
	if c == nil || c.Listed != l {
		return false // the policies are older than l
	}
	return roots.NobodyActs(config.Namespace, c.Policies, r.Push.Removed(), r.Push.Observe)
}

// Reviewer checks permissions at the apiserver.
type Reviewer struct{ Kube kubernetes.Interface }

// MayUpdate reports whether a ServiceAccount may update a lock's object of a resource, such as
// [locks.Leases].
func (r Reviewer) MayUpdate(ctx context.Context, account types.NamespacedName, resource string, lock types.NamespacedName) (bool, error) {
	return r.may(ctx, "update", account, resource, lock)
}

// MayLead reports whether a ServiceAccount may read and update a Lease. Roles may allow one for
// all locks, and the other for a lock that they name.
func (r Reviewer) MayLead(ctx context.Context, account, lock types.NamespacedName) (bool, error) {
	if may, err := r.may(ctx, "update", account, locks.Leases, lock); err != nil || !may {
		return false, err
	}
	return r.may(ctx, "get", account, locks.Leases, lock)
}

func (r Reviewer) may(ctx context.Context, verb string, account types.NamespacedName, resource string, lock types.NamespacedName) (bool, error) {
	group := ""
	if resource == locks.Leases {
		group = coordinationv1.GroupName
	}
	review, err := r.Kube.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User:   serviceaccount.MakeUsername(account.Namespace, account.Name),
			Groups: append(serviceaccount.MakeGroupNames(account.Namespace), user.AllAuthenticated),
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: lock.Namespace, Name: lock.Name, Verb: verb, Group: group, Resource: resource,
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("checking the permissions of ServiceAccount %s: %w", account, err)
	}
	return review.Status.Allowed, nil
}
