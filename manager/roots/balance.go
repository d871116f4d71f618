package roots

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

const (
	// balanceEvery is the time between two checks of the skew, and so between two rounds of
	// handovers because of it.
	balanceEvery = 15 * time.Second
	// CorrectEvery is the same while a correction is under way: each of its steps moves a
	// part of the keys, and has ended before the next begins.
	CorrectEvery = 5 * time.Second
	// pauseFirst is the time between the first two corrections that restart pods. It
	// doubles up to pauseMost: if weights change all the time, evenness is not worth a
	// restart each time. It starts anew after nothing was moved for pauseMost.
	pauseFirst = time.Minute
	pauseMost  = time.Hour
)

// balancing is the progress of the balancing of a root.
type balancing struct {
	looked     time.Time // when the skew was last checked
	suggestion string
	// correcting reports whether a correction has begun that goes on until the skew is within
	// the hysteresis.
	correcting bool
	// moved is when keys were last moved, and pause how long after that the next
	// correction may begin.
	moved time.Time
	pause time.Duration
}

// Correcting reports whether some root's shards are being balanced, so that the next round
// should follow after CorrectEvery.
func (r *Roots) Correcting() bool {
	return collect.Any(r.roots, func(_ origin.Name, rt *root) bool { return rt.correcting })
}

// balance moves keys, or suggests it, if the skew is too high.
func (rt *root) balance(config *v1alpha1.ShardingConfig, state handover.State, now time.Time) {
	every := balanceEvery
	if rt.correcting {
		every = CorrectEvery
	}
	if now.Sub(rt.looked) < every || !rt.Weigher.Current(rt.uid) {
		return
	}
	restarts := config.Spec.Root.OnChange != v1alpha1.OnChangeRelist
	automatic := layout.Rebalance(config.Spec.Root) == v1alpha1.RebalanceAutomatic
	if automatic && (!settled(state, restarts) || !rt.allWorking()) {
		return
	}
	rt.looked = now
	pace := layout.Pace{Above: layout.Threshold, AtOnce: restarts}
	if rt.correcting {
		pace.Above = layout.Hysteresis
	}
	next, what := layout.Balance(config.Spec.Root, rt.scopes, rt.Weigher.Weights(rt.uid), pace)
	if paused := restarts && now.Sub(rt.moved) < rt.pause; !automatic || paused {
		rt.suggestion = what
		return
	}
	rt.suggestion = ""
	rt.scopes, rt.correcting = next, what != ""
	if what == "" {
		return
	}
	if now.Sub(rt.moved) > rt.pause+pauseMost {
		rt.pause = 0
	}
	rt.moved, rt.pause = now, min(max(2*rt.pause, pauseFirst), pauseMost)
	rt.Log.Info("moving keys for balance", "namespace", config.Namespace, "shardingConfig", config.Name, "move", what)
}

// settled reports whether shards own what they should. If moves of keys restart members, no
// member may be left to restart: there is one batch at a time.
func settled(state handover.State, restarts bool) bool {
	moving := func(_ string, s handover.Shard) bool { return !s.Wanted.Equal(s.Held) }
	stale := func(_ string, m handover.Member) bool { return m.Stale && restarts }
	return len(state.Moves) == 0 && !collect.Any(state.Shards, moving) && !collect.Any(state.Members, stale)
}
