package layout

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// MaxNamespaces is the maximum number of namespaces that the canary or a subset can name and
// match.
const MaxNamespaces = 1024

// Resolve resolves one configuration to the end. The spec is replaced, not changed in place. See
// [Resolution.Finish].
func Resolve(spec *v1alpha1.ShardingConfigSpec, namespaces map[string]labels.Set) error {
	var r Resolver
	r.Observe(namespaces)
	x := r.Begin("", spec)
	x.Step(func() bool { return true })
	return x.Finish()
}

// ErrPending means that a configuration is not resolved yet.
var ErrPending = errors.New("matching takes longer than other configurations can wait for, and goes on: match by names, or by simpler patterns and selectors")

// Finish adds the names of the namespaces that match to the configuration: to its canary,
// subsets and limits, and to those that labels pin to its shards. The spec is replaced, not
// changed in place. After an error in the canary or a subset, all of these stay as they are, but
// the limits have their names: without them they would permit nothing.
func (x *Resolution) Finish() error {
	var unlimited, pending error
	resolved := false
	for _, f := range x.limits {
		resolved = true
		if f.list.err != nil {
			unlimited = cmp.Or(unlimited, fmt.Errorf("%s: %w", f.path, f.list.err))
			continue
		}
		if x.pending(f) {
			pending = cmp.Or(pending, fmt.Errorf("%s: %w", f.path, ErrPending))
		}
		*f.matches = append(*f.matches, v1alpha1.NamespaceMatch{Names: f.list.result(x.Resolver)})
	}
	pinned, owned := x.own()
	root := x.out.Root
	if owned != nil {
		root.Canary, root.Subsets, root.PinnedNamespaces = x.spec.Root.Canary, x.spec.Root.Subsets, x.spec.Root.PinnedNamespaces
	} else {
		root.PinnedNamespaces = pinned
		resolved = resolved || len(pinned) > 0 || len(x.owners) > 0
	}
	if unlimited == nil && resolved {
		*x.spec = *x.out
	}
	return cmp.Or(unlimited, owned, pending)
}

// own adds what the canary and the subsets own, whose number is bounded. It returns what labels
// pin.
func (x *Resolution) own() (pinned map[string][]string, err error) {
	for _, f := range x.owners {
		switch {
		case f.list.err != nil:
			return nil, fmt.Errorf("%s: %w", f.path, f.list.err)
		case x.pending(f):
			return nil, fmt.Errorf("%s: %w, so the last assignment stays", f.path, ErrPending)
		}
		names := f.list.result(x.Resolver)
		if len(names) > MaxNamespaces {
			return nil, fmt.Errorf("%s: %d namespaces match, and at most %d can be assigned to one shard, so the last assignment stays: match fewer, or let spec.root.auto divide them", f.path, len(names), MaxNamespaces)
		}
		*f.matches = append(*f.matches, v1alpha1.NamespaceMatch{Names: names})
	}
	if c := x.out.Root.Canary; len(x.canary) > 0 {
		c.InNamespaces = Named(x.canary[2:])
	}
	return x.pins(x.out.Root)
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

// pins returns the namespaces, sorted, whose labels name a shard of a root, by the shard's name.
func (r *Resolver) pins(root *v1alpha1.RootConfig) (map[string][]string, error) {
	if !ByNamespace(root) || len(r.pinned) == 0 {
		return nil, nil
	}
	var out map[string][]string
	shards := Shards(root)
	for _, name := range r.pinned {
		shard := r.labels[r.slots[name]].Get(v1alpha1.OwnerShardLabel)
		if !slices.ContainsFunc(shards, func(s Shard) bool { return s.Name == shard }) {
			continue
		}
		if out == nil {
			out = map[string][]string{}
		}
		out[shard] = append(out[shard], name)
	}
	for _, shard := range slices.Sorted(maps.Keys(out)) {
		if n := len(out[shard]); n > MaxNamespaces {
			return nil, fmt.Errorf("label %s: %d namespaces name %s, and at most %d can be pinned to one shard, so the last assignment stays: label fewer", v1alpha1.OwnerShardLabel, n, shard, MaxNamespaces)
		}
	}
	if len(out) > 0 && root.Method == v1alpha1.MethodServerSide {
		return nil, fmt.Errorf("label %s: spec.root.method ServerSide has too few ranges for pinned namespaces, so the last assignment stays: choose Auto, or remove the labels", v1alpha1.OwnerShardLabel)
	}
	return out, nil
}
