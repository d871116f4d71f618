// Package grant lets operators use the locks of their shards.
//
// Roles for leader election commonly name the operator's lock (resourceNames), so that the
// lock of a shard, which has another name, is forbidden to it. An account that may update the
// operator's lock may update those of its shards by a Role that names them.
package grant

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Prefix of the names of Roles and RoleBindings. An admission policy lets the manager write
// no others.
const Prefix = "ctrlmesh-lock-"

// askEvery is how long the answer to a question about permissions is believed, and how often
// Roles without a configuration are looked for.
const askEvery = time.Minute

// Controller writes the Roles.
type Controller struct {
	// Client reads and writes past any cache.
	Client client.Client
	// May reports whether a ServiceAccount may read and update a lock's Lease.
	May   func(ctx context.Context, account, lock types.NamespacedName) (bool, error)
	State *controllers.State
	Log   *slog.Logger

	answers map[question]answer
	swept   time.Time
	configs map[string]bool // at the last sweep
}

type question struct{ account, lock types.NamespacedName }

type answer struct {
	allowed bool
	at      time.Time
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "grants", Reconcile: r.Reconcile, Debounce: controllers.DebounceEvents, Resync: askEvery,
		On: []controllers.Source{&r.State.Compiled, r.State.Settings.When(otherAccess)},
	}
}

// otherAccess reports whether grantAccess has changed.
func otherAccess(before, after *platform.Settings) bool {
	return before == nil || before.Locks.GrantAccess != after.Locks.GrantAccess
}

// Reconcile grants what is missing, and publishes what could not be granted.
func (r *Controller) Reconcile(ctx context.Context) error {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	now := time.Now()
	maps.DeleteFunc(r.answers, func(_ question, a answer) bool { return now.Sub(a.at) >= askEvery })
	forbidden := map[types.UID]string{}
	var errs []error
	for _, n := range needs(c.Shards) {
		missing, err := r.missing(ctx, n, now)
		if err == nil && len(missing.locks) > 0 {
			err = r.grant(ctx, n, missing)
		}
		if why, ok := errors.AsType[*refusal](err); ok {
			forbidden[n.config.UID] = why.Error()
			continue
		}
		errs = append(errs, err)
	}
	if before := r.State.ForbiddenLocks.Load(); before == nil || !maps.Equal(*before, forbidden) {
		r.State.ForbiddenLocks.Store(&forbidden)
	}
	configs := namesOf(c.Configs)
	if now.Sub(r.swept) >= askEvery || !maps.Equal(configs, r.configs) {
		errs = append(errs, r.sweep(ctx, configs))
		r.swept, r.configs = now, configs
	}
	return errors.Join(errs...)
}

// missing returns the locks that accounts may not use although they may use the operator's own. It
// asks about the first locks.MaxAccounts, so that other configurations have their turn.
func (r *Controller) missing(ctx context.Context, n *need, now time.Time) (missing access, err error) {
	accounts := slices.Sorted(maps.Keys(n.shards))
	for _, a := range accounts[:min(len(accounts), locks.MaxAccounts)] {
		for _, shard := range slices.Sorted(maps.Keys(n.shards[a])) {
			own, err := r.may(ctx, n.of(a), n.in(n.shards[a][shard]), now)
			if err != nil {
				return missing, err
			}
			if !own { // it may not lead at all, which is not for the mesh to change
				continue
			}
			if may, err := r.may(ctx, n.of(a), n.in(shard), now); err != nil || may {
				if err != nil {
					return missing, err
				}
				continue
			}
			missing.locks = append(missing.locks, shard)
			missing.accounts = append(missing.accounts, a)
		}
	}
	missing.locks, missing.accounts = unique(missing.locks), unique(missing.accounts)
	return missing, nil
}

func unique[T ~string](in []T) []T { return slices.Compact(slices.Sorted(slices.Values(in))) }

func (r *Controller) may(ctx context.Context, account, lock types.NamespacedName, now time.Time) (bool, error) {
	q := question{account, lock}
	if a, ok := r.answers[q]; ok {
		return a.allowed, nil
	}
	allowed, err := r.May(ctx, account, lock)
	if err != nil {
		return false, err
	}
	if r.answers == nil {
		r.answers = map[question]answer{}
	}
	r.answers[q] = answer{allowed, now}
	return allowed, nil
}

// refusal is why access cannot be granted, and what the administrator can do.
type refusal struct {
	n       *need
	missing access
	cause   string
}

func (e *refusal) Error() string {
	locks := collect.Map(e.missing.locks, func(l string) string { return e.n.in(l).String() })
	return fmt.Sprintf("the operator may read and update its own lock, but not %s, so that its shards have no leader (%s): run %s",
		strings.Join(locks, ", "), e.cause, e.n.commands(e.missing))
}

// grant creates the locks and permits their update. client-go creates a lock that it does not
// find, which a Role cannot permit by name.
func (r *Controller) grant(ctx context.Context, n *need, missing access) error {
	if !r.State.Settings.Load().Locks.GrantAccess {
		return &refusal{n, missing, platform.LocksGrantAccess + " is false"}
	}
	for _, name := range missing.locks {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: n.namespace, Name: name}}
		if err := r.Client.Create(ctx, lease); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("creating lock %s: %w", n.in(name), err)
		}
	}
	err := r.write(ctx, n, missing)
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || errors.Is(err, errForeign) {
		return &refusal{n, missing, err.Error()}
	}
	if err != nil {
		return err
	}
	for _, a := range missing.accounts { // until the apiserver is asked again
		for _, l := range missing.locks {
			r.answers[question{n.of(a), n.in(l)}] = answer{true, time.Now()}
		}
	}
	r.Log.Info("permitted an operator to use the locks of its shards", "config", n.config.Namespace+"/"+n.config.Name, "namespace", n.namespace, "locks", missing.locks)
	return nil
}

var errForeign = errors.New("an object with its name exists that is not the mesh's")

// write adds what is missing to the Role and RoleBinding of a configuration.
func (r *Controller) write(ctx context.Context, n *need, missing access) error {
	meta := metav1.ObjectMeta{Namespace: n.namespace, Name: n.name()}
	role := &rbacv1.Role{ObjectMeta: meta}
	_, err := controllerutil.CreateOrUpdate(ctx, r.Client, role, func() error {
		names := slices.Clone(missing.locks)
		for _, rule := range role.Rules {
			names = append(names, rule.ResourceNames...)
		}
		role.Rules = []rbacv1.PolicyRule{{
			APIGroups: []string{coordinationv1.GroupName}, Resources: []string{"leases"}, ResourceNames: unique(names), Verbs: []string{"get", "update", "patch"},
		}}
		return n.mark(role)
	})
	if err != nil {
		return fmt.Errorf("writing Role %s/%s: %w", meta.Namespace, meta.Name, err)
	}
	binding := &rbacv1.RoleBinding{ObjectMeta: meta}
	_, err = controllerutil.CreateOrUpdate(ctx, r.Client, binding, func() error {
		binding.RoleRef = rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: meta.Name}
		for _, a := range missing.accounts {
			s := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: n.config.Namespace, Name: string(a)}
			if !slices.Contains(binding.Subjects, s) {
				binding.Subjects = append(binding.Subjects, s)
			}
		}
		return n.mark(binding)
	})
	return failure.Wrap(err, "writing RoleBinding %s/%s", meta.Namespace, meta.Name)
}

// mark labels an object as the mesh's. It fails if the object exists and is not.
func (n *need) mark(o client.Object) error {
	if o.GetResourceVersion() != "" && o.GetLabels()[v1alpha1.LockAccessLabel] != "true" {
		return errForeign
	}
	o.SetLabels(map[string]string{v1alpha1.LockAccessLabel: "true"})
	o.SetAnnotations(map[string]string{v1alpha1.LockHolderAnnotation: n.config.Namespace + "/" + n.config.Name})
	return nil
}

// namesOf returns the configurations that users wrote, as namespace/name.
func namesOf(configs []*v1alpha1.ShardingConfig) map[string]bool {
	names := map[string]bool{}
	for _, c := range configs {
		if !compile.Derived(c) {
			names[c.Namespace+"/"+c.Name] = true
		}
	}
	return names
}

// sweep deletes the Roles and RoleBindings of configurations that do not exist.
func (r *Controller) sweep(ctx context.Context, configs map[string]bool) error {
	var errs []error
	for _, kind := range []string{"RoleBinding", "Role"} {
		var list metav1.PartialObjectMetadataList
		list.SetGroupVersionKind(rbacv1.SchemeGroupVersion.WithKind(kind + "List"))
		if err := r.Client.List(ctx, &list, client.MatchingLabels{v1alpha1.LockAccessLabel: "true"}); err != nil {
			errs = append(errs, fmt.Errorf("listing the %ss for locks: %w", kind, err))
			continue
		}
		for i := range list.Items {
			o := &list.Items[i]
			if configs[o.Annotations[v1alpha1.LockHolderAnnotation]] {
				continue
			}
			o.SetGroupVersionKind(rbacv1.SchemeGroupVersion.WithKind(kind))
			if err := r.Client.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
				errs = append(errs, fmt.Errorf("deleting %s %s/%s: %w", kind, o.Namespace, o.Name, err))
			}
		}
	}
	return errors.Join(errs...)
}
