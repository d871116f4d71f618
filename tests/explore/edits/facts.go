package edits

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

const requestTimeout = time.Minute

// decision is what becomes of a root in a round.
type decision struct {
	record  recordID
	mode    locks.Mode
	locks   uint8 // as bits
	release bool
	ok      bool // there was a decision
}

// seen is what a decision depends on.
type seen struct {
	root             int
	listed, compiled listingID
	record           recordID
	demand           demand
	locks            [NoLock]holder
	demanded, proven uint8
	outside          bool
	pods             [slots]seenPod
}

type seenPod struct {
	acked, nacked policyID
	had           int8
	barred, idle  bool
	running       bool
}

// decide returns what the real manager decides about a root. It is not ok if it does not decide,
// because what was listed is outdated.
func (x *explorer) decide(w world, i int) (decision, bool) {
	m := w.manager
	key := seen{
		root: i, listed: m.listed, compiled: m.compiled, record: m.records[i], demand: m.demands[i],
		locks: m.seen, demanded: m.demanded, proven: m.proven, outside: w.outside,
	}
	for j, p := range w.pods {
		key.pods[j] = seenPod{p.acked, p.nacked, p.had, p.barred, p.idle(), p.running}
	}
	d, ok := x.decisions[key]
	if !ok {
		d = x.decided(w, i)
		x.decisions[key] = d
	}
	return d, d.ok
}

func (x *explorer) decided(w world, i int) decision {
	m, listed := w.manager, x.listings[w.manager.listed]
	world := x.world(w)
	stored := x.records.all[m.records[i]].stored()
	config := listed.config(x.rootName(i))
	if !world.Follows(config.UID, stored.Acting) {
		return decision{}
	}
	sources := roots.Sources{
		Observe: func(_, uid string) push.Observation { return x.observation(w.pods[slotOf(uid)]) },
		Locks:   keeper{x, w}, Since: now.Add(-time.Hour),
	}
	if m.demands[i].asked {
		sources.Asked = 1
	}
	f := roots.FactsOf(config, world, stored, decide.Memory{}, sources)
	f.Weights.Counted = true
	f.Outside.Listed = now
	if w.outside && config.Spec.Root.TargetStatefulSet == x.outsideWorkload() && !x.options.Flaws.OutsideIgnored {
		f.Outside.Pods = []string{"outside"}
	}
	f.Locks.Holders = map[types.NamespacedName]string{}
	if f.Spec.Change != nil && x.options.Flaws.UnknownReleases {
		f.Spec.Unknown = resources.Unknown{}
	}
	if x.options.Flaws.ClaimIgnored {
		f.Locks.Claimed = nil
	}
	_, d := decide.Decide(decide.Memory{}, f, now)
	out := decision{
		record: x.records.number(record{state: d.State, acting: x.actsBy(f, d), locks: held(d.Status.Locks)}),
		mode:   d.Demand.Mode, locks: bits(d.Demand.Locks), release: d.Release, ok: true,
	}
	return x.flawed(w, i, f, d, out)
}

// outsideWorkload is that of the pod outside the mesh.
func (x *explorer) outsideWorkload() string {
	if x.options.Outside == Elsewhere {
		return workloads[0][1]
	}
	return workloads[0][0]
}

// actsBy returns what the shards act by after a decision.
func (x *explorer) actsBy(f decide.Facts, d decide.Decision) *v1alpha1.ActingSpec {
	to := f.Spec.Change
	if to != nil && (x.options.Flaws.ChangeOwning || x.options.Flaws.ChangeUnquiet && !d.State.Holds() && len(d.State.Moves) == 0) {
		return to.To
	}
	return d.Status.Root.Acting
}

// flawed returns a decision with flaws.
func (x *explorer) flawed(w world, i int, f decide.Facts, d decide.Decision, out decision) decision {
	spec := x.listings[w.manager.listed].roots[i].spec
	if x.options.Flaws.LockOfSpec {
		out.locks = 0
		if spec.Lock != NoLock {
			out.locks = 1 << spec.Lock
		}
	}
	if x.options.Flaws.ChangeUnquiet && f.Spec.Config.Spec.DryRun && !d.State.Holds() {
		out.mode = locks.Release
	}
	return out
}

// held returns the locks without what is only for display.
func held(in []v1alpha1.LockStatus) (out []v1alpha1.LockStatus) {
	for _, l := range in {
		l.Holder = ""
		out = append(out, l)
	}
	return out
}

// observation is what the agent of a pod has reported.
func (x *explorer) observation(p pod) push.Observation {
	o := push.Observation{Connected: true, Reported: true, Serial: int64(p.had), Barred: p.barred}
	if p.running {
		o.Capture = v1alpha1.CaptureEBPF
	}
	o.Version, o.Nacked = x.policies.all[p.acked].version, x.policies.all[p.nacked].version
	if x.options.Discovers && p.running && p.root == 0 {
		l := lockNames[LockA]
		o.ObservedLocks = []push.ObservedLock{{Namespace: l.Namespace, Name: l.Name, Resource: locks.Leases, Written: true}}
	}
	return o
}

// removedPods returns the pods without a policy of which agents have not confirmed that they act on
// nothing.
func (x *explorer) removedPods(w world) (out []push.Removed) {
	for i, p := range w.pods {
		if p.exists && !p.idle() && x.listings[w.manager.compiled].policies[i] == removed {
			out = append(out, push.Removed{Node: nodeName, Namespace: x.namespace(int(p.root)), UID: podName(i)})
		}
	}
	return out
}

// keeper is what the keeper knows of the locks.
type keeper struct {
	x *explorer
	w world
}

// States implements locks.Reader.
func (k keeper) States(config types.NamespacedName) func(types.NamespacedName) (locks.State, bool) {
	return func(name types.NamespacedName) (locks.State, bool) {
		lock, m := lockOf(name), k.w.manager
		bit := uint8(1) << lock
		if lock == NoLock || m.demanded&bit == 0 {
			return locks.State{}, false
		}
		s := k.x.lockState(m.seen[lock])
		s.Acquired = s.Held && m.proven&bit != 0
		for i, d := range m.demands {
			if k.x.rootName(i) == config && (d.followed&bit != 0 || k.x.options.Flaws.LockUnasked) {
				s.Asked = 1
			}
		}
		if k.x.refused(config, name) {
			s.Held, s.Acquired, s.Problem = false, false, "forbidden"
		}
		return s, true
	}
}

// Refuses implements locks.Reader.
func (k keeper) Refuses(config, lock types.NamespacedName) bool {
	return k.x.refused(config, lock)
}

// lockState returns the state of a lock with a holder.
func (x *explorer) lockState(h holder) locks.State {
	s := locks.State{Held: h.mesh(), Renewed: now}
	if h != free && !s.Held {
		s.Holder = "another"
	}
	return s
}
