package explore

import "fmt"

// push puts on its way what a State tells pods.
func (x *explorer) push(w *world, state int32) {
	info := x.core.get(state)
	for i := range w.pods {
		p := &w.pods[i]
		if info.members[i] == nobody && p.running && p.object && x.alone() {
			x.send(p, policy{serial: info.minSerial})
		}
		if info.members[i] == nobody || !p.running {
			continue
		}
		serial := info.serial[p.shard]
		// Whoever does not know yet that its object is gone tells it its keys.
		x.send(p, policy{serial: serial, keys: info.told[p.shard]})
		if !p.object {
			x.send(p, policy{serial: serial, refuse: true})
		}
	}
}

func (x *explorer) send(p *pod, m policy) {
	free := -1
	for i, f := range p.flight {
		switch {
		case f == m:
			return
		case f == policy{}, f.serial < p.saved && !x.Flaws.NoFloor:
			free = i
		}
	}
	if free < 0 {
		x.err = fmt.Errorf("exploring: more than %d policies on their way to a pod", flight)
		return
	}
	p.flight[free] = m
}

// take is what an agent does with a policy that arrives.
func (x *explorer) take(p *pod, m policy) {
	if m.serial < p.floor && !m.refuse && !x.Flaws.NoFloor {
		return
	}
	least := m.serial
	if m.refuse && m.serial > 0 && !x.Flaws.UnbarredGone {
		least++
	}
	p.writes = (p.writes | p.memory.keys) &^ m.keys
	p.memory = m
	p.floor = max(p.floor, least)
}

// save keeps what is in force on disk.
func (p *pod) save() { p.disk, p.saved = p.memory, p.floor }

// crash is the end of an agent, and the next one's start. Writes under way go on.
func (p *pod) crash() {
	p.writes = (p.writes | p.memory.keys) &^ p.disk.keys
	p.memory, p.floor = p.disk, p.saved
}

// forget is the flaw ForgottenWrites: the next agent does not know what is under way.
func (p *pod) forget() { p.hidden, p.writes = p.hidden|p.writes, 0 }

// acknowledge says what is applied, again and again.
func (x *explorer) acknowledge(p *pod) {
	saved := p.disk == p.memory && p.saved == p.floor
	if !p.running || !saved && !x.Flaws.EarlyAck || p.writes != 0 && !x.Flaws.UndrainedAck {
		return
	}
	switch m := p.memory; {
	case m.serial == 0:
	case m.refuse:
		p.nos |= 1 << m.serial
	default:
		p.acks[m.serial] |= 1 << m.keys
	}
}
