package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// haltedAfter is how long the pods of a shard may fail to serve under a new revision before the
// rollout counts as halted.
const haltedAfter = 3 * time.Minute

// Revision is what is known of the revisions of a StatefulSet's pods.
type Revision struct {
	// Update is the revision that new pods get; empty if it is unknown.
	Update string
	// Problem is why pods cannot be replaced in order; empty if they can.
	Problem string
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
}

// step is the part of a rollout that concerns one shard.
type step struct {
	v1alpha1.RolloutShard
	outdated []string // uids of the pods with another revision
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
		d.memory.unserved = time.Time{}
		return
	}
	out := &v1alpha1.RolloutStatus{Revision: v.Revision.Update, Phase: v1alpha1.RolloutWaiting}
	d.rollout = rollout{status: out, due: map[string]bool{}, later: map[string]bool{}}
	if v.Revision.Problem != "" {
		out.Phase = v1alpha1.RolloutBlocked
	}
	if out.Message = d.cannotRollOut(); out.Message != "" {
		d.memory.unserved = time.Time{}
		return
	}
	steps, surplus := d.steps(), d.surplus()
	current := d.current(steps)
	for _, s := range steps {
		out.Shards = append(out.Shards, s.RolloutShard)
	}
	outdated := slices.ContainsFunc(steps, func(s step) bool { return len(s.outdated) > 0 })
	switch {
	case !outdated && surplus == nil:
		out.Phase = v1alpha1.RolloutComplete
		d.memory.unserved = time.Time{}
		return
	case current < 0:
		out.Phase = v1alpha1.RolloutUpdating
		out.Message = "pods without a shard are being replaced"
		d.rollout.surplus = surplus
	default:
		d.advance(steps[current])
		for _, s := range steps[current+1:] {
			d.rollout.later[s.Name] = true
		}
	}
	if spec.Paused {
		out.Phase, out.Message = v1alpha1.RolloutPaused, "spec.root.rollout.paused is set"
		d.rollout.due, d.rollout.surplus = map[string]bool{}, nil
	}
}

// cannotRollOut returns why no pods are replaced; empty if they may be.
func (d *deciding) cannotRollOut() string {
	v := d.v
	switch {
	case v.Revision.Problem != "":
		return v.Revision.Problem
	case v.Spec.Config.Spec.DryRun:
		return "in a dry run no pod has a shard: delete pods yourself, so that they get the new revision"
	case v.Spec.Problem != nil || v.changes() || !d.next.Holds():
		return "shards do not act by this spec yet"
	case v.Revision.Update == "":
		return "the revision of the StatefulSet is not known yet"
	}
	return ""
}

// steps returns the shards in the order in which their pods are replaced.
func (d *deciding) steps() []step {
	v := d.v
	before := map[string]v1alpha1.RolloutShard{}
	if r := v.Stored.Status.Root; r != nil && r.Rollout != nil && r.Rollout.Revision == v.Revision.Update {
		for _, s := range r.Rollout.Shards {
			before[s.Name] = s
		}
	}
	shards := layout.Shards(v.Spec.Config.Spec.Root)
	out := make([]step, len(shards))
	index := map[string]*step{}
	for i, s := range shards {
		leader, elects := d.memory.leading.leaders[s.Name]
		if !elects {
			leader.Working = true // it owns no keys
		}
		out[i] = step{RolloutShard: v1alpha1.RolloutShard{Name: s.Name, Since: before[s.Name].Since}, lacking: max(1, s.Replicas), leader: leader}
		index[s.Name] = &out[i]
	}
	for uid, m := range d.next.Members {
		s := index[m.Shard]
		if s == nil || !v.exists(m) {
			continue
		}
		s.Pods++
		s.lacking = max(0, s.lacking-1)
		if v.hasRevision(v.Pods.ByUID[uid]) {
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

// hasRevision reports whether a pod has the revision that new pods get.
func (v *view) hasRevision(p *corev1.Pod) bool {
	return p.Labels[appsv1.ControllerRevisionHashLabelKey] == v.Revision.Update
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

// current returns the index of the step that the rollout is at; negative if all have ended. It
// keeps since when shards have served under the revision.
func (d *deciding) current(steps []step) int {
	soak, _ := time.ParseDuration(string(d.v.Spec.Config.Spec.Root.Rollout.Soak)) // the schema holds its syntax
	at := -1
	for i := range steps {
		s := &steps[i]
		soaked := s.Since != nil && d.v.now.Sub(s.Since.Time) >= soak
		switch {
		case at >= 0 || len(s.outdated) > 0:
			s.Since = nil
		case s.fails() && !soaked:
			s.Since = nil
		case s.Since == nil && s.serves():
			s.Since = new(seconds(d.v.now))
			soaked = soak <= 0
		}
		if at < 0 && (!s.serves() || !soaked) {
			at = i
		}
	}
	return at
}

// advance sets what is to be done for the step that the rollout is at.
func (d *deciding) advance(s step) {
	out, unserved := d.rollout.status, &d.memory.unserved
	out.Shard, out.Phase = s.Name, v1alpha1.RolloutUpdating
	for _, uid := range s.outdated {
		d.rollout.due[uid] = true
	}
	if s.serves() {
		*unserved = time.Time{}
	} else if unserved.IsZero() {
		*unserved = d.v.now
	}
	switch halted := !s.serves() && d.v.now.Sub(*unserved) >= haltedAfter; {
	case halted:
		out.Phase = v1alpha1.RolloutHalted
		out.Message = fmt.Sprintf("%s; the pods of other shards keep their revision: correct the template of %s, or roll it back", s.trouble(), layout.Target(d.v.Spec.Config.Spec.Root))
	case len(s.outdated) > 0:
		out.Message = fmt.Sprintf("%d of %d pods have the revision", s.Updated, s.Pods)
	case !s.serves():
		out.Message = s.trouble()
	default:
		out.Phase = v1alpha1.RolloutSoaking
		out.Message = fmt.Sprintf("all pods have served under the revision since %s", s.Since.UTC().Format(time.TimeOnly))
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
		return fmt.Sprintf("it lacks %d pods", s.lacking)
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
