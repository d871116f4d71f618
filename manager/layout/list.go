package layout

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/expression"
)

// list is a list of matches, and which namespaces it was found to match.
type list struct {
	entries []v1alpha1.NamespaceMatch
	// matches are the entries that were read. program counts their instructions.
	matches []func(name string, of labels.Set) bool
	program int
	err     error // why the next entry cannot be read
	// known are the slots of namespaces that were matched, and matched those with a match.
	// All slots before next are known, or of no namespace.
	known, matched bits
	next           int
	names          []string // of the result; nil unless it is current
	former         []string // the result before the list was changed
	used           bool     // since the last Sweep
}

// newList returns a list that replaces another one, which may be nil.
func newList(entries []v1alpha1.NamespaceMatch, r *Resolver, former *list) *list {
	l := &list{entries: entries}
	if former != nil && former.err == nil {
		l.former = former.result(r)
	}
	return l
}

// done reports whether all namespaces were matched, or cannot be.
func (l *list) done(r *Resolver) bool {
	return l.err != nil || len(l.matches) == len(l.entries) && l.next >= len(r.names)
}

// forget forgets what was found out about a slot.
func (l *list) forget(slot int) {
	l.known.clear(slot)
	l.matched.clear(slot)
	l.next, l.names = min(l.next, slot), nil
}

// step reads entries and matches namespaces until all are, or until more reports false. It
// reports whether more may be done.
func (l *list) step(r *Resolver, more func() bool) bool {
	for l.err == nil && len(l.matches) < len(l.entries) {
		l.read(l.entries[len(l.matches)])
		if !more() {
			return false
		}
	}
	if l.err != nil {
		return true
	}
	for ; l.next < len(r.names); l.next++ {
		slot := l.next
		if r.names[slot] == "" || l.known.has(slot) {
			continue
		}
		l.match(slot, r.names[slot], r.labels[slot])
		if !more() {
			return false
		}
	}
	return true
}

func (l *list) match(slot int, name string, of labels.Set) {
	l.known.set(slot)
	l.names = nil
	for _, matches := range l.matches {
		if matches(name, of) {
			l.matched.set(slot)
			return
		}
	}
}

// result returns, sorted, the names in the list and those of all namespaces that match. Until
// it is done, the result is that before the list was changed, or what was found of it so far.
func (l *list) result(r *Resolver) []string {
	if l.former != nil && !l.done(r) {
		return l.former
	}
	l.former = nil
	if l.names != nil {
		return l.names
	}
	l.names = slices.Concat(Named(l.entries), []string{})
	for slot, name := range r.names {
		if l.matched.has(slot) {
			l.names = append(l.names, name)
		}
	}
	slices.Sort(l.names)
	l.names = slices.Compact(l.names)
	return l.names
}

// read reads the next entry.
func (l *list) read(m v1alpha1.NamespaceMatch) {
	matches := func(string, labels.Set) bool { return false }
	switch {
	case m.Selector != nil:
		selector, err := metav1.LabelSelectorAsSelector(m.Selector)
		if err != nil {
			l.err = fmt.Errorf("invalid selector of namespaces: %w", err)
			return
		}
		matches = func(_ string, of labels.Set) bool { return selector.Matches(of) }
	case m.Pattern != "":
		pattern, err := expression.Compile(m.Pattern)
		if err != nil {
			l.err = fmt.Errorf("invalid pattern %q of namespaces: %w", m.Pattern, err)
			return
		}
		if l.program += pattern.Program; l.program > maxPrograms {
			l.err = errPrograms
			return
		}
		matches = func(name string, _ labels.Set) bool { return pattern.MatchString(name) }
	}
	l.matches = append(l.matches, matches)
}

// maxPrograms is how many instructions the patterns of one list may have together.
const maxPrograms = 4 * expression.MaxProgram

var errPrograms = fmt.Errorf("the patterns of one list compile to more than %d instructions together: repeat less, or match by names or labels", maxPrograms)

// bits is a set of small numbers.
type bits []uint64

func (b bits) has(n int) bool { return n/64 < len(b) && b[n/64]>>(n%64)&1 == 1 }

func (b *bits) set(n int) {
	if grow := n/64 + 1 - len(*b); grow > 0 {
		*b = append(*b, make([]uint64, grow)...)
	}
	(*b)[n/64] |= 1 << (n % 64)
}

func (b bits) clear(n int) {
	if n/64 < len(b) {
		b[n/64] &^= 1 << (n % 64)
	}
}
