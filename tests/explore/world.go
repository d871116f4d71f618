package explore

import (
	"fmt"
	"slices"
)

const (
	shards  = 3
	ranges  = 3
	slots   = 6 // pods, those that are made anew among them
	flight  = 9 // policies on their way to one pod
	serials = 24
	stale   = -1
	none    = -2 // no backup
)

// world is all there is at a moment. It is comparable.
type world struct {
	stored int32    // the State in the apiserver, see core
	read   [2]int32 // what each manager read last
	pods   [slots]pod
	want   uint8 // of Options.Wants
	lock   lock
	// backup is a State, a holder of the lock and the pods with an object, as bits, as they
	// were stored at some moment.
	backup     int32
	backupLock holder
	backupPods uint8
	// What is left of Options.
	changes, failures, vanish, restores uint8
}

// lock is the operator's own lock, and who takes himself for its holder.
type lock struct {
	holder  holder
	outside bool // a pod outside the mesh leads, and acts on all ranges
	proven  bool // the first manager knows that no pod outside does
}

type holder uint8

const (
	free holder = iota
	mesh
	outside
)

type pod struct {
	exists  bool  // it was made
	object  bool  // the apiserver knows it
	running bool  // its process does
	shard   uint8 // where it belongs

	memory, disk policy
	floor, saved floor // in memory and on disk
	writes       uint8 // ranges of writes under way that the policy in force would refuse

	flight [flight]policy // sorted; of two managers never taken out, so they come again and late
	acks   [serials]uint8 // sets of ranges of policies said to be applied, as bits, by serial; not taken out either
	nos    uint32         // serials said to be refused
	hidden uint8          // ranges of writes under way that its agent does not know of
}

// floor is what an agent accepts of a pod's policies.
type floor struct {
	least int8 // serial
	// barred: the pod was refused since it had the serial before.
	barred bool
}

// had is the highest serial of a policy that the pod has had.
func (f floor) had() int8 {
	if f.barred {
		return f.least - 1
	}
	return f.least
}

// knows reports whether the pod is a member as one that has had a serial, for all that its
// agent knows.
func (f floor) knows(required int8) bool {
	return required == 0 || !f.barred && f.least >= required
}

// policy is what a pod is sent.
type policy struct {
	serial int8
	keys   uint8
	refuse bool
	// required is the least serial that the pod must have had, without a refusal since.
	required int8
}

// acting is what a pod may act on at this moment.
func (p pod) acting() uint8 {
	return p.memory.keys | p.writes | p.hidden
}

// wrong is what must never be.
func (x *explorer) wrong(w world) string {
	for i, p := range w.pods {
		if w.lock.outside && p.acting() != 0 {
			return fmt.Sprintf("pod %d acts on ranges %03b while a pod outside the mesh leads", i, p.acting())
		}
		for j, q := range w.pods[:i] {
			if p.shard != q.shard && p.acting()&q.acting() != 0 {
				return fmt.Sprintf("pods %d and %d of shards %d and %d act on ranges %03b", j, i, q.shard, p.shard, p.acting()&q.acting())
			}
		}
	}
	if !x.core.get(w.stored).disjoint {
		return "two shards hold a range"
	}
	return ""
}

// begin is the world with all in order.
func (x *explorer) begin() (world, error) {
	w := world{changes: x.Changes, failures: x.Failures, vanish: x.Vanish, restores: x.Restores, backup: none, lock: lock{holder: mesh, proven: true}}
	n := 0
	for shard, count := range x.Members {
		for range count {
			if n == slots-2 {
				return w, fmt.Errorf("exploring: more than %d pods", n)
			}
			w.pods[n] = newPod(uint8(shard))
			n++
		}
	}
	w.stored = x.core.want(x.core.first(), 0)
	if x.Outside && x.Wants[0] == [shards]uint8{} {
		w.lock = lock{holder: outside, outside: true}
	}
	for i := range n {
		w.stored = x.core.join(w.stored, i, w.pods[i].shard)
	}
	w.read = [2]int32{w.stored, w.stored}
	if x.alone() {
		w.read[1] = stale
	}
	x.push(&w, w.stored)
	for i := range n {
		p := &w.pods[i]
		for _, m := range p.flight {
			if m != (policy{}) {
				x.take(p, m)
				p.save()
			}
		}
	}
	return w, x.err
}

// newPod is one that is refused, and is known to be.
func newPod(shard uint8) pod {
	no := policy{refuse: true}
	return pod{exists: true, object: true, running: true, shard: shard, memory: no, disk: no}
}

// canonical forgets what makes no difference.
func (x *explorer) canonical(w *world) {
	// What a manager read before cannot be written, and all that it can send is on
	// its way already.
	for i, r := range w.read {
		if r != w.stored && !x.Flaws.BlindWrite {
			w.read[i] = stale
		}
	}
	if w.read[0] > w.read[1] && !x.alone() {
		w.read[0], w.read[1] = w.read[1], w.read[0]
	}
	info := x.core.get(w.stored)
	for i := range w.pods {
		p := &w.pods[i]
		if !p.exists {
			continue
		}
		x.acknowledge(p)
		if !p.running {
			// Nothing of it matters but what it has asked for, and that it is dead.
			*p = pod{exists: true, object: p.object, shard: p.shard, writes: p.writes | p.hidden, acks: p.acks, nos: p.nos}
		}
		left := 0
		for _, m := range p.flight {
			if x.alone() && p.memory.covers(m) && p.disk == p.memory && p.saved == p.floor {
				continue // it changes nothing
			}
			if p.running && m.serial > 0 && (m.serial >= p.saved.least || x.Flaws.NoFloor) {
				p.flight[left] = m
				left++
			}
		}
		clear(p.flight[left:])
		slices.SortFunc(p.flight[:left], func(a, b policy) int { return a.order() - b.order() })
		if x.Flaws.BlindWrite {
			continue
		}
		// What the stored State knows is not learnt again.
		if known := info.members[i]; known != nobody {
			if !x.alone() {
				clear(p.acks[:known+1])
			}
			p.nos &^= 1<<known - 1
		} else if !p.object {
			p.acks, p.nos = [serials]uint8{}, 0
		}
	}
}

// covers reports whether an agent that may take o may as well take m, which is the same.
func (m policy) covers(o policy) bool {
	return m != policy{} && m.serial == o.serial && m.keys == o.keys && m.refuse == o.refuse && m.required <= o.required
}

func (m policy) order() int {
	n := int(m.required)<<12 | int(m.serial)<<4 | int(m.keys)<<1
	if m.refuse {
		n |= 1
	}
	return n
}
