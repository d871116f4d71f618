package edits

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
)

// manager is what the leader knows. A new one knows nothing.
type manager struct {
	// listed is what was listed last, compiled what policies were last compiled from.
	listed, compiled listingID
	records          [2]recordID
	decided          bool // a round has been, so that demands are known
	demands          [2]demand
	taken            [2]demand      // those that the keeper's round began with, if it is slow
	keeping          bool           // such a round has begun
	seen             [NoLock]holder // the locks, as the keeper saw them in its last round
	demanded         uint8          // the locks that were demanded in that round, as bits
	proven           uint8          // the locks that the keeper has renewed, as bits
}

// demand is what a root demands of locks.
type demand struct {
	exists bool
	mode   locks.Mode
	locks  uint8 // as bits
	asked  bool  // it is not to release them
	// followed are the locks, as bits, for which the keeper has followed it since then.
	followed uint8
}

// lists is the round of the controller of policies.
func (x *explorer) lists(w world) world {
	m := &w.manager
	m.listed = x.list(w)
	if l := x.listings[m.listed]; l.compiled {
		m.compiled = m.listed
		x.push(&w, l)
	}
	return w
}

// world returns what a round of roots begins with.
func (x *explorer) world(w world) roots.Input {
	m := w.manager
	out := x.listings[m.listed].world
	c := x.listings[m.compiled]
	out.Compiled, out.CompiledBy = c.world.Compiled, c.world.CompiledBy
	out.Removed = x.removedPods(w)
	return out
}

// decides is the round of the controller of roots. Evictions follow from time, and are left out.
func (x *explorer) decides(w world) world {
	m := &w.manager
	l := x.listings[m.listed]
	for i, r := range l.roots {
		d := &m.demands[i]
		if !r.exists {
			m.demands[i], m.records[i] = demand{}, unread
			continue
		}
		d.exists = true
		if m.records[i] == unread {
			if !w.roots[i].exists {
				continue
			}
			m.records[i] = w.roots[i].status
			x.firstDemand(w, i, d)
		}
		if done, ok := x.decide(w, i); ok {
			x.carryOut(&w, i, done)
		}
	}
	for i := range m.demands {
		m.publish(i)
	}
	m.decided = true
	return w
}

// firstDemand is that of a leader that has read a root.
func (x *explorer) firstDemand(w world, i int, d *demand) {
	if x.options.Flaws.Undemanded {
		return
	}
	record := x.records.all[w.manager.records[i]]
	config := w.roots[i].config(i, x.namespace(i))
	config.Status.Locks = record.locks
	first := roots.FirstDemand(config)
	d.mode, d.locks = first.Mode, bits(first.Locks)
}

// publish is what Roots does with a demand after a round: it numbers the time since which the locks
// are not to be released, so that the keeper's round that began before does not count.
func (m *manager) publish(i int) {
	d := &m.demands[i]
	if m.records[i] == unread {
		d.mode = locks.Watch
	}
	if asks := d.mode != locks.Release; asks != d.asked {
		d.asked, d.followed, m.taken[i].asked = asks, 0, false
	}
}

// carryOut writes a decision and does what follows.
func (x *explorer) carryOut(w *world, i int, d decision) {
	m, r := &w.manager, &w.roots[i]
	if !r.exists {
		m.records[i] = unread
		return
	}
	m.records[i], r.status = d.record, x.records.all[d.record].written
	m.demands[i].mode, m.demands[i].locks = d.mode, d.locks
	if d.release && r.deleted {
		*r = root{}
		m.records[i] = unread
	}
}

// keep visits a round of the keeper of locks. A slow one may follow demands that have changed
// since.
func (x *explorer) keep(w world, try func(string, world)) {
	m := &w.manager
	switch {
	case !m.decided || m.listed == 0:
	case !x.options.SlowKeeper:
		try("manager keeps the locks", x.keeps(w, m.demands))
	case !m.keeping:
		m.keeping, m.taken = true, m.demands
		try("manager begins to keep the locks", w)
	default:
		n := w
		n.manager.keeping, n.manager.taken = false, [2]demand{}
		try("manager keeps the locks", x.keeps(n, m.taken))
	}
}

// keeps is what the keeper does by the demands of roots.
func (x *explorer) keeps(w world, of [2]demand) world {
	m := &w.manager
	demands, demanded := x.demands(w, of)
	wished := locks.Wished(demands, x.refused, func(name types.NamespacedName) locks.State {
		return x.lockState(w.locks[lockOf(name)])
	})
	before := m.proven
	m.proven &= demanded
	for lock := range w.locks {
		h := &w.locks[lock]
		bit := uint8(1) << lock
		wish, ok := wished[lockNames[lock]]
		if !ok && h.mesh() && !x.options.Flaws.RefusedReleases {
			if config := x.rootName(int(*h - byRoot)); !x.nobodyActs(w, config.Namespace) {
				wish = locks.Demand{Config: config, Mode: locks.Watch}
			}
		}
		switch {
		case demanded&bit == 0:
		case h.mesh() && wish.Mode == locks.Release && before&bit != 0:
			*h = free
		case h.mesh():
			m.proven |= bit
			*h = holderOf(wish.Config.Name)
		case *h == free && wish.Mode == locks.Keep:
			m.proven |= bit
			*h = holderOf(wish.Config.Name)
		}
	}
	m.seen, m.demanded = w.locks, demanded
	for i := range m.demands {
		if d := &m.demands[i]; d.asked && of[i].asked {
			d.followed = of[i].locks
		}
	}
	return w
}

// demands returns those of all roots, and of the locks that the mesh holds and none demands. As
// bits, too.
func (x *explorer) demands(w world, of [2]demand) (out []locks.Demand, demanded uint8) {
	for i, d := range of {
		if !d.exists || x.options.Flaws.OneDemand && i > 0 && of[0].exists {
			continue
		}
		out = append(out, locks.Demand{Config: x.rootName(i), Mode: d.mode, Locks: lockList(d.locks)})
		demanded |= d.locks
	}
	for lock, h := range w.locks {
		if bit := uint8(1) << lock; h.mesh() && demanded&bit == 0 {
			mode, config := locks.Watch, x.rootName(int(h-byRoot))
			if x.nobodyActs(w, config.Namespace) {
				mode = locks.Release
			}
			out = append(out, locks.Demand{Config: config, Mode: mode, Locks: lockList(bit)})
			demanded |= bit
		}
	}
	return out, demanded
}

// nobodyActs is what the controller of locks finds of a namespace.
func (x *explorer) nobodyActs(w world, namespace string) bool {
	m := w.manager
	if m.compiled == 0 || m.compiled != m.listed {
		return false
	}
	policies, removed := x.listings[m.compiled].world.Compiled.Policies, x.removedPods(w)
	if x.options.Flaws.OrphanAtOnce {
		policies = nil
	}
	if x.options.Flaws.RemovedIgnored {
		removed = nil
	}
	return roots.NobodyActs(namespace, policies, removed, func(_, uid string) push.Observation {
		return x.observation(w.pods[slotOf(uid)])
	})
}

func holderOf(root string) holder {
	if root == "root1" {
		return byRoot2
	}
	return byRoot
}

func lockList(mask uint8) (out []locks.Lock) {
	for lock, name := range lockNames {
		if mask&(1<<lock) != 0 {
			out = append(out, locks.Lock{NamespacedName: name})
		}
	}
	return out
}

func bits(list []locks.Lock) (mask uint8) {
	for _, l := range list {
		mask |= 1 << lockOf(l.NamespacedName)
	}
	return mask
}

// refused reports whether a root may not have a lock.
func (x *explorer) refused(config, _ types.NamespacedName) bool {
	return x.options.Second == Forbidden && config == x.rootName(1)
}
