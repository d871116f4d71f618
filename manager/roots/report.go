package roots

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// reporter emits the Events and metrics of a root.
type reporter struct {
	recorder events.EventRecorder
	// blocked and rolledBack report whether an Event says that a handover is blocked, and
	// that the state was rolled back.
	blocked, rolledBack bool
	counted             []string        // shards with metrics
	leaderless          map[string]bool // shards without a leader for which an Event was emitted
}

// report reports a state that was written, and the effects that led to it.
func (r *reporter) report(config *v1alpha1.ShardingConfig, written *v1alpha1.RootStatus, state handover.State, effects []handover.Effect, now time.Time) {
	r.progress(config, effects, now)
	if state.RolledBack && !r.rolledBack {
		r.recorder.Eventf(config, nil, corev1.EventTypeWarning, string(v1alpha1.ReasonRolledBack), "Handover", "%s",
			"agents have had later policies than status.root accounts for: all members are in standby until the root starts anew")
	}
	r.rolledBack = state.RolledBack
	r.warnBlocked(config, written, state, now)
	metrics.HandoversPending.WithLabelValues(config.Namespace, config.Name).Set(float64(len(state.Moves)))
	if written != nil {
		r.count(config, written)
	}
}

// progress reports the moves that have made progress.
func (r *reporter) progress(config *v1alpha1.ShardingConfig, effects []handover.Effect, now time.Time) {
	took := func(phase string, since time.Time) {
		metrics.HandoverDuration.WithLabelValues(phase).Observe(now.Sub(since).Seconds())
	}
	var settled []string
	for _, e := range effects {
		switch e := e.(type) {
		case handover.Released:
			took("release", e.Move.Began)
		case handover.Settled:
			if e.Move.From == "" {
				continue // the keys had no owner before
			}
			if e.Move.Phase == handover.Granting {
				took("grant", e.Move.Since)
			}
			took("total", e.Move.Began)
			metrics.Handovers.WithLabelValues(config.Namespace, config.Name, "settled").Inc()
			settled = append(settled, fmt.Sprintf("%s to %s", e.Move.From, cmp.Or(e.Move.To, "nobody")))
		}
	}
	if len(settled) > 0 {
		r.recorder.Eventf(config, nil, corev1.EventTypeNormal, "HandoverSettled", "Handover", "%s",
			status.Note("keys were handed over from "+strings.Join(settled, ", from ")))
	}
}

// warnBlocked emits an Event, once, when a handover is blocked.
func (r *reporter) warnBlocked(config *v1alpha1.ShardingConfig, written *v1alpha1.RootStatus, state handover.State, now time.Time) {
	i := slices.IndexFunc(state.Moves, func(m handover.Move) bool { return now.Sub(m.Since) >= status.BlockedAfter })
	if i >= 0 && !r.blocked {
		m, waits := state.Moves[i], ""
		if written != nil && i < len(written.Handovers) {
			waits = strings.Join(written.Handovers[i].WaitsFor, "; ")
		}
		metrics.Handovers.WithLabelValues(config.Namespace, config.Name, "blocked").Inc()
		r.recorder.Eventf(config, nil, corev1.EventTypeWarning, "HandoverBlocked", "Handover", "%s",
			status.Note(fmt.Sprintf("a handover from %s to %s has been %s for %s; it waits for: %s", cmp.Or(m.From, "nobody"), cmp.Or(m.To, "nobody"), m.Phase, now.Sub(m.Since).Round(time.Second), waits)))
	}
	r.blocked = i >= 0
}

// warnLeaderless emits an Event, once each time, when a shard has had no leader for a while.
func (r *reporter) warnLeaderless(config *v1alpha1.ShardingConfig, leaders map[string]status.Leader) {
	before := r.leaderless
	r.leaderless = map[string]bool{}
	fresh := false
	for name, l := range leaders {
		if l.Missing != nil {
			r.leaderless[name] = true
			fresh = fresh || !before[name]
		}
	}
	if fresh {
		r.recorder.Eventf(config, nil, corev1.EventTypeWarning, "LeaderMissing", "Lead", "%s", status.Note(status.MissingLeaders(leaders).Message))
	}
}

// count sets the metrics of a root's shards.
func (r *reporter) count(config *v1alpha1.ShardingConfig, root *v1alpha1.RootStatus) {
	before := r.counted
	r.counted = nil
	for _, s := range root.Shards {
		r.counted = append(r.counted, s.Name)
		metrics.ShardNamespaces.WithLabelValues(config.Namespace, config.Name, s.Name).Set(float64(s.Namespaces))
		metrics.ShardWeight.WithLabelValues(config.Namespace, config.Name, s.Name).Set(float64(s.Weight))
	}
	for _, shard := range before {
		if !slices.Contains(r.counted, shard) {
			metrics.Shard{Namespace: config.Namespace, Config: config.Name, Name: shard}.Forget()
		}
	}
	metrics.CountUndivided(config.Namespace, config.Name, root)
	var skew float64
	if _, err := fmt.Sscanf(root.Skew, "%g", &skew); err == nil {
		metrics.ShardSkew.WithLabelValues(config.Namespace, config.Name).Set(skew)
	}
}

// addWeights adds the namespaces and weights of shards to a status.
func (rt *root) addWeights(out *v1alpha1.RootStatus, v view) {
	weights := rt.Weigher.Weights(rt.uid)
	owned := map[string]sharding.Scope{}
	for i := range out.Shards {
		s := &out.Shards[i]
		owned[s.Name], _ = sharding.Parse(s.Held) // as it was just written
	}
	for ns, weight := range weights {
		h := sharding.Hash(ns)
		for i := range out.Shards {
			if s := &out.Shards[i]; owned[s.Name].OwnsHash(h) {
				s.Namespaces++
				s.Weight += weight
			}
		}
	}
	out.Suggestion, out.Weighing = rt.suggestion, rt.Weigher.Problem(rt.uid)
	if len(weights) > 0 && len(out.Shards) > 0 {
		out.Skew = fmt.Sprintf("%.2f", layout.Skew(owned, v.config.Spec.Root, weights))
	}
}
