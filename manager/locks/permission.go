package locks

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// authorizedFor is how long an answer about the permission of pods to update a lock is cached.
const authorizedFor = time.Minute

// MaxAccounts bounds the ServiceAccounts of one configuration whose permissions are reviewed, so that
// others have their turn. The pods of an operator have one, or a few.
const MaxAccounts = 16

// permission is whether the mesh may have a lock for a configuration that does not name it, or is in
// another namespace. Otherwise a user could take any operator's lock by naming it: keep it from being
// acquired for the operator, or from being released to it. A pod could have any ConfigMap of its
// namespace kept from others, by pretending that it is a lock.
type permission struct {
	// denied is why not; nil if the mesh may.
	denied error
	asked  time.Time
}

// mayUpdate reports whether a ServiceAccount may update a lock's object of a resource.
type mayUpdate = func(ctx context.Context, account types.NamespacedName, resource string, lock types.NamespacedName) (bool, error)

// authorize checks the permission that a demand for the lock requires. A configuration for which the
// mesh holds the lock has it, and so has one whose shards may act since it was granted.
func (l *lock) authorize(ctx context.Context, may mayUpdate, d Demand, of Lock, now time.Time) {
	p := l.permissions[d.Config]
	granted := p != nil && p.denied == nil
	switch {
	case may == nil || l.Namespace == d.Config.Namespace && !of.Discovered || l.isHeldFor(d.Config):
		l.permissions[d.Config] = &permission{}
		return
	case d.Mode < Acquire || granted && (d.Mode == Keep || len(d.Accounts) == 0):
		return
	case p != nil && now.Sub(p.asked) < authorizedFor:
		return
	}
	denied, err := l.review(ctx, may, d, of)
	switch {
	case err != nil && granted:
	case err != nil:
		l.permissions[d.Config] = &permission{denied: err}
	case len(d.Accounts) == 0:
		l.permissions[d.Config] = &permission{denied: denied}
	default:
		l.permissions[d.Config] = &permission{denied, now}
	}
}

// review returns why no account of a demand may update the lock; nil if one may.
func (l *lock) review(ctx context.Context, may mayUpdate, d Demand, of Lock) (denied, err error) {
	if len(d.Accounts) > MaxAccounts {
		return fmt.Errorf("the pods of ShardingConfig %s have %d ServiceAccounts, more than %d, so the mesh does not ask which may update %s: let them share one", d.Config, len(d.Accounts), MaxAccounts, l.objectsOf(of)), nil
	}
	for _, account := range d.Accounts {
		if allowed, err := l.allows(ctx, may, types.NamespacedName{Namespace: d.Config.Namespace, Name: account}, of); err != nil || allowed {
			return nil, err
		}
	}
	return fmt.Errorf("no pod of ShardingConfig %s may update %s, so the mesh does not acquire it: check the RBAC of their ServiceAccounts, or exclude it in spec.controller.excludedLocks", d.Config, l.objectsOf(of)), nil
}

// used returns the resources of objects that the pods use as the lock: its Lease, unless they were seen
// to use others.
func (l Lock) used() []string {
	if len(l.Resources) == 0 {
		return []string{Leases}
	}
	return l.Resources
}

// objectsOf names the objects of a lock.
func (l *lock) objectsOf(of Lock) string {
	names := collect.Map(of.used(), func(resource string) string { return fmt.Sprintf("%s %s", kinds[resource].Kind, l) })
	return strings.Join(names, " and ")
}

// allows reports whether an account may update all objects of a lock.
func (l *lock) allows(ctx context.Context, may mayUpdate, account types.NamespacedName, of Lock) (bool, error) {
	for _, resource := range of.used() {
		if allowed, err := may(ctx, account, resource, l.NamespacedName); err != nil || !allowed {
			return false, err
		}
	}
	return true, nil
}

func (l *lock) isHeldFor(config types.NamespacedName) bool {
	of, held := l.heldFor()
	return held && of == config
}

// refused returns why the mesh may not have a lock for a configuration. It is not ok if it may.
func (l *lock) refused(config types.NamespacedName) (why string, ok bool) {
	if why, denied := l.denied(config); denied {
		return why, true
	}
	why, ok = l.losers[config]
	return why, ok
}

// denied returns why a configuration has no permission for a lock. It is not ok if it has.
func (l *lock) denied(config types.NamespacedName) (why string, ok bool) {
	p := l.permissions[config]
	switch {
	case p == nil:
		return "", true
	case p.denied != nil:
		return p.denied.Error(), true
	}
	return "", false
}

// permitted returns the demands, without those that are refused: all of a demand to acquire
// several locks if one of them is.
func permitted(demands []Demand, refused func(config, lock types.NamespacedName) bool) (out []Demand) {
	for _, d := range demands {
		locks := slices.DeleteFunc(slices.Clone(d.Locks), func(l Lock) bool { return refused(d.Config, l.NamespacedName) })
		if d.Mode == Acquire && len(locks) < len(d.Locks) {
			continue
		}
		d.Locks = locks
		out = append(out, d)
	}
	return out
}
