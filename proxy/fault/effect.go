package fault

import (
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// InEffect tells whether all rules that harm a request are among these, and their time
// is not over.
func (r *Rules) InEffect(now time.Time, f *Faults) bool {
	return r.Still(f) && !slices.ContainsFunc(r.rules, func(of *rule) bool {
		return slices.Contains(f.by, of.counts) && !of.inForce(now)
	})
}

// Drops tells whether a rule may keep events from the watches of a kind, in effect now
// or not.
func (r *Rules) Drops(k match.Kind) bool {
	of := r.OfKind(k)
	return of != nil && slices.ContainsFunc(of.entries, func(e entry) bool { return e.may.has(WatchDrop) })
}
