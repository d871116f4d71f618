package roots

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// tell tells people, and metrics, of moves' progress.
func (rt *root) tell(config *v1alpha1.ShardingConfig, effects []handover.Effect, now time.Time) {
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
				continue // what nobody had was given out
			}
			if e.Move.Phase == handover.Granting {
				took("grant", e.Move.Since)
			}
			took("total", e.Move.Began)
			metrics.Handovers.WithLabelValues(config.Namespace, config.Name, "settled").Inc()
			settled = append(settled, fmt.Sprintf("%s to %s", e.Move.From, orNobody(e.Move.To)))
		}
	}
	if len(settled) > 0 {
		rt.Recorder.Eventf(config, nil, corev1.EventTypeNormal, "HandoverSettled", "Handover", "%s",
			status.Note("keys were handed over from "+strings.Join(settled, ", from ")))
	}
}

func orNobody(shard string) string {
	if shard == "" {
		return "nobody"
	}
	return shard
}

// warn tells people, once, of a handover that does not get on.
func (rt *root) warn(config *v1alpha1.ShardingConfig, now time.Time) {
	blocked := false
	for i, m := range rt.state.Moves {
		if now.Sub(m.Since) < status.BlockedAfter {
			continue
		}
		blocked = true
		if rt.blocked {
			break
		}
		waits := ""
		if root := rt.object.Status.Root; root != nil && i < len(root.Handovers) {
			waits = strings.Join(root.Handovers[i].WaitsFor, "; ")
		}
		metrics.Handovers.WithLabelValues(config.Namespace, config.Name, "blocked").Inc()
		rt.Recorder.Eventf(config, nil, corev1.EventTypeWarning, "HandoverBlocked", "Handover", "%s",
			status.Note(fmt.Sprintf("a handover from %s to %s has been %s for %s; it waits for: %s", orNobody(m.From), orNobody(m.To), m.Phase, now.Sub(m.Since).Round(time.Second), waits)))
		break
	}
	rt.blocked = blocked
}

// warnRolledBack emits an Event, once, when the state was found to be rolled back.
func (rt *root) warnRolledBack(config *v1alpha1.ShardingConfig) {
	if rt.state.RolledBack && !rt.rolledBack {
		rt.Recorder.Eventf(config, nil, corev1.EventTypeWarning, string(v1alpha1.ReasonRolledBack), "Handover", "%s",
			"agents have had later policies than status.root accounts for: all members are in standby until the root starts anew")
	}
	rt.rolledBack = rt.state.RolledBack
}

// weigh fills in what shards have to do.
func (rt *root) weigh(out *v1alpha1.RootStatus, v view) {
	weights := rt.Weigher.Weights(rt.uid)
	held := map[string]sharding.Scope{}
	for i := range out.Shards {
		s := &out.Shards[i]
		held[s.Name], _ = sharding.Parse(s.Held) // as it was just written
	}
	for ns, weight := range weights {
		h := sharding.Hash(ns)
		for i := range out.Shards {
			if s := &out.Shards[i]; held[s.Name].OwnsHash(h) {
				s.Namespaces++
				s.Weight += weight
			}
		}
	}
	out.Suggestion, out.Weighing = rt.suggestion, rt.Weigher.Problem(rt.uid)
	if len(weights) > 0 && len(out.Shards) > 0 {
		out.Skew = fmt.Sprintf("%.2f", layout.Skew(held, v.config.Spec.Root, weights))
	}
}

// count keeps the metrics of a root.
func (rt *root) count(config *v1alpha1.ShardingConfig) {
	metrics.HandoversPending.WithLabelValues(config.Namespace, config.Name).Set(float64(len(rt.state.Moves)))
	root := rt.object.Status.Root
	if root == nil {
		return
	}
	before := rt.counted
	rt.counted = nil
	for _, s := range root.Shards {
		rt.counted = append(rt.counted, s.Name)
		metrics.ShardNamespaces.WithLabelValues(config.Namespace, config.Name, s.Name).Set(float64(s.Namespaces))
		metrics.ShardWeight.WithLabelValues(config.Namespace, config.Name, s.Name).Set(float64(s.Weight))
	}
	for _, shard := range before {
		if !slices.Contains(rt.counted, shard) {
			metrics.ForgetShard(config.Namespace, config.Name, shard)
		}
	}
	var skew float64
	if _, err := fmt.Sscanf(root.Skew, "%g", &skew); err == nil {
		metrics.ShardSkew.WithLabelValues(config.Namespace, config.Name).Set(skew)
	}
}
