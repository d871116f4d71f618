package match

import (
	"maps"
	"slices"
	"strings"
	"sync/atomic"
)

// Hosts finds those of many matches that may be about a host. What it found it remembers:
// a pod asks few hosts, and expressions take long.
type Hosts struct {
	urls  []*URL
	all   []int32
	plain bool                               // it would take longer to look up than to ask
	known atomic.Pointer[map[string][]int32] // immutable
}

const (
	// maxHosts and maxFound bound what is remembered, in hosts and in numbers found.
	// Beyond them it is forgotten: whoever asks many hosts does so in turn.
	maxHosts = 128
	maxFound = 1 << 14
	maxHost  = 253 // no host has a longer name
)

// NewHosts is of matches that are told by their numbers.
func NewHosts(urls []*URL) *Hosts {
	h := &Hosts{urls: urls}
	for i := range urls {
		h.all = append(h.all, int32(i))
	}
	h.plain = len(urls) <= few && !slices.ContainsFunc(urls, func(u *URL) bool {
		return u.host != nil && u.host.kind == expression
	})
	return h
}

// Of are the numbers of those that may be about a host, in order; of all if it is not seen.
func (h *Hosts) Of(host string) []int32 {
	if h.plain || len(host) == 0 || len(host) > maxHost {
		return h.all
	}
	known := h.known.Load()
	if known != nil {
		if of, ok := (*known)[host]; ok {
			return of
		}
	}
	var of []int32
	for i, u := range h.urls {
		if u.HostIs(host) {
			of = append(of, int32(i))
		}
	}
	next, found := map[string][]int32{}, len(of)
	if known != nil && len(*known) < maxHosts {
		for _, of := range *known {
			found += len(of)
		}
		if found <= maxFound {
			next = maps.Clone(*known)
		}
	}
	next[strings.Clone(host)] = of
	h.known.CompareAndSwap(known, &next) // or somebody else remembers his
	return of
}

// Deep reports whether a match asks for more of requests to a host than its name.
func (h *Hosts) Deep(host string) bool {
	return slices.ContainsFunc(h.Of(host), func(n int32) bool { return h.urls[n].Deep() && h.urls[n].HostIs(host) })
}
