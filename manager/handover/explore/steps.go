package explore

import "math/bits"

// successors visits all that may happen next.
func (x *explorer) successors(w world) {
	for i := range w.read {
		if i == 0 || w.read[1] != w.read[0] {
			x.manager(w, i)
		}
	}
	for i, p := range w.pods {
		if p.exists {
			x.pod(w, i)
		}
	}
}

// manager visits what a manager may do.
func (x *explorer) manager(w world, i int) {
	read := w.read[i]
	if read != w.stored {
		n := w
		if x.Flaws.SerialReset {
			n.stored = x.core.reset(n.stored)
			x.push(&n, n.stored)
		}
		n.read[i] = n.stored
		x.next(n, "manager reads", i, 0)
		if !x.Flaws.BlindWrite {
			return // all that it would write is refused
		}
	}
	write := func(n world, state int32, what string, a, b int) {
		if state == read {
			return
		}
		n.stored, n.read[i] = state, state
		x.push(&n, state)
		x.next(n, what, a, b)
	}
	ready := w.ready()
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
	members := x.core.get(read).members
	for j, p := range w.pods {
		switch {
		case !p.exists:
		case members[j] == nobody:
			if p.object {
				write(w, x.core.join(read, j, p.shard), "joins: pod, shard", j, int(p.shard))
			}
		default:
			for b := p.acks; b != 0; b &= b - 1 {
				s := bits.TrailingZeros32(b)
				write(w, x.core.applied(read, j, s), "applied: pod, serial", j, s)
			}
			for b := p.nos; b != 0; b &= b - 1 {
				s := bits.TrailingZeros32(b)
				write(w, x.core.refused(read, j, s), "refused: pod, serial", j, s)
			}
			if !p.running || !p.object && x.Flaws.GoneUnproven {
				write(w, x.core.gone(read, j), "gone: pod", j, 0)
			}
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
	if !p.running {
		return
	}
	for _, m := range p.flight {
		if m != (policy{}) && m != p.memory {
			try("pod's agent takes, serial", int(m.serial), func(_ *world, p *pod) { x.take(p, m) })
		}
	}
	try("pod's agent saves", 0, func(_ *world, p *pod) { p.save() })
	try("pod's writes end", 0, func(_ *world, p *pod) { p.writes = 0 })
	if !p.object {
		try("pod's process ends", 0, func(_ *world, p *pod) { p.running = false })
	}
	if w.failures == 0 {
		return
	}
	if p.disk != p.memory || p.saved != p.floor {
		try("pod's agent crashes", 0, func(w *world, p *pod) {
			p.crash()
			w.failures--
		})
	}
	if !p.memory.refuse {
		try("pod's agent takes an old refusal", 0, func(w *world, p *pod) {
			x.take(p, policy{refuse: true})
			w.failures--
		})
	}
	if p.object {
		try("pod vanishes, and is made anew", 0, func(w *world, p *pod) {
			p.object = false
			w.failures--
			for j := range w.pods {
				if !w.pods[j].exists {
					w.pods[j] = newPod(p.shard)
					break
				}
			}
			x.push(w, w.stored)
		})
	}
}

// ready are the shards that some pod serves, as bits.
func (w world) ready() (r uint8) {
	for _, p := range w.pods {
		if p.object && p.running {
			r |= 1 << p.shard
		}
	}
	return r
}

// stuck says what does not end although failures do, messages arrive, and all do
// what they should.
func (x *explorer) stuck(w world) string {
	for range 50 {
		before := w
		w.stored = x.core.wants(w.stored, int(w.want), w.ready())
		for i := range w.pods {
			p := &w.pods[i]
			info := x.core.get(w.stored)
			switch {
			case !p.exists:
			case info.members[i] == nobody:
				if p.object {
					w.stored = x.core.join(w.stored, i, p.shard)
				}
			case !p.running:
				w.stored = x.core.gone(w.stored, i)
			default:
				m := policy{serial: info.serial[p.shard], keys: info.told[p.shard]}
				if !p.object {
					m = policy{serial: m.serial, refuse: true}
				}
				x.take(p, m)
				p.save()
				p.writes = 0
				switch {
				case p.memory != m:
				case m.refuse:
					w.stored = x.core.refused(w.stored, i, int(m.serial))
				default:
					w.stored = x.core.applied(w.stored, i, int(m.serial))
				}
			}
		}
		if w == before {
			info := x.core.get(w.stored)
			switch {
			case info.moves > 0 || !info.settled:
				return "the handover does not end"
			case w.ready() == 1<<shards-1 && info.held != x.Wants[w.want]:
				return "the handover ends, but not with what is wanted"
			}
			return ""
		}
	}
	return "the handover does not end: it goes on for ever"
}
