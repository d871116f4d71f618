package match

import (
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Hosts finds the matches that may match a host. It caches the results: a pod sends
// requests to few hosts, and expressions are slow.
type Hosts struct {
	urls  []*URL
	all   []int32
	plain bool                               // a lookup would take longer than to evaluate all matches
	known atomic.Pointer[map[string][]int32] // immutable
}

const (
	// maxHosts and maxFound bound the cache, in hosts and in indexes. Above them it is
	// emptied: a pod that uses many hosts uses them one after the other.
	maxHosts = 128
	maxFound = 1 << 14
	// few is up to how many values or matches are tried one by one.
	few = 8
)

// NewHosts returns the Hosts of matches, which Of identifies by their indexes in urls.
func NewHosts(urls []*URL) *Hosts {
	h := &Hosts{urls: urls}
	for i := range urls {
		h.all = append(h.all, int32(i))
	}
	h.plain = len(urls) <= few && !slices.ContainsFunc(urls, func(u *URL) bool {
		return u.host != nil && u.host.expression != nil
	})
	return h
}

// Of returns the indexes of the matches that may match a host, in order. If the host is
// empty, it returns all. sure means that the host of each does match.
func (h *Hosts) Of(host string) (indexes []int32, sure bool) {
	if h.plain || len(host) == 0 || len(host) > meshv1.MaxMatchedHost {
		return h.all, false
	}
	known := h.known.Load()
	if known != nil {
		if of, ok := (*known)[host]; ok {
			return of, true
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
	h.known.CompareAndSwap(known, &next) // if this fails, another goroutine has cached its result
	return of, true
}

// Deep reports whether a match needs more of the requests to a host than its name.
func (h *Hosts) Deep(host string) bool { return h.any(host, (*URL).Deep) }

// PathExpression reports whether a match has a regular expression for the paths of a host.
func (h *Hosts) PathExpression(host string) bool { return h.any(host, (*URL).PathExpression) }

// Steps returns how many instructions the expressions run at most for one request.
func (h *Hosts) Steps() (n int) {
	if h == nil {
		return 0
	}
	for _, u := range h.urls {
		n += u.Steps()
	}
	return n
}

func (h *Hosts) any(host string, is func(*URL) bool) bool {
	if h == nil {
		return false
	}
	of, sure := h.Of(host)
	return slices.ContainsFunc(of, func(n int32) bool { return is(h.urls[n]) && (sure || h.urls[n].HostIs(host)) })
}
