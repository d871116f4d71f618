package grant

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
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
				all[k].add(accountOf(p), l.GetUpstreamName(), l.GetName())
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b *need) int { return strings.Compare(a.name()+"/"+a.namespace, b.name()+"/"+b.namespace) })
}

func accountOf(p *corev1.Pod) account { return account(cmp.Or(p.Spec.ServiceAccountName, "default")) }

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
	var names, accounts strings.Builder
	for _, l := range missing.locks {
		fmt.Fprintf(&names, " --resource-name=%s", l)
	}
	for _, a := range missing.accounts {
		fmt.Fprintf(&accounts, " --serviceaccount=%s:%s", n.config.Namespace, a)
	}
	return fmt.Sprintf("kubectl -n %[1]s create role %[2]s --verb=get,update,patch --resource=leases.coordination.k8s.io%[3]s && kubectl -n %[1]s create rolebinding %[2]s --role=%[2]s%[4]s",
		n.namespace, n.name(), names.String(), accounts.String())
}
