package edits

import "fmt"

const (
	slots  = 5 // pods, those that are made anew among them
	flight = 2 // policies on their way to one pod
)

// world is all there is at a moment. It is comparable.
type world struct {
	roots   [2]root
	pods    [slots]pod
	locks   [NoLock]holder
	outside bool // a pod outside the mesh runs
	later   bool // the apiserver serves the resources Later
	manager manager
	left    left
}

// left is what is left of Options.
type left struct{ edits, restarts, deletions uint8 }

// root is a configuration in the apiserver.
type root struct {
	exists, deleted bool
	spec            Spec
	generation      uint8
	status          recordID
}

type holder uint8

// Holders of a lock. Those from byPod on are the pods.
const (
	free holder = iota
	byOutside
	byRoot // the mesh, for the first root
	byRoot2
	byPod
)

// mesh reports whether the mesh holds the lock.
func (h holder) mesh() bool { return h == byRoot || h == byRoot2 }

// pod is a pod and what its agent does with it.
type pod struct {
	identity
	object, running bool
	leads           bool // its process takes itself for a leader
	inForce         policyID
	draining        policyID         // writes that it permitted are under way
	flight          [flight]policyID // sent and not taken yet, oldest first
	// acked and nacked are the policies that the manager knows to be in force, and rejected.
	acked, nacked policyID
	had           int8 // serial
	barred        bool
}

// identity is what does not change of a pod.
type identity struct {
	exists  bool // it was made
	root    uint8
	second  bool // it is of the root's second workload
	ordinal uint8
	both    bool // it trusts the cluster's CA, too
}

func (i identity) workload() string {
	if i.second {
		return workloads[i.root][1]
	}
	return workloads[i.root][0]
}

// last is the policy that an agent was sent last.
func (p pod) last() policyID {
	for i := flight - 1; i >= 0; i-- {
		if p.flight[i] != unknown {
			return p.flight[i]
		}
	}
	return p.inForce
}

// idle reports whether an agent without a policy for a pod has confirmed that it refuses it.
func (p pod) idle() bool { return p.inForce == removed && p.draining == unknown && p.last() == removed }

// Canonical implements search.Space.
func (x *explorer) Canonical(w world) world {
	for i := range w.pods {
		p := &w.pods[i]
		if p.exists && !p.object && !p.running && p.idle() {
			*p = pod{identity: p.identity, inForce: removed}
		}
	}
	return w
}

// Wrong implements search.Space.
func (x *explorer) Wrong(w world) string {
	for i, p := range w.pods {
		for _, a := range x.acting(w, i) {
			if x.outsideConflicts(w, p, a) {
				return fmt.Sprintf("pod %d acts while a pod outside the mesh does", i)
			}
			for j := range i {
				for _, b := range x.acting(w, j) {
					if x.conflict(p, a, w.pods[j], b) {
						return fmt.Sprintf("pods %d and %d act on one object", j, i)
					}
				}
			}
		}
	}
	return ""
}

// acting returns the policies by which a pod acts, with writes that are under way.
func (x *explorer) acting(w world, i int) (out []policyID) {
	p := w.pods[i]
	if p.draining != unknown {
		out = append(out, p.draining)
	}
	switch a := x.policies.all[p.inForce].acts; {
	case !p.running || a.kind == nothing:
	case a.kind == everything && !x.lockless && !p.leads:
	default:
		out = append(out, p.inForce)
	}
	return out
}

// conflict reports whether two pods may act on one object, each by a policy. Pods of two roots are
// of two operators.
func (x *explorer) conflict(p pod, a policyID, q pod, b policyID) bool {
	of, with := x.policies.all[a].acts, x.policies.all[b].acts
	switch {
	case p.root != q.root:
		return false
	case of.kind == everything && with.kind == everything:
		return p.leads && q.leads // without an election they do so outside the mesh, too
	case of.kind == everything || with.kind == everything:
		return true
	}
	// Without an election both pods of a shard act. Within a workload the user wants that.
	return x.policies.conflict(a, b) || of.shard == with.shard && of.locks == 0 && with.locks == 0 && p.second != q.second && of.scope.Overlaps(with.scope)
}

// outsideConflicts reports whether a pod acts beside one outside the mesh, which leads by a lock
// that the pod's policy renames, or which needs none.
func (x *explorer) outsideConflicts(w world, p pod, by policyID) bool {
	a := x.policies.all[by].acts
	if a.kind != scoped {
		return false // they elect one leader
	}
	if a.locks == 0 {
		return w.outside && p.workload() == x.outsideWorkload()
	}
	for lock, h := range w.locks {
		if h == byOutside && a.locks&(1<<lock) != 0 {
			return true
		}
	}
	return false
}
