package status

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// surveyHandWritten finds out which locks the members of a hand-written shard have, and
// what keeps them from leading.
func (r *Controller) surveyHandWritten(shard compile.Shard, configs []*v1alpha1.ShardingConfig) ([]v1alpha1.LockStatus, *locks.Obstacle) {
	if shard.Root != nil || !compile.HandWritten(shard.Config) || shard.Problem != nil {
		return nil, nil
	}
	var sightings []locks.Sighting
	for _, p := range shard.Members {
		for _, l := range r.Push.Observe(p.Spec.NodeName, string(p.UID)).ObservedLocks {
			sightings = append(sightings, locks.Sighting{Pod: p, ObservedLock: l})
		}
	}
	known, obstacle := locks.Survey(shard.Config, shard.Config.Status.Locks, sightings, configs, r.Keeper.State)
	if obstacle == nil && len(shard.Members) > 0 {
		obstacle = locks.Unheld(known, r.Keeper.State, func(identity string) string { return fmt.Sprintf("%q", identity) })
	}
	return known, obstacle
}

// lead finds out who leads the hand-written shards that are to act, by namespace/name.
func (r *Controller) lead(ctx context.Context, c *controllers.Compiled) map[string]status.Leader {
	var shards []status.Led
	names := map[string]types.NamespacedName{}
	for _, s := range c.Shards {
		if s.Config == nil || s.Root != nil || s.Problem != nil || !compile.HandWritten(s.Config) || len(s.Members) == 0 {
			continue
		}
		led := status.Led{Name: s.String(), Locks: s.Locks, Known: s.Config.Status.Locks}
		waits := false
		for _, p := range s.Members {
			policy := c.Policies[p.UID]
			o := r.Push.Observe(p.Spec.NodeName, string(p.UID))
			waits = waits || policy.GetSharding().GetStandby()
			led.Members = append(led.Members, status.LedMember{Name: p.Name, Ready: status.Serves(p, o), Observation: o})
		}
		if waits {
			continue
		}
		shards = append(shards, led)
		names[led.Name] = s.NamespacedName
	}
	before := r.led
	leaders := r.leaders.Round(shards, func(namespace, name string) string { return roots.HolderOf(ctx, r.Client, namespace, name) }, time.Now())
	for name, l := range leaders {
		metrics.CountLeader(names[name].Namespace, names[name].Name, names[name].Name, l.Elects, l.Leads(), l.Ready)
	}
	for name, was := range before {
		if _, still := leaders[name]; !still {
			metrics.ForgetLeader(was.Namespace, was.Name, was.Name)
		}
	}
	r.led = names
	return leaders
}
