package roots

import (
	"fmt"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// rootMetrics are the metrics of a root.
type rootMetrics struct {
	leaders status.LeaderMetrics
	counted []string // shards with metrics
}

// set sets the metrics of a decision that was written.
func (r *rootMetrics) set(config *v1alpha1.ShardingConfig, d decide.Decision, now time.Time) {
	// An increase needs the zero before the first.
	settled := metrics.Handovers.WithLabelValues(config.Namespace, config.Name, "settled")
	blocked := metrics.Handovers.WithLabelValues(config.Namespace, config.Name, "blocked")
	settled.Add(float64(countMoves(d.Effects, now)))
	for _, e := range d.Events {
		if e.Reason == decide.HandoverBlocked {
			blocked.Inc()
		}
	}
	metrics.HandoversPending.WithLabelValues(config.Namespace, config.Name).Set(float64(len(d.State.Moves)))
	if d.Status.Root != nil {
		r.count(config, d.Status.Root)
	}
	leaders := map[metrics.Shard]status.Leader{}
	for name, leader := range d.Leaders {
		leaders[metrics.Shard{Namespace: config.Namespace, Config: config.Name, Name: name}] = leader
	}
	r.leaders.Set(leaders)
}

// countMoves counts how long moves took that have made progress. It returns how many have settled.
func countMoves(effects []handover.Effect, now time.Time) (settled int) {
	took := func(phase string, since time.Time) {
		metrics.HandoverDuration.WithLabelValues(phase).Observe(now.Sub(since).Seconds())
	}
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
			settled++
		}
	}
	return settled
}

// count sets the metrics of a root's shards.
func (r *rootMetrics) count(config *v1alpha1.ShardingConfig, root *v1alpha1.RootStatus) {
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
	metrics.CountWrites(config.Namespace, config.Name, root)
	metrics.CountRollout(config.Namespace, config.Name, root.Rollout)
	var skew float64
	if _, err := fmt.Sscanf(root.Skew, "%g", &skew); err == nil {
		metrics.ShardSkew.WithLabelValues(config.Namespace, config.Name).Set(skew)
	}
}
