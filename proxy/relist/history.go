package relist

import (
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

const (
	// maxHistories bounds the resources of a pod that have a history.
	maxHistories = 512
	// kept is the number of versions that a history keeps for its duration.
	kept = 128
	// maxVersion is the length of a resource version, which is a number of 64 bits.
	maxVersion = 20
)

// Histories are those of the resources of one pod whose lists can be stale.
type Histories struct {
	mu    sync.Mutex
	known map[schema.GroupResource]*History
}

// Of returns the history of a resource, which reaches back to the oldest; nil if no more
// can be remembered.
func (h *Histories) Of(res schema.GroupResource, oldest time.Duration) *History {
	h.mu.Lock()
	defer h.mu.Unlock()
	of := h.known[res]
	if of == nil {
		if len(h.known) >= maxHistories || !match.Storable(res.Group, res.Resource) {
			return nil
		}
		if h.known == nil {
			h.known = map[schema.GroupResource]*History{}
		}
		of = &History{}
		h.known[res] = of
	}
	of.reach(oldest)
	return of
}

// Forget forgets the resources whose lists are never stale any more.
func (h *Histories) Forget(which func(schema.GroupResource) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.known, func(res schema.GroupResource, _ *History) bool { return which(res) })
}

// Len returns the number of resources that have a history.
func (h *Histories) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.known)
}

// History records when which resource versions of a resource were seen, oldest first.
type History struct {
	mu     sync.Mutex
	oldest time.Duration // how far back it reaches
	seen   []sighting
}

type sighting struct {
	at      time.Time
	version string
}

func (h *History) reach(oldest time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.oldest = oldest
}

// See adds a version, unless one was seen just before, or a later one.
func (h *History) See(now time.Time, version []byte) {
	if !number(version) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.seen); n > 0 && (now.Sub(h.seen[n-1].at) < h.oldest/kept || !later(string(version), h.seen[n-1].version)) {
		return
	}
	h.seen = append(h.seen, sighting{now, string(version)})
	old := 0 // the last of these is still needed
	for old+1 < len(h.seen) && !h.seen[old+1].at.After(now.Add(-h.oldest)) {
		old++
	}
	h.seen = slices.Delete(h.seen, 0, max(old, len(h.seen)-2*kept))
}

// number reports whether a version is one.
func number[S string | []byte](version S) bool {
	if len(version) == 0 || len(version) > maxVersion {
		return false
	}
	for i := range len(version) {
		if version[i] < '0' || version[i] > '9' {
			return false
		}
	}
	return true
}

// later compares two versions, which are numbers.
func later(a, b string) bool {
	if len(a) != len(b) {
		return len(a) > len(b)
	}
	return a > b
}

// At returns the last version seen before a time, or else the first; "" if there is none.
func (h *History) At(t time.Time) (version string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, s := range h.seen {
		if i > 0 && s.at.After(t) {
			break
		}
		version = s.version
	}
	return version
}

// Forget forgets a version that the apiserver does not have any more, and all before it.
func (h *History) Forget(version string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.IndexFunc(h.seen, func(s sighting) bool { return s.version == version }); i >= 0 {
		h.seen = slices.Delete(h.seen, 0, i+1)
	}
}
