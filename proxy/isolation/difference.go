package isolation

import (
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Difference is what a list or watch shows under a division and did not, or not always, show
// under some others before, or the other way round.
type Difference struct {
	before []shown
	after  shown

	selector *Selector      // of all; nil: any labels
	moved    sharding.Scope // the keys that some division before did not own as the one after does
	every    bool           // moved is not known: objects of any key may differ
	field    string         // of the keys, for a shardSelector; "": none reads it
}

// shown is what a list or watch shows.
type shown struct {
	nothing   bool
	selector  *Selector  // of labels; nil: any
	narrowing *Narrowing // nil: any key
}

func (s shown) shows(k filter.Key) bool {
	return !s.nothing && (s.narrowing == nil || s.narrowing.Owns(k))
}

// shown returns what a list or watch shows of a namespace ("": of all), or of the object of
// a name.
func (d *Division) shown(k match.Kind, namespace, name string) (s shown) {
	res := k.GroupResource()
	e := d.Exemption(k)
	exempt := e != nil && e.Covers(namespace, name)
	if !exempt || d.SelectsShared() && name == "" {
		s.selector = d.Selector(res)
		s.nothing = s.selector.String() == Nothing.text
	}
	if n := d.Narrowing(res); n != nil && !exempt && n.Narrows(namespace) {
		s.narrowing = n
	}
	return s
}

// Difference compares what a list or watch shows under d with what it showed under the
// divisions before. It is not ok if that does not follow from the keys of objects: their
// labels decide, or the User-Agent of the client.
func (d *Division) Difference(before []*Division, k match.Kind, namespace, name string) (out *Difference, ok bool) {
	out = &Difference{after: d.shown(k, namespace, name)}
	sides := []shown{out.after}
	for _, b := range before {
		if !slices.Equal(d.message.GetDeniedUserAgents(), b.message.GetDeniedUserAgents()) {
			return nil, false
		}
		was := b.shown(k, namespace, name)
		out.before, sides = append(out.before, was), append(sides, was)
	}
	sides = slices.DeleteFunc(sides, func(s shown) bool { return s.nothing })
	for _, s := range sides {
		if out.selector = s.selector; s.selector.String() != sides[0].selector.String() {
			return nil, false
		}
	}
	for _, was := range out.before {
		out.cover(was, out.after)
	}
	switch {
	case out.every:
	case namespace != "" && out.field == ByNamespace.field():
		out.moved, out.field = out.moved.Intersect(sharding.Keys(namespace)), ""
	case d.method == meshv1.Method_METHOD_FILTER:
		out.field = ""
	}
	return out, true
}

// cover adds the keys of which objects are shown on one side alone.
func (d *Difference) cover(was, is shown) {
	if was.nothing && is.nothing {
		return
	}
	a, b := was.like(is), is.like(was)
	if a.by != b.by || !a.shared.equal(b.shared) || was.nothing != is.nothing && len(a.shared) > 0 {
		d.every = true
		return
	}
	moved := sharding.Union(a.owned.Minus(b.owned), b.owned.Minus(a.owned))
	if was.nothing != is.nothing && a.by == ByNamespace {
		moved = sharding.Union(moved, sharding.Keys("")) // of objects in no namespace
	}
	d.moved, d.field = sharding.Union(d.moved, moved), a.by.field()
}

// like returns the keys that are shown. What it does not restrict is as in another.
func (s shown) like(other shown) *Narrowing {
	out := &Narrowing{owned: sharding.All()}
	switch {
	case s.narrowing != nil && !s.nothing:
		return s.narrowing
	case other.narrowing != nil:
		out.by, out.shared = other.narrowing.by, other.narrowing.shared
	}
	if s.nothing {
		out.owned = sharding.Scope{}
	}
	return out
}

// Empty reports whether no object can differ.
func (d *Difference) Empty() bool { return !d.every && d.moved.Empty() }

// Compare reports whether an object is shown, and may not have been before, or the other way
// round.
func (d *Difference) Compare(k filter.Key) (gained, lost bool) {
	after, all, some := d.after.shows(k), true, false
	for _, was := range d.before {
		shows := was.shows(k)
		all, some = all && shows, some || shows
	}
	return after && !all, some && !after
}

// Selectors select at least the objects that may differ: by label, nil for all, and as
// shardSelector, "" for all.
func (d *Difference) Selectors() (labels *Selector, shards string) {
	if !d.every && d.field != "" {
		shards, _ = d.moved.ShardSelector(d.field)
	}
	return d.selector, shards
}
