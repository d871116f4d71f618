package decide

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// haltedAfter is how long the pods of a shard may fail to serve under a new revision before the
// rollout counts as halted.
const haltedAfter = 3 * time.Minute

// Revision is what is known of the revisions of a StatefulSet's pods.
type Revision struct {
	// Update is the revision that new pods get; empty if it is unknown.
	Update string
	// Generation of the StatefulSet to which Update belongs.
	Generation int64
	// Problem is why pods cannot be replaced in order; empty if they can.
	Problem string
	// Read is when this was read. Later pods may have a later revision.
	Read time.Time
}

// rollout is what a round decides about a rollout. Its zero value is that of a root without one.
type rollout struct {
	status *v1alpha1.RolloutStatus
	// due are the pods, by uid, that are to be replaced now.
	due map[string]bool
	// later are the shards that the rollout has not reached. Their pods are not restarted for
	// other reasons, because their successors would have the new revision.
	later map[string]bool
	// surplus is a pod without a shard that is to be replaced now; nil if none is.
	surplus *corev1.Pod
	// halted is why the rollout has halted; empty if it has not.
	halted string
	// back is the rollback to perform now; nil if there is none.
	back *Rollback
	// queries are those of the shard that soaks; waits is which of them lack an answer, empty if none.
	queries []query.Query
	waits   string
}

// step is the part of a rollout that concerns one shard.
type step struct {
	v1alpha1.RolloutShard
	outdated []string // uids of the pods with another revision
	leaving  bool     // a pod with another revision is being deleted
	lacking  int      // number of pods that it lacks
	down     []string // names of the pods that are not ready
	unknown  []string // names of those whose agents have not confirmed that they serve
	leader   status.Leader
}

// fails reports whether it is known that a shard does not serve, serves whether it is known that
// it does.
func (s step) fails() bool  { return s.lacking > 0 || len(s.down) > 0 || s.leader.Missing != nil }
func (s step) serves() bool { return !s.fails() && len(s.unknown) == 0 && s.leader.Working }

// rollOut decides which pods are to be replaced because the template of their StatefulSet has
// changed.
func (d *deciding) rollOut() {
	v, spec := d.v, d.v.Spec.Config.Spec.Root.Rollout
	if spec == nil || compile.Withdrawn(v.Spec.Config) {
		return
	}
	before := v.lastRollout()
	out := &v1alpha1.RolloutStatus{Revision: v.Revision.Update, Failure: before.Failure, RolledBack: slices.Clone(v.rolledBack())}
	d.rollout = rollout{status: out, due: map[string]bool{}, later: map[string]bool{}}
	if phase, why := d.cannotRollOut(); why != "" {
		out.Phase, out.Message, out.Shard, out.Shards = phase, why, before.Shard, before.Shards
		d.memory.trial = trial{} // shards may write more than before once their keys have changed
		return
	}
	failed := ""
	if before.Failure != "" {
		failed = before.Shard
	}
	steps, surplus := d.steps(before), d.surplus()
	current := d.current(steps, failed)
	for _, s := range steps {
		out.Shards = append(out.Shards, s.RolloutShard)
	}
	outdated := slices.ContainsFunc(steps, func(s step) bool { return len(s.outdated) > 0 || s.leaving })
	begun := before.Phase != "" && before.Phase != v1alpha1.RolloutComplete
	served := !slices.ContainsFunc(steps, func(s step) bool { return !s.serves() })
	switch {
	case !outdated && surplus == nil && (served || !begun):
		d.complete()
		return
	case v.appliedAgain() != nil:
		d.haltAgain(steps)
	case current < 0:
		out.Phase = v1alpha1.RolloutUpdating
		out.Message = "pods without a shard are being replaced"
		d.rollout.surplus = surplus
	default:
		d.advance(steps[current], before)
		for _, s := range steps[current+1:] {
			d.rollout.later[s.Name] = true
		}
	}
	if spec.Paused {
		out.Phase, out.Message = v1alpha1.RolloutPaused, "spec.root.rollout.paused is set"
		d.rollout.due, d.rollout.surplus = map[string]bool{}, nil
		return
	}
	d.rollBack()
}

// complete ends the rollout of a revision.
func (d *deciding) complete() {
	out := d.rollout.status
	out.Phase, out.Failure, d.rollout.queries = v1alpha1.RolloutComplete, "", nil
	out.RolledBack = slices.DeleteFunc(out.RolledBack, func(r v1alpha1.RolledBackRevision) bool { return r.Revision == out.Revision })
	if n := len(out.RolledBack); n > 0 && out.RolledBack[n-1].To == out.Revision {
		last := out.RolledBack[n-1]
		out.Message = fmt.Sprintf("revision %s was rolled back: %s", last.Revision, last.Reason)
	}
}

// cannotRollOut returns why no pods are replaced; empty if they may be.
func (d *deciding) cannotRollOut() (phase v1alpha1.RolloutPhase, why string) {
	v := d.v
	switch {
	case v.Revision.Problem != "":
		return v1alpha1.RolloutBlocked, v.Revision.Problem
	case v.Spec.Config.Spec.DryRun:
		return v1alpha1.RolloutWaiting, "in a dry run no pod has a shard: delete pods yourself, so that they get the new revision"
	case v.Spec.Problem != nil || v.changes() || !d.next.Holds():
		return v1alpha1.RolloutWaiting, "shards do not act by this spec yet"
	case v.Revision.Update == "":
		return v1alpha1.RolloutWaiting, "the revision of the StatefulSet is not known yet"
	}
	return "", ""
}

// lastRollout returns the recorded progress of the revision; none if it is another one's. Without
// an analysis it has not failed.
func (v *view) lastRollout() (last v1alpha1.RolloutStatus) {
	if r := v.Stored.Status.Root; r != nil && r.Rollout != nil && r.Rollout.Revision == v.Revision.Update {
		last = *r.Rollout
	}
	if v.Spec.Config.Spec.Root.Rollout.Analysis == nil {
		last.Failure = ""
	}
	return last
}

// steps returns the shards in the order in which their pods are replaced.
func (d *deciding) steps(last v1alpha1.RolloutStatus) []step {
	v := d.v
	before := map[string]v1alpha1.RolloutShard{}
	for _, s := range last.Shards {
		before[s.Name] = s
	}
	shards := layout.Shards(v.Spec.Config.Spec.Root)
	out := make([]step, len(shards))
	index := map[string]*step{}
	for i, s := range shards {
		leader, elects := d.memory.leading.leaders[s.Name]
		if !elects {
			leader.Working = true // it owns no keys
		}
		out[i] = step{RolloutShard: v1alpha1.RolloutShard{Name: s.Name, Since: before[s.Name].Since, Soaked: before[s.Name].Soaked}, lacking: max(1, s.Replicas), leader: leader}
		index[s.Name] = &out[i]
	}
	for uid, m := range d.next.Members {
		s, pod := index[m.Shard], v.Pods.ByUID[uid]
		if s == nil || pod == nil {
			continue
		}
		if !v.exists(m) {
			s.leaving = s.leaving || !v.hasRevision(pod)
			continue
		}
		s.Pods++
		s.lacking = max(0, s.lacking-1)
		if v.hasRevision(pod) {
			s.Updated++
		} else {
			s.outdated = append(s.outdated, uid)
		}
		switch v.health(m) {
		case handover.Down:
			s.down = append(s.down, m.Name)
		case handover.Unknown:
			s.unknown = append(s.unknown, m.Name)
		}
	}
	return out
}

// hasRevision reports whether a pod has the revision that new pods get, or a later one.
func (v *view) hasRevision(p *corev1.Pod) bool {
	return revisionOf(p) == v.Revision.Update || !p.CreationTimestamp.Time.Before(v.Revision.Read.Truncate(time.Second))
}

// surplus returns a pod without a shard that has another revision; nil if there is none.
func (d *deciding) surplus() *corev1.Pod {
	surplus := collect.Filter(d.v.Pods.Workload, func(p *corev1.Pod) bool {
		_, member := d.next.Members[string(p.UID)]
		return !member && p.DeletionTimestamp == nil && !d.v.hasRevision(p)
	})
	if len(surplus) == 0 {
		return nil
	}
	return slices.MinFunc(surplus, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
}

// current returns the index of the step that the rollout is at; negative if all have ended. failed
// is the shard that an analysis has halted it at.
func (d *deciding) current(steps []step, failed string) int {
	at := -1
	for i := range steps {
		s := &steps[i]
		if len(s.outdated) > 0 {
			s.Since, s.Soaked = nil, false
		}
		switch {
		case at >= 0 || s.Name == failed || d.restartsTooOften(s):
		case len(s.outdated) == 0:
			d.soak(s)
		}
		if at < 0 && (!s.Soaked || !s.serves() || s.Name == failed) {
			at = i
		}
	}
	return at
}

// soak lets a shard serve under the revision for a time, and analyzes it.
func (d *deciding) soak(s *step) {
	spec, now := d.v.Spec.Config.Spec.Root.Rollout, d.v.now
	switch {
	case s.fails() && !s.Soaked:
		s.Since = nil
		return
	case s.Soaked || !s.serves():
		return
	case d.v.restored():
		s.Soaked = true
		return
	}
	var counted snapshot // nil without an analysis
	if spec.Analysis != nil {
		counted = d.counted()
	}
	if s.Since == nil || counted != nil && !d.tries(s.Name, counted) {
		s.Since = new(seconds(now))
		d.memory.trial = newTrial(d.v.Revision.Update, s.Name, counted)
	}
	soak, _ := time.ParseDuration(string(spec.Soak)) // the schema holds its syntax
	served := now.Sub(s.Since.Time)
	if spec.Analysis != nil {
		exceeds, waits := d.judgeQueries(spec.Analysis, s.Name, s.Since.Time)
		d.rollout.status.Failure = cmp.Or(d.analyze(spec.Analysis, s.Name, counted, served), exceeds)
		if d.rollout.waits = waits; d.rollout.status.Failure != "" {
			return
		}
		soak = max(soak, duration(spec.Analysis))
	}
	if s.Soaked = served >= soak && d.rollout.waits == ""; s.Soaked {
		d.rollout.queries = nil
	}
}

// advance sets what is to be done for the step that the rollout is at.
func (d *deciding) advance(s step, before v1alpha1.RolloutStatus) {
	out := d.rollout.status
	out.Shard, out.Phase = s.Name, v1alpha1.RolloutUpdating
	for _, uid := range s.outdated {
		d.rollout.due[uid] = true
	}
	if !s.serves() {
		out.UnservedSince = new(seconds(d.v.now))
		if before.Shard == s.Name && before.UnservedSince != nil {
			out.UnservedSince = before.UnservedSince
		}
	}
	switch unserves := out.UnservedSince != nil && d.v.now.Sub(out.UnservedSince.Time) >= haltedAfter; {
	case out.Failure != "":
		d.halt(out.Failure)
	case unserves:
		d.halt(s.trouble())
	case len(s.outdated) > 0:
		out.Message = fmt.Sprintf("%d of %d pods have the revision", s.Updated, s.Pods)
		if why := d.memory.evictions.why; why != "" {
			out.Message += "; " + why
		}
	case !s.serves():
		out.Message = s.trouble()
	default:
		out.Phase = v1alpha1.RolloutSoaking
		out.Message = fmt.Sprintf("all pods have served under the revision since %s", s.Since.UTC().Format(time.TimeOnly))
		if d.rollout.waits != "" {
			out.Message += "; " + d.rollout.waits
		}
	}
}

// halt halts the rollout. Pods of the shard that are not ready are still replaced once they have
// another template.
func (d *deciding) halt(why string) {
	out := d.rollout.status
	d.rollout.halted = why
	out.Phase = v1alpha1.RolloutHalted
	out.Message = fmt.Sprintf("%s; the pods of other shards keep their revision: correct the template of %s, or roll it back", why, layout.Target(d.v.Spec.Config.Spec.Root))
	if out.Failure != "" {
		d.rollout.due = map[string]bool{}
	}
}

// trouble says why a shard does not serve.
func (s step) trouble() string {
	slices.Sort(s.down)
	slices.Sort(s.unknown)
	switch {
	case len(s.down) > 0:
		return "not ready: pod " + firstOf(s.down)
	case s.lacking > 0:
		return fmt.Sprintf("it lacks pods (%d)", s.lacking)
	case len(s.unknown) > 0:
		return "not confirmed by its agent: pod " + firstOf(s.unknown)
	}
	return "no pod leads it"
}

// why returns why the pods of a rollout are replaced.
func (r rollout) why() string {
	if r.status == nil {
		return ""
	}
	return "the template of its StatefulSet has changed: its successor has revision " + r.status.Revision
}

// replaces reports whether a member is to be restarted.
func (r rollout) replaces(m handover.Member) bool {
	return r.due[m.UID] || m.Stale && !r.later[m.Shard]
}
