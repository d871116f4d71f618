package edits

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/tests/explore/search"
)

// explorer is the space of the worlds of Options.
type explorer struct {
	options    Options
	lockless   bool // the operator elects no leader
	policies   *policies
	records    *records
	listings   []listed
	listingIDs map[listing]listingID
	decisions  map[seen]decision
}

func newExplorer(o Options) *explorer {
	elects := slices.ContainsFunc(o.Specs, func(s Spec) bool { return s.Lock != NoLock })
	return &explorer{
		options: o, policies: newPolicies(), records: newRecords(), listings: make([]listed, 1),
		listingIDs: map[listing]listingID{}, decisions: map[seen]decision{},
		lockless: !elects,
	}
}

// Err implements search.Space.
func (x *explorer) Err() error { return nil }

func (x *explorer) namespace(i int) string {
	if i > 0 && x.options.Second >= Foreign {
		return "ns2"
	}
	return "ns"
}

func (x *explorer) rootName(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: x.namespace(i), Name: [2]string{"root0", "root1"}[i]}
}

// config returns a root as it was listed.
func (l listed) config(name types.NamespacedName) *v1alpha1.ShardingConfig {
	i := slices.IndexFunc(l.world.Configs, func(c *v1alpha1.ShardingConfig) bool { return c.Namespace == name.Namespace && c.Name == name.Name })
	return l.world.Configs[i]
}

func slotOf(uid string) int { return int(uid[3] - '0') }

// newPod returns a pod, admitted as the first root requires. Its agent refuses it at first.
func (x *explorer) newPod(w world, i identity) pod {
	var admits *v1alpha1.ShardingConfig
	if r := w.roots[i.root]; r.exists {
		admits = r.config(int(i.root), x.namespace(int(i.root)))
	}
	i.both = compile.Trust(admits) == v1alpha1.TrustBoth
	return pod{identity: i, object: true, running: true, inForce: removed, acked: removed}
}

// begin returns the world in which the shards own everything.
func (x *explorer) begin() world {
	w := world{left: left{x.options.Edits, x.options.Restarts, x.options.PodDeletions}}
	w.roots[0] = root{exists: true, spec: x.options.Specs[0], generation: 1, status: empty}
	for i := range 2 {
		w.pods[i] = x.newPod(w, identity{exists: true, ordinal: uint8(i)})
		if slices.ContainsFunc(x.options.Specs, func(s Spec) bool { return s.Retarget }) {
			w.pods[i+2] = x.newPod(w, identity{exists: true, ordinal: uint8(i), second: true})
		}
	}
	if x.options.Second != None {
		w.roots[1] = root{exists: true, spec: Spec{Lock: LockA}, generation: 1, status: empty}
		w.pods[4] = x.newPod(w, identity{exists: true, root: 1})
	}
	for before := (world{}); before != w; {
		before = w
		w = x.decides(x.lists(w))
		w = x.keeps(w, w.manager.demands)
		for i := range w.pods {
			for w.pods[i].flight[0] != unknown {
				x.take(&w.pods[i])
				w.pods[i].draining, w.pods[i].acked = unknown, w.pods[i].inForce
			}
		}
	}
	w.outside = x.options.Outside != Nowhere
	return w
}

// Successors implements search.Space.
func (x *explorer) Successors(w world, next func(world, search.Step)) (wrong string) {
	moves := false
	try := func(what string, n world) {
		if n != w {
			moves = true
			next(n, search.Step{What: what})
		}
	}
	try("manager lists and compiles", x.lists(w))
	if w.manager.listed != 0 {
		try("manager decides", x.decides(w))
	}
	x.keep(w, try)
	for i, p := range w.pods {
		if p.exists && x.pod(w, i, next) {
			moves = true
		}
	}
	x.outsider(w, next)
	x.user(w, next)
	if w.left.restarts > 0 {
		n := w
		n.left.restarts--
		n.restart()
		next(n, search.Step{What: "another manager leads"})
	}
	if !moves {
		return x.stopped(w)
	}
	return ""
}

// restart makes another manager the leader. Agents connect to it, and report.
func (w *world) restart() {
	w.manager = manager{}
	for i := range w.pods {
		p := &w.pods[i]
		p.flight, p.nacked = [flight]policyID{}, unknown
		if p.draining == unknown {
			p.acked = p.inForce
		}
	}
}
