package explore

import "math/bits"

// manager visits what a manager may do.
func (x *explorer) manager(w world, i int) {
	read := w.read[i]
	if read != w.stored {
		x.reads(w, i)
		if !x.Flaws.BlindWrite {
			return // all that it would write is refused
		}
	}
	if x.alone() {
		j := x.judge(w, read)
		read = x.core.others(read, j.othersIdle, j.locksHeld)
		if w.failures > 0 {
			n := w
			n.failures--
			x.reads(n, i)
		}
	}
	write := func(n world, state int32, what string, a, b int) {
		if state == read {
			return
		}
		if x.alone() {
			state = x.core.others(state, false, false) // it is asked for anew each time
		}
		n.stored, n.read[i] = state, state
		x.push(&n, state)
		x.next(n, what, a, b)
	}
	ready := x.judge(w, read).ready
	for k := range x.Wants {
		n := w
		if uint8(k) != w.want {
			if w.changes == 0 {
				continue
			}
			n.want = uint8(k)
			n.changes--
		}
		write(n, x.core.wants(read, k, ready), "wanted: target, by shards ready", k, int(ready))
	}
	for j, p := range w.pods {
		if p.exists {
			x.hear(w, read, j, func(state int32, what string, serial int) { write(w, state, what, j, serial) })
		}
	}
}

// reads visits what becomes of a manager that reads the State, or takes over.
func (x *explorer) reads(w world, i int) {
	n := w
	if x.Flaws.SerialReset {
		n.stored = x.core.reset(n.stored)
		x.push(&n, n.stored)
	}
	if x.alone() {
		n.stored = x.core.read(n.stored)
		n.lock.proven = n.lock.proven && !x.Outside
		for j := range n.pods {
			n.pods[j].endStream() // agents say anew what is so
		}
		x.push(&n, n.stored)
	}
	n.read[i] = n.stored
	x.next(n, "manager reads", i, 0)
}

// endStream forgets what is on its way between a pod's agent and a manager.
func (p *pod) endStream() {
	p.flight, p.acks, p.nos = [flight]policy{}, [serials]uint8{}, 0
}

// hear writes what there is to say of a pod.
func (x *explorer) hear(w world, read int32, j int, write func(state int32, what string, serial int)) {
	p, info := w.pods[j], x.core.get(read)
	write(x.reported(w, read, j))
	if info.members[j] == nobody {
		if p.object && (!x.alone() || p.waits(info.minSerial)) {
			write(x.core.join(read, j, p.shard), "joins: pod, shard", int(p.shard))
		}
		return
	}
	for s, keys := range p.acks {
		switch serial := int(info.serial[p.shard]); {
		case keys == 0:
		case s == serial && keys&(1<<info.sent[p.shard]) != 0:
			write(x.core.applied(read, j, s), "applied: pod, serial", s)
		case x.Flaws.SerialAlone:
			write(x.core.applied(read, j, min(s, serial)), "applied: pod, serial", s)
		}
	}
	for b := p.nos; b != 0; b &= b - 1 {
		s := bits.TrailingZeros32(b)
		write(x.core.refused(read, j, s), "refused: pod, serial", s)
	}
	if !p.running && (p.writes == 0 || x.Flaws.GoneEarly) || !p.object && x.Flaws.GoneUnproven {
		write(x.core.gone(read, j), "gone: pod", 0)
	}
}

// known is the highest serial that a pod can have had by a State.
func (in *info) known(pod int, shard uint8) int {
	if in.members[pod] == nobody {
		return int(in.minSerial)
	}
	return int(in.serial[shard])
}

// waits reports whether a pod acts on nothing, as its agent has confirmed.
func (p pod) waits(minSerial int8) bool {
	return p.running && p.memory.keys == 0 && p.memory.serial == minSerial && p.writes == 0 && p.disk == p.memory && p.saved == p.floor
}

// locks visits what may happen to the operator's own lock.
func (x *explorer) locks(w world) {
	try := func(what string, possible bool, l lock) {
		if n := w; possible {
			n.lock = l
			x.next(n, what, 0, 0)
		}
	}
	l := w.lock
	leads := w.read[0] == w.stored
	try("mesh acquires the lock", leads && l.holder == free, lock{holder: mesh, outside: l.outside, proven: true})
	try("mesh has held the lock for long", leads && l.holder == mesh && !l.proven && !l.outside, lock{holder: mesh, proven: true})
	try("mesh releases the lock", leads && l.holder == mesh && (l.proven || x.Flaws.LockByName) && x.releasesLock(w), lock{outside: l.outside})
	try("pod outside acquires the lock", l.holder == free, lock{holder: outside, outside: true})
	try("pod outside stops", l.outside && l.holder != outside, lock{holder: l.holder, proven: l.proven})
	try("pod outside ends", l.holder == outside, lock{})
}

// restore visits a backup of etcd and its restore. The streams of agents end, and what was
// on its way with them. A pod that was deleted since exists again: if its process has ended
// then its kubelet starts it, and its agent knows nothing of it. A backup that was taken
// while the mesh did not hold the lock is left out: a pod outside the mesh may acquire that
// at once, before anybody sees the restore.
func (x *explorer) restore(w world) {
	n := w
	if w.backup == none && w.lock.holder != mesh {
		return
	}
	if w.backup == none {
		n.backup, n.backupLock = x.core.read(w.stored), w.lock.holder
		for j, p := range w.pods {
			if p.object {
				n.backupPods |= 1 << j
			}
		}
		x.next(n, "backup", 0, 0)
		return
	}
	n.restores--
	n.stored, n.read[0], n.lock.holder, n.lock.proven = w.backup, stale, w.backupLock, !x.Outside
	n.backup, n.backupLock, n.backupPods = none, free, 0
	for j := range n.pods {
		p := &n.pods[j]
		p.endStream()
		p.object = w.backupPods&(1<<j) != 0
		if p.object && !p.running {
			again := newPod(p.shard)
			again.writes = p.writes
			*p = again
		}
	}
	x.next(n, "restore", 0, 0)
}
