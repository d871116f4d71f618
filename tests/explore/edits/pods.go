package edits

import "github.com/ctrlmesh/ctrlmesh/tests/explore/search"

type visit = func(world, search.Step)

// pod visits what may happen to a pod and its agent. It reports whether something happens by
// itself.
func (x *explorer) pod(w world, i int, next visit) (moves bool) {
	try := func(what string, possible bool, change func(w *world, p *pod)) {
		if !possible {
			return
		}
		n := w
		change(&n, &n.pods[i])
		next(n, search.Step{What: what, A: i})
		moves = true
	}
	p := w.pods[i]
	try("pod's agent takes", p.flight[0] != unknown && (p.draining == unknown || x.policies.all[p.inForce].acts.kind == nothing),
		func(_ *world, p *pod) { x.take(p) })
	try("pod's writes end", p.draining != unknown, func(_ *world, p *pod) { p.draining, p.acked = unknown, p.inForce })
	try("pod's process ends", p.running && !p.object && p.draining == unknown, x.end)
	try("pod stops leading", p.leads && x.policies.all[p.inForce].acts.kind != scoped, func(w *world, p *pod) { w.stopLeading(i) })
	if slot := w.freeSlot(); slot > 0 {
		try("pod is made anew", p.exists && !p.object && !x.options.Uninstalls && !w.replaced(i), func(w *world, p *pod) {
			w.pods[slot] = x.newPod(*w, p.identity)
		})
	}
	moved := moves
	contends := p.running && !p.leads && p.root == 0 && x.policies.all[p.inForce].acts.kind == everything
	try("pod acquires the lock", contends && w.locks[LockA] == free, func(w *world, p *pod) {
		p.leads, w.locks[LockA] = true, byPod+holder(i)
	})
	return moved
}

// take is what an agent does with the next policy.
func (x *explorer) take(p *pod) {
	id := p.flight[0]
	copy(p.flight[:], p.flight[1:])
	p.flight[flight-1] = unknown
	m := x.policies.all[id]
	least := int64(p.had)
	if p.barred {
		least++
	}
	if m.sealed && !m.refuse && (m.serial < least || m.required > 0 && (p.barred || m.required > int64(p.had))) {
		p.nacked = id
		return
	}
	if p.running && id != p.inForce && x.acts(*p) {
		p.draining = p.inForce
	}
	p.inForce = id
	p.had = max(p.had, int8(m.serial))
	p.barred = m.refuse && p.had > 0
	p.nacked = unknown
	if p.draining == unknown {
		p.acked = id
	}
}

// acts reports whether a pod may have writes under way.
func (x *explorer) acts(p pod) bool {
	kind := x.policies.all[p.inForce].acts.kind
	return kind == scoped || kind == everything && (p.leads || x.lockless)
}

// end is the end of a pod's process. Its writes go on.
func (x *explorer) end(w *world, p *pod) {
	if x.acts(*p) {
		p.draining = p.inForce
	}
	for i := range w.pods {
		if &w.pods[i] == p {
			w.stopLeading(i)
		}
	}
	p.running = false
}

// stopLeading ends a process's belief that it leads, and with it the lease of a lock.
func (w *world) stopLeading(i int) {
	w.pods[i].leads = false
	for lock, h := range w.locks {
		if h == byPod+holder(i) {
			w.locks[lock] = free
		}
	}
}

// replaced reports whether a pod has a successor.
func (w world) replaced(i int) bool {
	p := w.pods[i]
	for j, q := range w.pods {
		if j != i && q.object && q.root == p.root && q.second == p.second && q.ordinal == p.ordinal {
			return true
		}
	}
	return false
}

// freeSlot returns the slot of a pod that is made anew; 0 if there is none.
func (w world) freeSlot() int {
	for i, p := range w.pods {
		if !p.exists && i > 0 {
			return i
		}
	}
	return 0
}

// outsider visits what a pod outside the mesh may do.
func (x *explorer) outsider(w world, next visit) {
	if !w.outside {
		return
	}
	ends := w
	ends.outside = false
	for lock, h := range w.locks {
		n := w
		switch h {
		case free:
			n.locks[lock] = byOutside
			next(n, search.Step{What: "pod outside acquires the lock", A: lock})
		case byOutside:
			n.locks[lock], ends.locks[lock] = free, free
			next(n, search.Step{What: "pod outside stops leading by the lock", A: lock})
		}
	}
	next(ends, search.Step{What: "pod outside ends"})
}
