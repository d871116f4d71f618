package explore

import (
	"fmt"
	"slices"
)

const (
	shards = 3
	ranges = 3
	slots  = 6 // pods, those that are made anew among them
	flight = 6 // policies on their way to one pod
	stale  = -1
)

// world is all there is at a moment. It is comparable.
type world struct {
	stored int32    // the State in the apiserver, see core
	read   [2]int32 // what each manager read last
	pods   [slots]pod
	want   uint8 // of Options.Wants
	// What is left of Options.
	changes, failures uint8
}

type pod struct {
	exists  bool  // it was made
	object  bool  // the apiserver knows it
	running bool  // its process does
	shard   uint8 // where it belongs

	memory, disk policy
	floor, saved int8  // the least serial that is accepted, in memory and on disk
	writes       uint8 // ranges of writes under way that the policy in force would refuse

	flight [flight]policy // sorted; never taken out, so they come again and late
	acks   uint32         // serials said to be applied, as bits; not taken out either
	nos    uint32         // serials said to be refused
}

// policy is what a pod is told.
type policy struct {
	serial int8
	keys   uint8
	refuse bool
}

// acting is what a pod may act on at this moment.
func (p pod) acting() uint8 {
	if !p.running {
		return 0
	}
	return p.memory.keys | p.writes
}

// wrong is what must never be.
func (x *explorer) wrong(w world) string {
	for i, p := range w.pods {
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
	w := world{changes: x.Changes, failures: x.Failures}
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
	for i := range n {
		w.stored = x.core.join(w.stored, i, w.pods[i].shard)
	}
	w.read = [2]int32{w.stored, w.stored}
	x.push(&w, w.stored)
	for i := range n {
		p := &w.pods[i]
		x.take(p, p.flight[0])
		p.save()
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
	// What a manager read before cannot be written, and all that it can tell of is on
	// its way already.
	for i, r := range w.read {
		if r != w.stored && !x.Flaws.BlindWrite {
			w.read[i] = stale
		}
	}
	if w.read[0] > w.read[1] {
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
			// Nothing of it matters but that it is dead.
			*p = pod{exists: true, object: p.object, shard: p.shard, acks: p.acks, nos: p.nos}
		}
		left := 0
		for _, m := range p.flight {
			if p.running && m.serial > 0 && (m.serial >= p.saved || x.Flaws.NoFloor) {
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
			p.acks &^= 1<<(known+1) - 1
			p.nos &^= 1<<known - 1
		} else if !p.object {
			p.acks, p.nos = 0, 0
		}
	}
}

func (m policy) order() int {
	n := int(m.serial)<<4 | int(m.keys)<<1
	if m.refuse {
		n |= 1
	}
	return n
}
