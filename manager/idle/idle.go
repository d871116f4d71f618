// Package idle finds shards that never write although they have as much to do as others. Their
// pods may wait for an election that the mesh does not see. It does no I/O.
package idle

import (
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

const (
	// After is how long a shard must have been idle before the status reports it.
	After = 10 * time.Minute
	// expected is how often an idle shard would have written, at least, if it wrote as much
	// for each of its objects as the others.
	expected = 20
)

// Shard is what is known of one shard of a root.
type Shard struct {
	Name string
	// Objects is the number of objects of the divided resources that the shard owns; 0 if it
	// is not known.
	Objects int64
	// Writes is the number of writes of its pods lately, to whatever resource.
	Writes uint64
	// Watches reports whether one of its pods watches a divided resource.
	Watches bool
}

// find returns the shards that have written nothing, although the others have written much.
func find(shards []Shard) (out []string) {
	for i, s := range shards {
		if s.Objects == 0 || s.Writes > 0 || !s.Watches {
			continue
		}
		writes, objects := 0.0, 0.0
		for j, other := range shards {
			if j != i {
				writes += float64(other.Writes)
				objects += float64(other.Objects)
			}
		}
		if objects > 0 && writes/objects*float64(s.Objects) >= expected {
			out = append(out, s.Name)
		}
	}
	return out
}

// Tracker tracks since when the shards of a root have been idle. Its zero value is ready to use.
type Tracker struct{ since map[string]time.Time }

// Round returns the shards that have been idle for After. Those that the last leader reported
// have been.
func (t *Tracker) Round(shards []Shard, reported []string, now time.Time) (out []string) {
	since := map[string]time.Time{}
	for _, name := range find(shards) {
		if since[name] = collect.Since(t.since, name, now); t.since == nil && slices.Contains(reported, name) {
			since[name] = now.Add(-After)
		}
		if now.Sub(since[name]) >= After {
			out = append(out, name)
		}
	}
	t.since = since
	return out
}
