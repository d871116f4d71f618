package locks

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// authorizedFor is how long an answer about the permission of pods to update a lock is cached.
const authorizedFor = time.Minute

// permission is whether the mesh may have a lock for a configuration in another namespace.
// Otherwise a user could take any operator's lock by naming it: keep it from being acquired for
// the operator, or from being released to it.
type permission struct {
	// denied is why not; nil if the mesh may.
	denied error
	asked  time.Time
}

// authorize checks the permission that a demand requires. A configuration for which the mesh
// holds the lock has it, and so has one whose shards may act since it was granted.
func (l *lock) authorize(ctx context.Context, may func(ctx context.Context, account, lock types.NamespacedName) (bool, error), d Demand, now time.Time) {
	p := l.permissions[d.Config]
	granted := p != nil && p.denied == nil
	switch {
	case may == nil || l.Namespace == d.Config.Namespace || l.isHeldFor(d.Config):
		l.permissions[d.Config] = &permission{}
		return
	case d.Mode < Acquire || granted && (d.Mode == Keep || len(d.Accounts) == 0):
		return
	case p != nil && now.Sub(p.asked) < authorizedFor:
		return
	}
	next := &permission{denied: fmt.Errorf("no pod of ShardingConfig %s may update Lease %s, so the mesh does not acquire it: check the RBAC of their ServiceAccounts", d.Config, l)}
	for _, account := range d.Accounts {
		allowed, err := may(ctx, types.NamespacedName{Namespace: d.Config.Namespace, Name: account}, l.NamespacedName)
		if err != nil {
			if !granted {
				l.permissions[d.Config] = &permission{denied: err}
			}
			return
		}
		if allowed {
			next.denied = nil
			break
		}
	}
	if len(d.Accounts) > 0 {
		next.asked = now
	}
	l.permissions[d.Config] = next
}

func (l *lock) isHeldFor(config types.NamespacedName) bool {
	of, held := l.heldFor()
	return held && of == config
}

// refused returns why the mesh may not have a lock for a configuration. It is not ok if it may.
func (l *lock) refused(config types.NamespacedName) (why string, ok bool) {
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
