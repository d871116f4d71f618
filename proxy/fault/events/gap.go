package events

import (
	"math"
	"strconv"
	"sync"
)

// Gap is the range of resource versions that a client read while an event was withheld
// from it. A client that resumes from one of these misses that event. A Gap is safe for
// concurrent use.
type Gap struct {
	mu       sync.Mutex
	from, to uint64
	open     bool
}

// Covers reports whether a watch must not resume from a version.
func (g *Gap) Covers(version string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.open {
		return false
	}
	v, err := strconv.ParseUint(version, 10, 64)
	return err != nil || g.from <= v && v <= g.to
}

// Empty reports whether the gap covers no version.
func (g *Gap) Empty() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.open
}

// Forget empties the gap. Call it when the client has listed.
func (g *Gap) Forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = false
}

// Cover extends the gap to a version. The gap stays one range. A version that is not a
// number makes it cover all versions.
func (g *Gap) Cover(version string) {
	from, err := strconv.ParseUint(version, 10, 64)
	to := from
	if err != nil {
		from, to = 0, math.MaxUint64
	}
	g.cover(from, to)
}

// Join extends the gap to the versions of another one. The gap stays one range.
func (g *Gap) Join(other *Gap) {
	other.mu.Lock()
	from, to, open := other.from, other.to, other.open
	other.mu.Unlock()
	if open {
		g.cover(from, to)
	}
}

func (g *Gap) cover(from, to uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open {
		from, to = min(from, g.from), max(to, g.to)
	}
	g.from, g.to, g.open = from, to, true
}
