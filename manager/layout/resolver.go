package layout

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Resolver finds the namespaces that configurations match. It keeps what it has found for as
// long as it is asked for, so that a namespace is matched once. It is not safe for concurrent
// use.
type Resolver struct {
	slots  map[string]int // of the namespaces that exist, in the following lists
	names  []string
	labels []labels.Set
	free   []int    // slots of no namespace
	pinned []string // sorted namespaces whose labels name a shard
	lists  map[listKey]*list
}

// listKey identifies a list of matches in a configuration.
type listKey struct {
	of   types.UID
	path string
}

// Observe replaces the namespaces that exist. The labels must not be changed afterwards.
func (r *Resolver) Observe(namespaces map[string]labels.Set) {
	if r.slots == nil {
		r.slots, r.lists = map[string]int{}, map[listKey]*list{}
	}
	for name, slot := range r.slots {
		if _, exists := namespaces[name]; !exists {
			r.forget(slot)
			delete(r.slots, name)
			r.names[slot], r.labels[slot] = "", nil
			r.free = append(r.free, slot)
		}
	}
	r.pinned = nil
	for name, of := range namespaces {
		slot, known := r.slots[name]
		if !known || !maps.Equal(r.labels[slot], of) {
			r.observe(name, of)
		}
		if of.Get(v1alpha1.OwnerShardLabel) != "" {
			r.pinned = append(r.pinned, name)
		}
	}
	slices.Sort(r.pinned)
}

// observe adds a namespace, or changes its labels.
func (r *Resolver) observe(name string, of labels.Set) {
	slot, known := r.slots[name]
	switch n := len(r.free); {
	case known:
	case n > 0:
		slot, r.free = r.free[n-1], r.free[:n-1]
	default:
		slot = len(r.names)
		r.names, r.labels = append(r.names, ""), append(r.labels, nil)
	}
	r.forget(slot)
	r.slots[name], r.names[slot], r.labels[slot] = slot, name, of
}

// forget forgets what was found out about a namespace.
func (r *Resolver) forget(slot int) {
	for _, l := range r.lists {
		l.forget(slot)
	}
}

// Begin begins to resolve a configuration with spec.root. Other calls may come before its
// Finish.
func (r *Resolver) Begin(of types.UID, spec *v1alpha1.ShardingConfigSpec) *Resolution {
	x := &Resolution{Resolver: r, spec: spec, out: spec.DeepCopy(), of: of}
	root := x.out.Root
	for i := range root.ResourceSelector {
		x.limit(&root.ResourceSelector[i], "spec.root.resourceSelector")
	}
	for i := range x.out.Limits {
		x.limit(&x.out.Limits[i], "spec.limits")
	}
	if c := root.Canary; c != nil && c.InNamespaceSelector != nil {
		x.canary = []v1alpha1.NamespaceMatch{{Names: c.InNamespaces}, {Selector: c.InNamespaceSelector}}
		x.owner(&x.canary, "spec.root.canary")
	}
	for i := range root.Subsets {
		x.owner(&root.Subsets[i].Namespaces, "subset "+root.Subsets[i].Name+" of spec.root.subsets")
	}
	return x
}

// Sweep forgets the lists that no Begin has asked for since the last Sweep.
func (r *Resolver) Sweep() {
	maps.DeleteFunc(r.lists, func(_ listKey, l *list) bool { return !l.used })
	for _, l := range r.lists {
		l.used = false
	}
}

// Resolution is how far one configuration is resolved.
type Resolution struct {
	*Resolver
	of             types.UID
	spec, out      *v1alpha1.ShardingConfigSpec
	canary         []v1alpha1.NamespaceMatch
	limits, owners []found
}

// found is a list of matches, and what is known of it.
type found struct {
	path    string
	matches *[]v1alpha1.NamespaceMatch
	list    *list
}

func (x *Resolution) limit(l *v1alpha1.ObjectLimiter, path string) {
	// Until a list is resolved that was changed, its limit is the former one. That is of the
	// same resources.
	if f := x.find(&l.Namespaces, path, fmt.Sprintf("%s %q", path, l.RelateResources)); f.list != nil {
		x.limits = append(x.limits, f)
	}
}

func (x *Resolution) owner(matches *[]v1alpha1.NamespaceMatch, path string) {
	if f := x.find(matches, path, path); f.list != nil {
		x.owners = append(x.owners, f)
	}
}

// find returns what is known of a list. There is nothing to find out if it has only names.
func (x *Resolution) find(matches *[]v1alpha1.NamespaceMatch, path, key string) found {
	if !slices.ContainsFunc(*matches, followed) {
		return found{}
	}
	k := listKey{x.of, key}
	for x.lists[k] != nil && x.lists[k].used {
		k.path += "+" // another limit of the same resources
	}
	l := x.lists[k]
	if l == nil || !equality.Semantic.DeepEqual(l.entries, *matches) {
		l = newList(slices.Clone(*matches), x.Resolver, l)
		x.lists[k] = l
	}
	l.used = true
	return found{path, matches, l}
}

// Step goes on until the configuration is resolved, or until more reports false, and reports
// whether it is resolved. It reads one match or matches one namespace, at least.
func (x *Resolution) Step(more func() bool) (done bool) {
	for _, f := range slices.Concat(x.limits, x.owners) {
		if !f.list.done(x.Resolver) && !f.list.step(x.Resolver, more) {
			break
		}
	}
	return x.Done()
}

// Done reports whether the configuration is resolved.
func (x *Resolution) Done() bool {
	return !slices.ContainsFunc(x.limits, x.pending) && !slices.ContainsFunc(x.owners, x.pending)
}

func (x *Resolution) pending(f found) bool { return !f.list.done(x.Resolver) }
