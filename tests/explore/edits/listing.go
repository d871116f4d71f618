package edits

import (
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// listing is what the controller of policies read.
type listing struct {
	roots   [2]root
	records [2]recordID // what was known of the roots
	pods    [slots]identity
	later   bool
}

// listingID is the number of a listing; 0 stands for none.
type listingID int32

// listed is a listing and what follows from it.
type listed struct {
	listing
	world roots.Input
	// compiled reports whether all roots were known, so that policies followed.
	compiled bool
	policies [slots]policyID
}

// list returns the number of what a manager lists now.
func (x *explorer) list(w world) listingID {
	key := listing{roots: w.roots, records: w.manager.records, later: w.later}
	for i := range key.roots {
		key.roots[i].status = unread
	}
	for i, p := range w.pods {
		if p.object {
			key.pods[i] = p.identity
		}
	}
	id, ok := x.listingIDs[key]
	if !ok {
		id = listingID(len(x.listings))
		x.listingIDs[key] = id
		x.listings = append(x.listings, x.compile(key))
	}
	return id
}

// compile is what the controller of policies does with what it lists.
func (x *explorer) compile(l listing) listed {
	out := listed{listing: l}
	w := &out.world
	w.RequestTimeout, w.Namespaces = requestTimeout, []string{"ns"}
	w.Node = func(string) bool { return true }
	w.Unknown = map[types.UID]resources.Unknown{}
	known, all := map[origin.Name]compile.Root{}, true
	for i, r := range l.roots {
		if !r.exists {
			continue
		}
		c := r.config(i, x.namespace(i))
		record := x.records.all[l.records[i]]
		c.Status.Locks = record.locks
		w.Configs = append(w.Configs, c)
		if r.spec.unserved(l.later) && !x.options.Flaws.UnknownGranted {
			w.Unknown[c.UID] = resources.Unknown{Message: "unknown resource"}
		}
		all = all && l.records[i] != unread
		_, undivided := w.Unknown[c.UID]
		one := decide.Memory{}.Published(record.stored(), 0)
		one.Undivided = undivided
		known[origin.Of(c)] = one
	}
	for i, p := range l.pods {
		if p.exists {
			w.Pods = append(w.Pods, p.object(i, x.namespace(int(p.root))))
		}
	}
	if !all {
		return out
	}
	out.compiled = true
	x.enact(w, known)
	w.Compiled, w.CompiledBy = compile.Compile(w.Configs, w.Pods, known, compile.Rules{RequestTimeout: requestTimeout}), w.Enacted
	for i := range slots {
		if p, ok := w.Compiled.Policies[types.UID(podName(i))]; ok {
			out.policies[i] = x.policies.number(p)
		} else {
			out.policies[i] = removed
		}
	}
	return out
}

// enact makes the configurations follow what their shards act by, and at once the part of the
// spec of which a flaw says so.
func (x *explorer) enact(w *roots.Input, known map[origin.Name]compile.Root) {
	given := maps.Clone(known)
	for _, c := range w.Configs {
		one := given[origin.Of(c)]
		if one.Acting == nil {
			continue
		}
		asked, by := acting.Of(&c.Spec), one.Acting.DeepCopy()
		for _, f := range []struct {
			flaw   bool
			follow func(by *v1alpha1.ActingSpec)
		}{
			{x.options.Flaws.LockAtOnce, func(by *v1alpha1.ActingSpec) { by.Controller = asked.Controller }},
			{x.options.Flaws.ResourcesAtOnce, func(by *v1alpha1.ActingSpec) { by.ResourceSelector = asked.ResourceSelector }},
			{x.options.Flaws.KeyAtOnce, func(by *v1alpha1.ActingSpec) { by.Key = asked.Key }},
			{x.options.Flaws.DryRunAtOnce, func(by *v1alpha1.ActingSpec) { by.DryRun = asked.DryRun }},
			{x.options.Flaws.TargetAtOnce, func(by *v1alpha1.ActingSpec) { by.TargetStatefulSet = asked.TargetStatefulSet }},
			{x.options.Flaws.DeletionAtOnce && c.DeletionTimestamp != nil, func(by *v1alpha1.ActingSpec) { *by = *asked }},
		} {
			if f.flaw {
				f.follow(by)
			}
		}
		one.Acting = by
		given[origin.Of(c)] = one
	}
	w.Enacted = roots.Enact(w.Configs, given)
	for _, c := range w.Configs { // what is on record
		w.Enacted.By[c.UID] = known[origin.Of(c)].Acting
	}
	w.Unresolved = new(roots.Resolver).Resolve(w.Configs, nil, time.Second).Errors
}

// push sends what follows from a listing to the agents.
func (x *explorer) push(w *world, l listed) {
	for i := range w.pods {
		p := &w.pods[i]
		id := l.policies[i]
		if !p.exists || x.policies.same(id, p.last()) {
			continue
		}
		at := 0
		for at < flight-1 && p.flight[at] != unknown {
			at++
		}
		p.flight[at] = id
		if x.policies.all[p.acked].serial == 0 { // as stream.sending does
			p.acked = unknown
		}
	}
}
