package decide

import (
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// maxRolledBack bounds the revisions on record. A StatefulSet keeps as many by default.
const maxRolledBack = 10

// Previous is what is known of the revision that PreviousRevision returned.
type Previous struct {
	Revision string
	// Problem is why the template cannot be restored, and what to do; empty if it can.
	Problem string
}

// Rollback restores the template of a StatefulSet, if the StatefulSet still has the revision and
// the generation of this record. Its status is written before.
type Rollback struct{ v1alpha1.RolledBackRevision }

// refusal is why a rollback was refused.
type refusal struct{ revision, why string }

// RollbackRefused returns what a leader remembers after a rollback was refused.
func (m Memory) RollbackRefused(r *Rollback, why string) Memory {
	m.refusal = refusal{r.Revision, why}
	return m
}

// PreviousRevision returns the revision whose template a halted rollout is to restore, if it must
// be read whether that is possible; empty if not. It needs the spec, the state, the pods and the
// revision of f.
func PreviousRevision(f Facts) string {
	v := &view{Facts: f}
	spec := f.Spec.Config.Spec.Root.Rollout
	if spec == nil || !spec.AutoRollback || v.lastRollout().Phase != v1alpha1.RolloutHalted || v.onRecord() != nil {
		return ""
	}
	return v.previousRevision()
}

// rolledBack returns the revisions on record as rolled back.
func (v *view) rolledBack() []v1alpha1.RolledBackRevision {
	if r := v.Stored.Status.Root; r != nil && r.Rollout != nil {
		return r.Rollout.RolledBack
	}
	return nil
}

// onRecord returns the rollback of the current revision that was decided before; nil if there is
// none.
func (v *view) onRecord() *v1alpha1.RolledBackRevision {
	return collect.Find(v.rolledBack(), func(r v1alpha1.RolledBackRevision) bool { return r.Revision == v.Revision.Update })
}

// appliedAgain returns the rollback of the current revision, if the StatefulSet has been changed
// since it was decided; otherwise nil. A revision is rolled back once, so that the manager never
// fights with a user or a controller that applies the template again.
func (v *view) appliedAgain() *v1alpha1.RolledBackRevision {
	r := v.onRecord()
	if r == nil || !v.Spec.Config.Spec.Root.Rollout.AutoRollback || r.Generation == v.Revision.Generation {
		return nil
	}
	return r
}

// restored reports whether the current revision has just been restored by a rollback. It has served
// before, so pods that get it again do not soak.
func (v *view) restored() bool {
	return slices.ContainsFunc(v.rolledBack(), func(r v1alpha1.RolledBackRevision) bool {
		return r.To == v.Revision.Update && r.Generation+1 == v.Revision.Generation
	})
}

// haltAgain halts a revision that was rolled back before. No pod gets it.
func (d *deciding) haltAgain(steps []step) {
	out, r := d.rollout.status, d.v.appliedAgain()
	d.rollout.queries = nil
	for _, s := range steps {
		d.rollout.later[s.Name] = true
	}
	out.Phase = v1alpha1.RolloutHalted
	out.Message = fmt.Sprintf("this revision was rolled back before (%s), and the StatefulSet has been changed since: no pod gets it; change the template of %s, or set spec.root.rollout.autoRollback to false to roll it out",
		r.Reason, layout.Target(d.v.Spec.Config.Spec.Root))
}

// rollBack decides whether a rollout that has halted is rolled back.
func (d *deciding) rollBack() {
	v, out, why := d.v, d.rollout.status, d.rollout.halted
	if why == "" || !v.Spec.Config.Spec.Root.Rollout.AutoRollback {
		return
	}
	r := v.onRecord()
	if r == nil {
		to := v.previousRevision()
		switch {
		case to == "":
			out.Message += "; it is not rolled back, because no pod has a revision to go back to"
			return
		case v.Previous.Revision != to:
			return // PreviousRevision asks for it
		case v.Previous.Problem != "":
			out.Message += "; it is not rolled back: " + v.Previous.Problem
			return
		}
		r = &v1alpha1.RolledBackRevision{Revision: out.Revision, To: to, Generation: v.Revision.Generation, Reason: why}
		out.RolledBack = append(out.RolledBack, *r)
		out.RolledBack = out.RolledBack[max(0, len(out.RolledBack)-maxRolledBack):]
	}
	d.rollout.back = &Rollback{*r}
	out.Message = fmt.Sprintf("%s; the template of %s is being rolled back to revision %s", why, layout.Target(v.Spec.Config.Spec.Root), r.To)
	if refused := d.memory.refusal; refused.revision == r.Revision {
		out.Message += ": " + refused.why
	}
}

// previousRevision returns the revision that the pods of the last shard have, of those that do
// not have the current one: it has served longest. It is empty if there are no such pods, or if
// that revision was rolled back, too.
func (v *view) previousRevision() string {
	at, oldest := -1, (*corev1.Pod)(nil)
	shards := layout.Shards(v.Spec.Config.Spec.Root)
	for uid, m := range v.Stored.State.Members {
		pod, i := v.Pods.ByUID[uid], slices.IndexFunc(shards, func(s layout.Shard) bool { return s.Name == m.Shard })
		if pod == nil || !v.exists(m) || v.hasRevision(pod) || v.failed(revisionOf(pod)) {
			continue
		}
		if i > at || i == at && oldest != nil && pod.Name < oldest.Name {
			at, oldest = i, pod
		}
	}
	if oldest == nil {
		return ""
	}
	return revisionOf(oldest)
}

// failed reports whether a revision is unknown, or was rolled back.
func (v *view) failed(revision string) bool {
	return revision == "" || slices.ContainsFunc(v.rolledBack(), func(r v1alpha1.RolledBackRevision) bool { return r.Revision == revision })
}

func revisionOf(p *corev1.Pod) string { return p.Labels[appsv1.ControllerRevisionHashLabelKey] }
