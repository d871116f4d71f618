package roots

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// leading is what is known of the leaders of a root's shards.
type leading struct {
	tracker status.Leaders
	leaders map[string]status.Leader
	warned  map[string]bool // shards without leader of which an Event was sent
}

// lead finds out who leads the shards that own keys.
func (rt *root) lead(ctx context.Context, v view, state handover.State, now time.Time) {
	var shards []status.Led
	before := rt.leaders
	for _, s := range v.world.Compiled.Shards {
		if s.Root == nil || s.Root.UID != rt.uid || state.Shards[s.Name].Held.Empty() || compile.Withdrawn(v.config) || v.config.Spec.DryRun {
			continue
		}
		led := status.Led{Name: s.Name, Locks: s.Locks, Known: rt.locks}
		for _, m := range state.Members {
			if m.Shard != s.Name || !isThere(v, m) {
				continue
			}
			o := rt.Observe(m.Node, m.UID)
			led.Members = append(led.Members, status.LedMember{Name: m.Name, Ready: serves(v, m, o), Observation: o})
		}
		slices.SortFunc(led.Members, func(a, b status.LedMember) int { return strings.Compare(a.Name, b.Name) })
		shards = append(shards, led)
	}
	rt.leaders = rt.tracker.Round(shards, func(namespace, name string) string { return HolderOf(ctx, rt.Client, namespace, name) }, now)
	for _, name := range slices.Sorted(maps.Keys(rt.leaders)) {
		l := rt.leaders[name]
		metrics.CountLeader(v.config.Namespace, v.config.Name, name, l.Elects, l.Leads(), l.Ready)
	}
	for name := range before {
		if _, still := rt.leaders[name]; !still {
			metrics.ForgetLeader(v.config.Namespace, v.config.Name, name)
		}
	}
}

// HolderOf reads who holds a Lease, for people; empty if nobody does, or if that cannot
// be read.
func HolderOf(ctx context.Context, c client.Reader, namespace, name string) string {
	lease := &coordinationv1.Lease{}
	if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, lease); err != nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// warnLeaderless sends an Event when a shard has had no leader for a while, once each time.
func (rt *root) warnLeaderless(config *v1alpha1.ShardingConfig) {
	before := rt.warned
	rt.warned = map[string]bool{}
	fresh := false
	for name, l := range rt.leaders {
		if l.Missing != nil {
			rt.warned[name] = true
			fresh = fresh || !before[name]
		}
	}
	if fresh {
		message := status.MissingLeaders(rt.leaders).Message
		rt.Recorder.Eventf(config, nil, corev1.EventTypeWarning, "LeaderMissing", "Lead", "%s", status.Note(message))
	}
}
