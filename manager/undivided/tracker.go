package undivided

import (
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// refresh is how long counts in a status stay as they are: they change all the time, and each
// change is a write of the status.
const refresh = time.Minute

// Tracker keeps the result of a root. Its zero value is ready to use.
type Tracker struct {
	Result
	since time.Time // when Result was compared
}

// Round takes a result. It keeps the last one for a while if only numbers differ.
func (t *Tracker) Round(next Result, now time.Time) {
	if now.Sub(t.since) >= refresh || !t.same(next) {
		t.Result, t.since = next, now
	}
}

// same reports whether two results are about the same resources and shards.
func (r Result) same(other Result) bool {
	return slices.EqualFunc(r.Undivided, other.Undivided, func(a, b v1alpha1.UndividedResource) bool {
		return a.Group == b.Group && a.Resource == b.Resource && slices.Equal(a.Shards, b.Shards) && (a.Common > 0) == (b.Common > 0)
	}) && slices.EqualFunc(r.Foreign, other.Foreign, func(a, b v1alpha1.ForeignWrites) bool {
		return a.Group == b.Group && a.Resource == b.Resource && slices.Equal(a.Shards, b.Shards)
	})
}
