package status

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/idle"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// rootConditions is the input for the conditions of a root.
type rootConditions struct {
	workload *workload
	out      *v1alpha1.ShardingConfigStatus
	// word is the state of all handovers.
	word       string
	withdrawn  bool
	leaderless *locks.Obstacle
	// members counts the ready members, waits names what handovers and restarts wait for, and
	// few names the missing pods.
	members, waits, few string
}

func (w *workload) conditions(out *v1alpha1.ShardingConfigStatus) {
	pods := layout.Describe(w.Config.Spec.Root)
	r := rootConditions{
		workload: w, out: out, word: out.Root.Handover, withdrawn: compile.Withdrawn(w.Config), leaderless: MissingLeaders(w.Leaders),
		members: fmt.Sprintf("%d of %d members ready in %d shards", out.ReadyMembers, out.Members, out.Shards),
		waits:   w.waits(out.Root),
		few: fmt.Sprintf("%s lacks pods (%d): shard %s has fewer than it needs; scale the workload up, or the shards down",
			pods, w.missing, strings.Join(clipped(w.lacking), ", ")),
	}
	if w.Config.Spec.FailurePolicy == v1alpha1.FailOpen {
		r.members += openWarning
	}
	c := conditionsOf{out, w.Config.Generation, w.Now}
	c.leading(r.leaderless)
	c.set(v1alpha1.ConditionUndivided, undividedCondition(r.workload.Undivided.Undivided))
	c.set(v1alpha1.ConditionShardIdle, idleCondition(out.Root.Shards))
	c.set(v1alpha1.ConditionReady, first(r.settled(), r.withoutShards, r.brokenOrImpeded, r.underWay))
	c.set(v1alpha1.ConditionProgressing, r.progressing())
	// A restarted pod is missing for a moment.
	c.set(v1alpha1.ConditionDegraded, r.degraded(c.unreadyFor() > Grace))
}

// withoutShards returns Ready of a root without shards.
func (r rootConditions) withoutShards() *condition {
	switch {
	case r.workload.Problem != nil:
		return &condition{false, reasonOf(r.workload.Problem), r.workload.Problem.Error()}
	case r.withdrawn && (r.word != Settled || len(r.workload.State.Members) > 0):
		return &condition{false, v1alpha1.ReasonWithdrawing, "the shards are being withdrawn" + r.waits}
	case r.withdrawn:
		return &condition{false, v1alpha1.ReasonDisabled, "spec.root.disable is set: the pods run unsharded"}
	case len(r.workload.Pods) == 0 && r.workload.Obstacle != nil && r.workload.Obstacle.Reason == v1alpha1.ReasonOutsidePods:
		return impeded(r.workload.Obstacle, r.members)
	case len(r.workload.Pods) == 0:
		return &condition{false, v1alpha1.ReasonTargetNotFound,
			fmt.Sprintf("no pod of %s in namespace %s has label %s: \"true\"; set it on the pod template", layout.Describe(r.workload.Config.Spec.Root), r.workload.Config.Namespace, v1alpha1.EnableProxyLabel)}
	}
	return nil
}

// brokenOrImpeded returns Ready of a root that needs the user's action, or whose shards may
// not act.
func (r rootConditions) brokenOrImpeded() *condition {
	broken := slices.IndexFunc(r.workload.verdicts, verdict.broken)
	switch {
	case r.workload.Obstacle != nil && !r.workload.State.Holds():
		return impeded(r.workload.Obstacle, r.members)
	case broken >= 0 && !r.workload.State.RolledBack:
		return &condition{false, r.workload.verdicts[broken].reason, r.members + "; " + describe(r.workload.verdicts, verdict.unready)}
	case r.workload.Obstacle != nil:
		return impeded(r.workload.Obstacle, r.members)
	case r.word == Blocked:
		return &condition{false, v1alpha1.ReasonBlocked, r.members + "; " + blockedMessage + r.waits}
	case r.workload.missing > 0:
		return &condition{false, v1alpha1.ReasonNotEnoughPods, r.members + "; " + r.few}
	}
	return nil
}

// underWay returns Ready of a root that will become ready by itself.
func (r rootConditions) underWay() *condition {
	switch {
	case r.word == Releasing || r.word == Granting:
		return &condition{false, v1alpha1.ReasonHandingOver, r.members + "; " + handingOverMessage + r.waits}
	case r.word == Waiting:
		return &condition{false, v1alpha1.ReasonWaiting, r.members + r.waits}
	case r.leaderless != nil:
		return impeded(r.leaderless, r.members)
	case r.out.ReadyMembers < r.out.Members:
		return &condition{false, v1alpha1.ReasonStarting, r.members + "; " + describe(r.workload.verdicts, verdict.unready)}
	case r.word == Restarting:
		return &condition{false, v1alpha1.ReasonRestarting, r.members + "; members with objects of other shards in their caches are restarted" + r.waits}
	}
	return nil
}

// settled returns Ready of a root that is ready.
func (r rootConditions) settled() condition {
	if r.workload.surplus > 0 {
		return condition{true, v1alpha1.ReasonReplicasSurplus,
			fmt.Sprintf("%s; %d more pods of %s are in no shard, in standby: raise spec.root.auto, or scale down", r.members, r.workload.surplus, layout.Describe(r.workload.Config.Spec.Root))}
	}
	return condition{true, v1alpha1.ReasonSettled, r.members}
}

func (r rootConditions) progressing() condition {
	switch {
	case r.workload.Problem != nil:
		return condition{false, reasonOf(r.workload.Problem), ""}
	case r.word == Releasing || r.word == Granting || r.word == Blocked:
		return condition{true, v1alpha1.ReasonHandingOver, handingOverMessage + r.waits}
	case r.word == Restarting:
		return condition{true, v1alpha1.ReasonRestarting, cmp.Or(r.workload.Restarting, "members are to be restarted")}
	case r.word == Waiting:
		return condition{true, v1alpha1.ReasonWaiting, r.members + r.waits}
	case slices.ContainsFunc(r.workload.verdicts, verdict.waiting) && r.workload.surplus == 0:
		return condition{true, v1alpha1.ReasonStarting, describe(r.workload.verdicts, verdict.waiting)}
	case r.workload.Stamping != nil && !r.workload.Stamping.Done:
		return condition{true, v1alpha1.ReasonStamping, stampingMessage}
	case r.replacesPods():
		return condition{true, v1alpha1.ReasonReplacingPods, Rollout(r.out.Root.Rollout)}
	}
	return condition{false, v1alpha1.ReasonSettled, ""}
}

// replacesPods reports whether a rollout goes on by itself.
func (r rootConditions) replacesPods() bool {
	rollout := r.out.Root.Rollout
	return rollout != nil && (rollout.Phase == v1alpha1.RolloutUpdating || rollout.Phase == v1alpha1.RolloutSoaking)
}

// Rollout says in one line what a rollout waits for.
func Rollout(r *v1alpha1.RolloutStatus) string {
	if r.Shard == "" {
		return fmt.Sprintf("revision %s: %s", r.Revision, r.Message)
	}
	return fmt.Sprintf("revision %s, shard %s: %s", r.Revision, r.Shard, r.Message)
}

// rolloutTrouble returns Degraded of a rollout that needs the user's action; nil if it does not.
func rolloutTrouble(rollout *v1alpha1.RolloutStatus) *condition {
	switch {
	case rollout == nil:
	case rollout.Phase == v1alpha1.RolloutBlocked:
		return &condition{true, v1alpha1.ReasonRolloutBlocked, rollout.Message}
	case rollout.Phase == v1alpha1.RolloutHalted:
		return &condition{true, v1alpha1.ReasonRolloutHalted, Rollout(rollout)}
	}
	return nil
}

func (r rootConditions) degraded(long bool) condition {
	broken := slices.IndexFunc(r.workload.verdicts, verdict.broken)
	switch {
	case r.workload.Problem != nil:
		return condition{true, reasonOf(r.workload.Problem), r.workload.Problem.Error()}
	case len(r.workload.Conflicts) > 0:
		return condition{true, v1alpha1.ReasonConflict, conflict(r.workload.Config.Namespace, r.workload.Conflicts[0])}
	case broken >= 0:
		return condition{true, r.workload.verdicts[broken].reason, describe(r.workload.verdicts, verdict.broken)}
	case r.word == Blocked:
		return condition{true, v1alpha1.ReasonBlocked, blockedMessage + r.waits}
	case !r.withdrawn && r.workload.missing > 0 && len(r.workload.Pods) > 0 && long:
		return condition{true, v1alpha1.ReasonNotEnoughPods, r.few}
	case r.workload.Obstacle != nil && r.workload.Obstacle.Reason.Permanent() && long:
		return condition{true, r.workload.Obstacle.Reason, r.workload.Obstacle.Message}
	}
	if c := rolloutTrouble(r.out.Root.Rollout); c != nil {
		return *c
	}
	return r.workload.memberTroubles(r.workload.Config, r.workload.verdicts)
}

// undividedCondition returns the condition about resources that several shards write, those
// with something in common first.
func undividedCondition(found []v1alpha1.UndividedResource) condition {
	if len(found) == 0 {
		return condition{false, v1alpha1.ReasonDivided, ""}
	}
	reason, how, named := v1alpha1.ReasonUndividedWrites, "several shards write to the same namespaces or objects of", found
	if i := slices.IndexFunc(found, func(u v1alpha1.UndividedResource) bool { return u.Common == 0 }); i == 0 {
		reason, how = v1alpha1.ReasonUndividedWatches, "several shards watch in all namespaces, and write,"
	} else if i > 0 {
		named = found[:i]
	}
	var resources []string
	for _, u := range named {
		text := schema.GroupResource{Group: u.Group, Resource: u.Resource}.String()
		if len(u.Namespaces) > 0 {
			text += " (as in " + strings.Join(u.Namespaces, ", ") + ")"
		}
		resources = append(resources, text)
	}
	return condition{true, reason, how + " " + strings.Join(clipped(resources), ", ") +
		", which spec.root does not divide: if they reconcile the same objects, add the resource to spec.root.resourceSelector; see status.root.undivided"}
}

// idleCondition returns the condition about shards that never write.
func idleCondition(shards []v1alpha1.ShardStatus) condition {
	var named []string
	for _, s := range shards {
		if s.Idle {
			named = append(named, fmt.Sprintf("shard %s, which owns %d objects", s.Name, s.Weight))
		}
	}
	if len(named) == 0 {
		return condition{false, v1alpha1.ReasonHealthy, ""}
	}
	return condition{true, v1alpha1.ReasonNoWrites, fmt.Sprintf("%s: pods watch them and have written nothing for %s, while other shards write: they may wait for an election that the mesh does not see; look at their logs",
		strings.Join(clipped(named), "; "), idle.After)}
}

// waits names what handovers and restarts wait for: ", waiting for ...".
func (w *workload) waits(root *v1alpha1.RootStatus) string {
	var all []string
	for _, h := range root.Handovers {
		for _, one := range h.WaitsFor {
			if !slices.Contains(all, one) {
				all = append(all, one)
			}
		}
	}
	if len(all) == 0 && w.Restarting != "" {
		all = []string{w.Restarting}
	}
	if len(all) == 0 {
		all = slices.Concat(w.Unconfirmed, w.unready())
	}
	if len(all) == 0 && w.Obstacle != nil {
		all = []string{w.Obstacle.Message}
	}
	if len(all) == 0 {
		return ""
	}
	return ", waiting for " + strings.Join(clipped(all), "; ")
}

// clipped returns the first few texts, and the number of the others.
func clipped(in []string) []string {
	if len(in) <= maxNamed {
		return in
	}
	return append(slices.Clone(in[:maxNamed]), fmt.Sprintf("and %d more", len(in)-maxNamed))
}

func reasonOf(err error) v1alpha1.Reason {
	if p, ok := errors.AsType[*compile.Problem](err); ok {
		return p.Reason
	}
	return v1alpha1.ReasonInvalid
}
