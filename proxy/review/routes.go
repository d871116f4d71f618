package review

import (
	"crypto/x509"
	"math/rand/v2"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/review/route"
)

// Routes is by what a Server routes reviews.
type Routes struct {
	route.Routes
	// Pods are the addresses of the ready pods of each shard.
	Pods map[string][]netip.Addr
	// Authorities verify the certificates of these pods, by the server name that the
	// apiserver uses.
	Authorities map[string]*x509.CertPool
}

const (
	// maxAttempts is how many pods of the owner are tried.
	maxAttempts = 3
	// avoidFor is how long a pod is not tried that could not be reached: each attempt may take
	// the time that the application needs to answer in its place.
	avoidFor = 5 * time.Second
	// The bounds of a webhook's timeout, and its default.
	minTimeout, maxTimeout, defaultTimeout = time.Second, 30 * time.Second, 10 * time.Second
)

// reachWithin returns how long it may take to reach pods with a review: a third of the timeout
// of the apiserver, which is in the query. The rest is for the answer.
func reachWithin(query url.Values) time.Duration {
	timeout, err := time.ParseDuration(query.Get("timeout"))
	if err != nil {
		timeout = defaultTimeout
	}
	return min(max(timeout, minTimeout), maxTimeout) / 3
}

// avoided are the pods that could not be reached lately. It is safe for concurrent use.
type avoided struct {
	mu    sync.Mutex
	until map[netip.Addr]time.Time
}

func (a *avoided) add(pod netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if a.until == nil {
		a.until = map[netip.Addr]time.Time{}
	}
	for pod, until := range a.until {
		if now.After(until) {
			delete(a.until, pod)
		}
	}
	a.until[pod] = now.Add(avoidFor)
}

// choose returns the pods to try, at most maxAttempts, in a random order, those of the family
// of the webhook's own address first.
func (a *avoided) choose(pods []netip.Addr, self netip.Addr) []netip.Addr {
	pods = slices.Clone(pods)
	rand.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	pods = slices.DeleteFunc(pods, func(p netip.Addr) bool { return now.Before(a.until[p]) })
	rank := func(p netip.Addr) int {
		if p.Is4() != self.Is4() {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(pods, func(p, q netip.Addr) int { return rank(p) - rank(q) })
	return pods[:min(len(pods), maxAttempts)]
}
