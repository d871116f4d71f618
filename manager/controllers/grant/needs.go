package grant

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// need is what the members of a configuration need in the namespace of some of its locks.
type need struct {
	config    *v1alpha1.ShardingConfig
	namespace string
	// shards are the locks of shards by account, each with the operator's lock that it
	// stands for.
	shards map[account]map[string]string
}

// account is the ServiceAccount of members, in the namespace of their configuration.
type account string

// needs returns what members need to elect the leaders of their shards, sorted.
func needs(shards []compile.Shard) []*need {
	type key struct {
		config    types.UID
		namespace string
	}
	all := map[key]*need{}
	for _, s := range shards {
		config := cmp.Or(s.Root, s.Config)
		if config == nil || config.Spec.DryRun {
			continue
		}
		for _, l := range s.Locks {
			k := key{config.UID, l.GetNamespace()}
			if all[k] == nil {
				all[k] = &need{config, l.GetNamespace(), map[account]map[string]string{}}
			}
			for _, p := range s.Members {
				all[k].add(account(compile.AccountOf(p)), l.GetUpstreamName(), l.GetName())
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b *need) int { return strings.Compare(a.name()+"/"+a.namespace, b.name()+"/"+b.namespace) })
}

func (n *need) add(a account, shard, lock string) {
	if n.shards[a] == nil {
		n.shards[a] = map[string]string{}
	}
	n.shards[a][shard] = lock
}

// of returns the ServiceAccount of a need.
func (n *need) of(a account) types.NamespacedName {
	return types.NamespacedName{Namespace: n.config.Namespace, Name: string(a)}
}

// in returns a lock in the namespace of a need.
func (n *need) in(lock string) types.NamespacedName {
	return types.NamespacedName{Namespace: n.namespace, Name: lock}
}

// name returns the name of the Role and RoleBinding: a namespace has no dot in its name.
func (n *need) name() string { return Prefix + n.config.Namespace + "." + n.config.Name }

// access is what is missing for a need.
type access struct {
	locks    []string
	accounts []account
}

// commands returns what an administrator can run to grant the access.
func (n *need) commands(missing access) string {
	return locks.Access{
		Namespace: n.namespace, Role: n.name(), Resource: locks.Leases, Names: missing.locks, Verbs: locks.UseVerbs, Accounts: collect.Map(missing.accounts, n.of),
	}.Commands()
}
