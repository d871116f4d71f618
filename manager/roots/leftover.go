package roots

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// leftovers are the pods without a shard that were deleted, or ended, before the first
// grant: their processes may run on, and act on everything. They are refused, and the
// first grant waits until their agents have confirmed that.
type leftovers struct {
	seen map[string]handover.Member // pods that exist, by uid
	gone map[string]leftover        // by uid
}

type leftover struct {
	handover.Member
	since time.Time // when this leader saw that it is gone
}

// observe notes which pods are gone, and forgets those that act on nothing by now. Without
// an agent that is so a request timeout after it fell silent and the pod was gone.
func (l *leftovers) observe(rt *root, v view, state handover.State, now time.Time) {
	if state.Holds() {
		*l = leftovers{}
		return
	}
	seen := map[string]handover.Member{}
	for _, p := range v.pods {
		if _, member := state.Members[string(p.UID)]; !member && p.Spec.NodeName != "" {
			seen[string(p.UID)] = handover.Member{UID: string(p.UID), Name: p.Name, Node: p.Spec.NodeName}
		}
	}
	gone := map[string]leftover{}
	for uid, m := range l.seen {
		_, member := state.Members[uid]
		if p := v.all[uid]; !member && (p == nil || compile.Ended(p)) {
			gone[uid] = leftover{m, now}
		}
	}
	for uid, g := range l.gone {
		if _, again := seen[uid]; !again && !rt.over(g, v, now) {
			gone[uid] = g
		}
	}
	l.seen, l.gone = seen, gone
}

// over reports whether a pod that is gone acts on nothing any more.
func (rt *root) over(g leftover, v view, now time.Time) bool {
	o, policy := rt.Observe(g.Node, g.UID), v.world.Compiled.Policies[types.UID(g.UID)]
	if o.Connected {
		return policy.PodPolicy != nil && policy.Refuse != "" && o.Version == policy.Version
	}
	since := g.since
	if silent := rt.silentSince(o); since.Before(silent) {
		since = silent
	}
	return expired(since, v.world.RequestTimeout, now)
}

// members are those to be refused, sorted by uid.
func (l *leftovers) members() []handover.Member {
	var out []handover.Member
	for _, uid := range slices.Sorted(maps.Keys(l.gone)) {
		out = append(out, l.gone[uid].Member)
	}
	return out
}

// names describes them, for people.
func (l *leftovers) names() []string {
	var out []string
	for _, m := range l.members() {
		out = append(out, fmt.Sprintf("pod %s on node %s, which was deleted or has ended, and may run on", m.Name, m.Node))
	}
	return out
}
