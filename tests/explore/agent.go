package explore

import (
	"fmt"
	"slices"
)

// push puts on its way what a State sends to pods.
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
		// A manager that has not seen the deletion of its object sends it its keys.
		x.send(p, x.member(info, i, p.shard))
		if !p.object || x.forgotten(info, i, *p) {
			x.send(p, policy{serial: info.serial[p.shard], refuse: true})
		}
	}
}

// member is the policy of a member. It requires what is only read of the member.
func (x *explorer) member(info *info, i int, shard uint8) policy {
	m := policy{serial: info.serial[shard], keys: info.sent[shard]}
	if x.alone() && !info.confirmed[i] && !info.rolledBack && !x.Flaws.NothingRequired {
		m.required = info.members[i]
	}
	return m
}

// forgotten reports whether the agent of a member rejects its policy, because it does not
// know the pod as one.
func (x *explorer) forgotten(info *info, i int, p pod) bool {
	return p.running && !p.floor.knows(x.member(info, i, p.shard).required)
}

func (x *explorer) send(p *pod, m policy) {
	free := -1
	for i, f := range p.flight {
		switch {
		case f.covers(m):
			return
		case m.covers(f), f == policy{}, f.serial < p.saved.least && !x.Flaws.NoFloor:
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
	if (m.serial < p.floor.least || !p.floor.knows(m.required)) && !m.refuse && !x.Flaws.NoFloor {
		return
	}
	m.required = 0
	had := max(p.floor.had(), m.serial)
	p.floor.least, p.floor.barred = had, m.refuse && had > 0 && !x.Flaws.UnbarredGone
	if p.floor.barred {
		p.floor.least++
	}
	p.writes = (p.writes | p.memory.keys) &^ m.keys
	p.memory = m
}

// received takes a policy out, unless two managers send it again and again.
func (x *explorer) received(p *pod, m policy) {
	if i := slices.Index(p.flight[:], m); i >= 0 && x.alone() {
		p.flight[i] = policy{}
	}
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
