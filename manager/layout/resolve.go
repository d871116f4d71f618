package layout

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/expression"
)

// MaxNamespaces is the maximum number of namespaces that the canary or a subset can name and
// match.
const MaxNamespaces = 1024

// Resolve adds the names of the namespaces that match to a configuration with spec.root: to its
// canary, subsets and limits, and to those that labels pin to its shards. namespaces are those that exist, with their labels. The spec is
// replaced, not changed in place. After an error in the canary or a subset, all of these stay as
// they are, but the limits have their names: without them they would permit nothing.
func Resolve(spec *v1alpha1.ShardingConfigSpec, namespaces map[string]labels.Set) error {
	out := spec.DeepCopy()
	limits := resolving{namespaces: namespaces}
	for i := range out.Root.ResourceSelector {
		limits.resolve(&out.Root.ResourceSelector[i].Namespaces, "spec.root.resourceSelector")
	}
	for i := range out.Limits {
		limits.resolve(&out.Limits[i].Namespaces, "spec.limits")
	}
	owners := resolving{namespaces: namespaces}
	if c := out.Root.Canary; c != nil && c.InNamespaceSelector != nil {
		entries := []v1alpha1.NamespaceMatch{{Names: c.InNamespaces}, {Selector: c.InNamespaceSelector}}
		owners.own(&entries, "spec.root.canary")
		c.InNamespaces = Named(entries[2:])
	}
	for i := range out.Root.Subsets {
		s := &out.Root.Subsets[i]
		owners.own(&s.Namespaces, "subset "+s.Name+" of spec.root.subsets")
	}
	out.Root.PinnedNamespaces = owners.pins(out.Root)
	if owners.err != nil {
		out.Root.Canary, out.Root.Subsets, out.Root.PinnedNamespaces = spec.Root.Canary, spec.Root.Subsets, spec.Root.PinnedNamespaces
	}
	if limits.err == nil && (limits.resolved || owners.resolved) {
		*spec = *out
	}
	return cmp.Or(limits.err, owners.err)
}

// Written omits what [Resolve] has added to the namespaces of a limit.
func Written(l v1alpha1.ObjectLimiter) v1alpha1.ObjectLimiter {
	if n := len(l.Namespaces); n > 1 && slices.ContainsFunc(l.Namespaces, followed) && !followed(l.Namespaces[n-1]) {
		l.Namespaces = l.Namespaces[:n-1]
	}
	return l
}

// followed reports whether the namespaces of a match change with those that exist.
func followed(m v1alpha1.NamespaceMatch) bool { return m.Selector != nil || m.Pattern != "" }

// Named returns the names in a list of matches, which are all of them after [Resolve].
func Named(matches []v1alpha1.NamespaceMatch) (names []string) {
	for _, m := range matches {
		names = append(names, m.Names...)
	}
	return names
}

type resolving struct {
	namespaces map[string]labels.Set
	resolved   bool  // something was
	err        error // the first
}

// own is resolve for the namespaces that a shard owns, whose number is bounded.
func (r *resolving) own(matches *[]v1alpha1.NamespaceMatch, path string) {
	r.resolve(matches, path)
	if n := len(slices.Compact(slices.Sorted(slices.Values(Named(*matches))))); r.err == nil && n > MaxNamespaces {
		r.err = fmt.Errorf("%s: %d namespaces match, and at most %d can be assigned to one shard, so the last assignment stays: match fewer, or let spec.root.auto divide them", path, n, MaxNamespaces)
	}
}

// pins returns the namespaces, sorted, whose labels name a shard of a root, by the shard's name.
func (r *resolving) pins(root *v1alpha1.RootConfig) map[string][]string {
	if r.err != nil || root.Key == v1alpha1.KeyObject {
		return nil
	}
	var out map[string][]string
	shards := Shards(root)
	for _, name := range slices.Sorted(maps.Keys(r.namespaces)) {
		shard := r.namespaces[name].Get(v1alpha1.OwnerShardLabel)
		if shard == "" || !slices.ContainsFunc(shards, func(s Shard) bool { return s.Name == shard }) {
			continue
		}
		if out == nil {
			out = map[string][]string{}
		}
		out[shard] = append(out[shard], name)
	}
	for _, shard := range slices.Sorted(maps.Keys(out)) {
		if n := len(out[shard]); n > MaxNamespaces {
			r.err = fmt.Errorf("label %s: %d namespaces name %s, and at most %d can be pinned to one shard, so the last assignment stays: label fewer", v1alpha1.OwnerShardLabel, n, shard, MaxNamespaces)
		}
	}
	if len(out) > 0 && root.Method == v1alpha1.MethodServerSide {
		r.err = fmt.Errorf("label %s: spec.root.method ServerSide has too few ranges for pinned namespaces, so the last assignment stays: choose Auto, or remove the labels", v1alpha1.OwnerShardLabel)
	}
	r.resolved = r.resolved || len(out) > 0
	return out
}

// resolve appends an entry with the names of all namespaces that match, unless there are only
// names.
func (r *resolving) resolve(matches *[]v1alpha1.NamespaceMatch, path string) {
	if r.err != nil || !slices.ContainsFunc(*matches, followed) {
		return
	}
	names, err := matching(*matches, r.namespaces)
	r.resolved, r.err = true, failure.Wrap(err, "%s", path)
	*matches = append(*matches, v1alpha1.NamespaceMatch{Names: names})
}

// matching returns the namespaces that any of the entries names or matches, sorted.
func matching(entries []v1alpha1.NamespaceMatch, namespaces map[string]labels.Set) ([]string, error) {
	found := map[string]bool{}
	for _, m := range entries {
		for _, name := range m.Names {
			found[name] = true
		}
		matches, err := matcher(m)
		if err != nil {
			return nil, err
		}
		for name, of := range namespaces {
			if matches(name, of) {
				found[name] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// matcher returns a function that reports whether a selector or pattern matches a namespace.
func matcher(m v1alpha1.NamespaceMatch) (func(name string, of labels.Set) bool, error) {
	switch {
	case m.Selector != nil:
		selector, err := metav1.LabelSelectorAsSelector(m.Selector)
		if err != nil {
			return nil, fmt.Errorf("invalid selector of namespaces: %w", err)
		}
		return func(_ string, of labels.Set) bool { return selector.Matches(of) }, nil
	case m.Pattern != "":
		pattern, err := expression.Compile(m.Pattern)
		if err != nil {
			return nil, fmt.Errorf("invalid pattern %q of namespaces: %w", m.Pattern, err)
		}
		return func(name string, _ labels.Set) bool { return pattern.MatchString(name) }, nil
	}
	return func(string, labels.Set) bool { return false }, nil
}
