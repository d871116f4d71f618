package review

import (
	"crypto/x509"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/webhook"
)

// Routes is by what a Server routes reviews.
type Routes struct {
	webhook.Routes
	// Pods are the addresses of the ready pods of each shard.
	Pods map[string][]netip.Addr
	// Authorities verify the certificates of these pods, by the server name that the
	// apiserver uses.
	Authorities map[string]*x509.CertPool
}

const (
	// maxAttempts is how many pods of the owner are tried.
	maxAttempts = 3
	// avoidFor is how long a pod is tried last that could not be reached.
	avoidFor = 5 * time.Second
)

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

// order returns the pods to try, at most maxAttempts: in a random order, those of the family
// of the webhook's own address first, and those that could not be reached lately last.
func (a *avoided) order(pods []netip.Addr, self netip.Addr) []netip.Addr {
	pods = slices.Clone(pods)
	rand.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	rank := func(p netip.Addr) (rank int) {
		if now.Before(a.until[p]) {
			rank += 2
		}
		if p.Is4() != self.Is4() {
			rank++
		}
		return rank
	}
	slices.SortStableFunc(pods, func(p, q netip.Addr) int { return rank(p) - rank(q) })
	return pods[:min(len(pods), maxAttempts)]
}
