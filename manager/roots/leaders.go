package roots

import (
	"context"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// leading tracks the leaders of a root's shards.
type leading struct {
	leaderless map[string]time.Time // since when shards have had no leader
	leaders    map[string]status.Leader
	metrics    status.LeaderMetrics
}

// lead updates the leaders of the shards that own keys.
func (rt *root) lead(ctx context.Context, v view, state handover.State, now time.Time) {
	var shards []status.Led
	for _, s := range v.world.Compiled.Shards {
		if s.Root == nil || s.Root.UID != rt.uid || state.Shards[s.Name].Held.Empty() || compile.Withdrawn(v.config) || v.config.Spec.DryRun {
			continue
		}
		led := status.Led{Name: s.Name, Locks: s.Locks, Known: rt.locks}
		for _, m := range state.Members {
			if m.Shard != s.Name || !v.exists(m) {
				continue
			}
			o := v.observe(m.Node, m.UID)
			led.Members = append(led.Members, status.LedMember{Name: m.Name, Account: compile.AccountOf(v.all[m.UID]), Ready: v.serves(m, o), Observation: o})
		}
		slices.SortFunc(led.Members, func(a, b status.LedMember) int { return strings.Compare(a.Name, b.Name) })
		shards = append(shards, led)
	}
	holder := func(namespace, name string) string { return HolderOf(ctx, rt.Client, namespace, name) }
	rt.leaders, rt.leading.leaderless = status.FindLeaders(shards, rt.leading.leaderless, holder, now)
	counted := map[metrics.Shard]status.Leader{}
	for name, leader := range rt.leaders {
		counted[metrics.Shard{Namespace: v.config.Namespace, Config: v.config.Name, Name: name}] = leader
	}
	rt.leading.metrics.Set(counted)
}

// HolderOf reads the holder of a Lease; empty if it has none, or cannot be read.
func HolderOf(ctx context.Context, c client.Reader, namespace, name string) string {
	lease := &coordinationv1.Lease{}
	if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, lease); err != nil {
		return ""
	}
	return ptr.Deref(lease.Spec.HolderIdentity, "")
}

// allWorking reports whether no shard is known to lack a leader. A restart for balance would
// end the pod that waits for the lock of a killed leader, and its successor waits anew for as
// long as the lease runs. Besides, work piles up in such a shard and counts as its weight.
func (l *leading) allWorking() bool {
	return !collect.Any(l.leaders, func(_ string, leader status.Leader) bool { return !leader.Working })
}
