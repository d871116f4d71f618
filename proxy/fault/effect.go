package fault

import (
	"slices"
	"time"
)

// InEffect tells whether all rules that harm a request are among these, and their time
// is not over.
func (r *Rules) InEffect(now time.Time, f *Faults) bool {
	return r.Still(f) && !slices.ContainsFunc(r.rules, func(of *rule) bool {
		return slices.Contains(f.by, of.counts) && !of.inForce(now)
	})
}
