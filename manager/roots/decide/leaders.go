package decide

import (
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// leading is what is known of the leaders of a root's shards.
type leading struct {
	leaderless map[string]time.Time // since when shards have had no leader
	leaders    map[string]status.Leader
}

// lead updates the leaders of the shards that own keys.
func (d *deciding) lead() {
	l := &d.memory.leading
	l.leaders, l.leaderless = l.find(d.v, d.next, func(lock types.NamespacedName) string { return d.v.Locks.Holders[lock] })
}

// find returns the leaders of the shards that own keys, and since when the others have had none.
func (l leading) find(v *view, state handover.State, holder func(lock types.NamespacedName) string) (map[string]status.Leader, map[string]time.Time) {
	config := v.Spec.Config
	var shards []status.Led
	for _, s := range v.Shards {
		if state.Shards[s.Name].Owned.Empty() || compile.Withdrawn(config) || config.Spec.DryRun {
			continue
		}
		led := status.Led{Name: s.Name, Config: types.NamespacedName{Namespace: config.Namespace, Name: config.Name}, Locks: s.Locks, Listed: v.locks}
		for _, m := range state.Members {
			if m.Shard != s.Name || !v.exists(m) {
				continue
			}
			o := v.observe(m.Node, m.UID)
			led.Members = append(led.Members, status.LedMember{Name: m.Name, Account: compile.AccountOf(v.Pods.ByUID[m.UID]), Ready: v.serves(m, o), Observation: o})
		}
		slices.SortFunc(led.Members, func(a, b status.LedMember) int { return strings.Compare(a.Name, b.Name) })
		shards = append(shards, led)
	}
	return status.FindLeaders(shards, l.leaderless, func(namespace, name string) string {
		return holder(types.NamespacedName{Namespace: namespace, Name: name})
	}, v.now)
}

// Unled returns the locks whose holders Decide needs: those that shards have been without a
// leader for too long to hold. It needs all of f but Holders.
func Unled(m Memory, f Facts, now time.Time) (unled []types.NamespacedName) {
	if len(m.leading.leaderless) == 0 {
		return nil
	}
	m.leading.find(newView(f, now), f.Stored.State, func(lock types.NamespacedName) string {
		unled = append(unled, lock)
		return ""
	})
	return unled
}

// allWorking reports whether no shard is known to lack a leader. A restart for balance would
// end the pod that waits for the lock of a killed leader, and its successor waits anew for as
// long as the lease runs. Besides, work piles up in such a shard and counts as its weight.
func (l leading) allWorking() bool {
	return !collect.Any(l.leaders, func(_ string, leader status.Leader) bool { return !leader.Working })
}
