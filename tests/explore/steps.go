package explore

// successors visits all that may happen next.
func (x *explorer) successors(w world) {
	for i := range w.read {
		if i == 0 || w.read[1] != w.read[0] && !x.alone() {
			x.manager(w, i)
		}
	}
	if w.restores > 0 {
		x.restore(w)
	}
	if x.Outside {
		x.locks(w)
	}
	for i, p := range w.pods {
		if p.exists {
			x.pod(w, i)
		}
	}
}

// pod visits what may happen to a pod and its agent.
func (x *explorer) pod(w world, i int) {
	try := func(what string, arg int, change func(w *world, p *pod)) {
		n := w
		change(&n, &n.pods[i])
		if n != w {
			x.next(n, what, i, arg)
		}
	}
	p := w.pods[i]
	try("pod's writes end", 0, func(_ *world, p *pod) { p.writes, p.hidden = 0, 0 })
	if !p.running {
		return
	}
	for _, m := range p.flight {
		if m != (policy{}) && m != p.memory {
			try("pod's agent takes, serial", int(m.serial), func(_ *world, p *pod) {
				x.take(p, m)
				x.received(p, m)
			})
		}
	}
	try("pod's agent saves", 0, func(_ *world, p *pod) { p.save() })
	if !p.object {
		try("pod's process ends", 0, func(_ *world, p *pod) { p.running, p.writes = false, p.writes|p.memory.keys })
	}
	if !p.object && x.Restores > 0 && !p.memory.refuse {
		try("pod's agent refuses it", 0, func(_ *world, p *pod) { x.take(p, policy{refuse: true}) })
	}
	x.vanish(w, i, try)
	if w.failures == 0 {
		return
	}
	if p.disk != p.memory || p.saved != p.floor || x.Flaws.ForgottenWrites {
		try("pod's agent crashes", 0, func(w *world, p *pod) {
			p.crash()
			if x.alone() {
				x.push(w, w.stored) // to the next one's stream
			}
			if x.Flaws.ForgottenWrites {
				p.forget()
			}
			w.failures--
		})
	}
	if !p.memory.refuse {
		try("pod's agent takes an old refusal", 0, func(w *world, p *pod) {
			x.take(p, policy{refuse: true})
			w.failures--
		})
	}
}

// vanish visits the deletion of a pod's object, by force or not.
func (x *explorer) vanish(w world, i int, try func(string, int, func(*world, *pod))) {
	left := func(w *world) *uint8 {
		if x.Restores > 0 {
			return &w.vanish
		}
		return &w.failures
	}
	if *left(&w) == 0 || !w.pods[i].object {
		return
	}
	try("pod vanishes, and is made anew", 0, func(w *world, p *pod) {
		p.object = false
		*left(w)--
		for j := range w.pods {
			if !w.pods[j].exists {
				w.pods[j] = newPod(p.shard)
				break
			}
		}
		x.push(w, w.stored)
	})
}

// stuck says what does not end although failures do, messages arrive, and all do
// what they should.
func (x *explorer) stuck(w world) string {
	w.lock = lock{holder: mesh, proven: true}
	if x.alone() && w.read[0] != w.stored {
		w.stored = x.core.read(w.stored)
	}
	for range 50 {
		before := w
		w.stored = x.core.wants(x.core.others(w.stored, true, true), int(w.want), x.judge(w, w.stored).ready)
		for i := range w.pods {
			if w.pods[i].exists {
				w.stored = x.answer(&w, i)
			}
		}
		if w == before {
			info := x.core.get(w.stored)
			switch {
			case info.moves > 0 || !info.settled:
				return "the handover does not end"
			case x.judge(w, w.stored).ready == 1<<shards-1 && info.held != x.Wants[w.want]:
				return "the handover ends, but not with what is wanted"
			}
			return ""
		}
	}
	return "the handover does not end: it goes on for ever"
}

// answer lets an agent take what a State says, and the manager hear of it.
func (x *explorer) answer(w *world, i int) int32 {
	state, p := w.stored, &w.pods[i]
	info := x.core.get(state)
	p.writes, p.hidden = 0, 0
	if next, _, _ := x.reported(*w, state, i); next != state {
		return next
	}
	if info.members[i] == nobody {
		if !p.object {
			if !p.memory.refuse {
				x.take(p, policy{refuse: true})
				p.save()
			}
			return state
		}
		if x.alone() && info.minSerial > 0 {
			x.take(p, policy{serial: info.minSerial})
			p.save()
		}
		if !x.alone() || p.waits(info.minSerial) {
			return x.core.join(state, i, p.shard)
		}
		return state
	}
	if !p.running {
		return x.core.gone(state, i)
	}
	m := policy{serial: info.serial[p.shard], keys: info.sent[p.shard]}
	if !p.object || x.forgotten(info, i, *p) {
		m = policy{serial: m.serial, refuse: true}
	}
	x.take(p, m)
	p.save()
	p.writes = 0
	switch {
	case p.memory != m:
		return state
	case m.refuse:
		return x.core.refused(state, i, int(m.serial))
	}
	return x.core.applied(state, i, int(m.serial))
}
