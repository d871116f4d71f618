package decide

import (
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// plan is the scopes that shards should own. The next leader continues from the scopes that
// the state says were wanted last.
type plan struct {
	generation int64 // of the spec that it follows from
	scopes     map[string]sharding.Scope
	balancing
	// outdated are the pods that could be restarted so that others take their place, and
	// since when.
	outdated map[string]time.Time
}

// outdatedFor is how long a pod must be out of place before it is restarted: during a
// rollout shards lack pods for a moment.
const outdatedFor = 30 * time.Second

// lasting returns the pods that have been out of place for outdatedFor.
func (p *plan) lasting(outdated []string, now time.Time) (out []string) {
	since := map[string]time.Time{}
	for _, uid := range outdated {
		since[uid] = collect.Since(p.outdated, uid, now)
		if now.Sub(since[uid]) >= outdatedFor {
			out = append(out, uid)
		}
	}
	p.outdated = since
	return out
}

// assignKeys updates the plan and follows it. It reports whether pods may be assigned: they
// may not while a pod outside the mesh may act, or the configuration is invalid.
func (d *deciding) assignKeys() bool {
	v := d.v
	first := !d.next.Holds() && !v.grantsNothing()
	if first {
		if d.unconfirmed = append(d.memory.lost.names(), v.unrefused(d.removed)...); len(d.unconfirmed) > 0 {
			return false
		}
	}
	if !v.reported(d.next.Members) || !d.replan() {
		d.unplanned = true
	} else {
		if first && v.Spec.Problem == nil {
			if d.gate = v.mayGrant(); d.gate.closed != nil {
				return false
			}
		}
		d.do(handover.Want{
			Scopes:  d.memory.plan.scopes,
			Ready:   v.ready(d.next.Members),
			Restart: v.Spec.Config.Spec.Root.OnChange != v1alpha1.OnChangeRelist && !v.Spec.Config.Spec.DryRun,
		})
		d.unplanned = !follows(d.next, d.memory.plan.scopes)
	}
	return v.Spec.Problem == nil || compile.Withdrawn(v.Spec.Config)
}

// replan updates the plan to the configuration. It is not ok if weights are not known yet.
func (d *deciding) replan() (ok bool) {
	v, m := d.v, &d.memory
	config, last := v.Spec.Config, wanted(d.next)
	switch {
	case v.grantsNothing():
		if (v.changes() || v.overrun()) && len(last) > 0 {
			m.divided = last
			if v.changes() && slices.Contains(v.Spec.Change.Fields, acting.KeyField) {
				m.divided = nil // of another key space
			}
		}
		m.plan = plan{outdated: m.plan.outdated}
	case v.Spec.Problem != nil:
		m.plan = plan{scopes: last}
	case len(last) == 0 || m.plan.generation != config.Generation:
		if !v.Weights.Counted {
			return false
		}
		if len(last) == 0 {
			last, m.divided = m.divided, nil
		}
		// Without last scopes, Next returns the first ones.
		m.plan = plan{generation: config.Generation, balancing: balancing{looked: v.now}, scopes: layout.Next(config.Spec.Root, last, v.Weights.Of)}
	case layout.Repinned(config.Spec.Root, m.plan.scopes):
		m.plan.scopes = layout.Next(config.Spec.Root, last, v.Weights.Of)
	case layout.Rebalance(config.Spec.Root) == v1alpha1.RebalanceOff:
		m.plan.suggestion = ""
	default:
		d.balance()
	}
	return true
}

// follows reports whether a state wants the scopes of a plan.
func follows(state handover.State, scopes map[string]sharding.Scope) bool {
	return !collect.Any(scopes, func(name string, s sharding.Scope) bool { return !state.Shards[name].Wanted.Equal(s) })
}

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

// balance moves keys, or suggests it, if the skew is too high.
func (d *deciding) balance() {
	v, p := d.v, &d.memory.plan
	root, now := v.Spec.Config.Spec.Root, v.now
	every := balanceEvery
	if p.correcting {
		every = CorrectEvery
	}
	if now.Sub(p.looked) < every || !v.Weights.Current {
		return
	}
	restarts := root.OnChange != v1alpha1.OnChangeRelist
	automatic := layout.Rebalance(root) == v1alpha1.RebalanceAutomatic
	if automatic && (!settled(d.next, restarts) || !d.memory.leading.allWorking()) {
		return
	}
	p.looked = now
	pace := layout.Pace{Above: layout.Threshold, AtOnce: restarts}
	if p.correcting {
		pace.Above = layout.Hysteresis
	}
	next, what := layout.Balance(root, p.scopes, v.Weights.Of, pace)
	if paused := restarts && now.Sub(p.moved) < p.pause; !automatic || paused {
		p.suggestion = what
		return
	}
	p.suggestion = ""
	p.scopes, p.correcting = next, what != ""
	if what == "" {
		return
	}
	if now.Sub(p.moved) > p.pause+pauseMost {
		p.pause = 0
	}
	p.moved, p.pause = now, min(max(2*p.pause, pauseFirst), pauseMost)
	d.balanced = what
}

// settled reports whether shards own what they should. If moves of keys restart members, no
// member may be left to restart: there is one batch at a time.
func settled(state handover.State, restarts bool) bool {
	moving := func(_ string, s handover.Shard) bool { return !s.Wanted.Equal(s.Owned) }
	stale := func(_ string, m handover.Member) bool { return m.Stale && restarts }
	return len(state.Moves) == 0 && !collect.Any(state.Shards, moving) && !collect.Any(state.Members, stale)
}
