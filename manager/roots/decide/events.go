package decide

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// Reasons of Events.
const (
	HandoverSettled = "HandoverSettled"
	HandoverBlocked = "HandoverBlocked"
	LeaderMissing   = "LeaderMissing"
	RolloutHalted   = "RolloutHalted"
	RolloutComplete = "RolloutComplete"
	// RolloutRolledBack: the template of a StatefulSet was rolled back.
	RolloutRolledBack = "RolloutRolledBack"
)

// Event is a Kubernetes Event about the root.
type Event struct{ Type, Reason, Action, Note string }

// reported is what Events have said.
type reported struct {
	// blocked and rolledBack report whether an Event says that a handover is blocked, and
	// that the state was rolled back.
	blocked, rolledBack bool
	leaderless          map[string]bool // shards without a leader for which an Event was emitted
}

// events returns the Events about a status.
func (d *deciding) events(written *v1alpha1.RootStatus) (out []Event) {
	before, now := d.memory.reported, reported{rolledBack: d.next.RolledBack, leaderless: map[string]bool{}}
	out = d.settledMoves()
	if now.rolledBack && !before.rolledBack {
		out = append(out, Event{corev1.EventTypeWarning, string(v1alpha1.ReasonRolledBack), "Handover",
			"agents have had later policies than status.root accounts for: all members are in standby until the root starts anew"})
	}
	blocked := d.blockedMove(written)
	if now.blocked = blocked != nil; now.blocked && !before.blocked {
		out = append(out, *blocked)
	}
	fresh := false
	for name, l := range d.memory.leading.leaders {
		if l.Missing != nil {
			now.leaderless[name] = true
			fresh = fresh || !before.leaderless[name]
		}
	}
	if fresh {
		out = append(out, Event{corev1.EventTypeWarning, LeaderMissing, "Lead", status.Note(status.MissingLeaders(d.memory.leading.leaders).Message)})
	}
	d.memory.reported = now
	return append(out, d.rolloutEvents(written)...)
}

// rolloutEvents returns an Event about a rollout that has halted or ended.
func (d *deciding) rolloutEvents(written *v1alpha1.RootStatus) []Event {
	before := d.v.Stored.Status.Root
	if before == nil || before.Rollout == nil || written == nil || written.Rollout == nil || before.Rollout.Phase == written.Rollout.Phase {
		return nil
	}
	switch r := written.Rollout; r.Phase {
	case v1alpha1.RolloutHalted:
		return []Event{{corev1.EventTypeWarning, RolloutHalted, "RollOut", status.Note(status.Rollout(r))}}
	case v1alpha1.RolloutComplete:
		return []Event{{corev1.EventTypeNormal, RolloutComplete, "RollOut", "all pods have revision " + r.Revision}}
	}
	return nil
}

// settledMoves returns an Event about the moves that have settled; none if none have.
func (d *deciding) settledMoves() []Event {
	var settled []string
	for _, e := range d.effects {
		// Keys without From had no owner before.
		if e, ok := e.(handover.Settled); ok && e.Move.From != "" {
			settled = append(settled, fmt.Sprintf("%s to %s", e.Move.From, cmp.Or(e.Move.To, "nobody")))
		}
	}
	if len(settled) == 0 {
		return nil
	}
	return []Event{{corev1.EventTypeNormal, HandoverSettled, "Handover", status.Note("keys were handed over from " + strings.Join(settled, ", from "))}}
}

// blockedMove returns an Event about the first move that is blocked; nil if none is.
func (d *deciding) blockedMove(written *v1alpha1.RootStatus) *Event {
	now := d.v.now
	i := slices.IndexFunc(d.next.Moves, func(m handover.Move) bool { return now.Sub(m.Since) >= status.BlockedAfter })
	if i < 0 {
		return nil
	}
	m, waits := d.next.Moves[i], ""
	if written != nil && i < len(written.Handovers) {
		waits = strings.Join(written.Handovers[i].WaitsFor, "; ")
	}
	return &Event{corev1.EventTypeWarning, HandoverBlocked, "Handover",
		status.Note(fmt.Sprintf("a handover from %s to %s has been %s for %s; it waits for: %s", cmp.Or(m.From, "nobody"), cmp.Or(m.To, "nobody"), m.Phase, now.Sub(m.Since).Round(time.Second), waits))}
}
