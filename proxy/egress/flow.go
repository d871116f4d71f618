package egress

import (
	"maps"
	"net/http"
	"slices"
	"sync"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// flow is a request or a connection that the rules allowed and that is under way.
type flow struct {
	asked  []match.HTTP
	direct *match.HTTP // if not nil: how a server reads it that is not the forward proxy the client takes it for
	opaque bool        // tunnelled as TLS without an attempt to decrypt it
	within bool        // more will be seen, and is decided about then
	failed bool        // it should have been decrypted, but could not be
	cut    func()
}

// flows are the flows of a pod.
type flows struct {
	mu  sync.Mutex
	all map[*flow]struct{}
}

// add must be called before the policy is read for one: decide then applies every later
// policy.
func (f *flows) add(one *flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all == nil {
		f.all = map[*flow]struct{}{}
	}
	f.all[one] = struct{}{}
}

func (f *flows) remove(one *flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.all, one)
}

func (f *flows) decide(s *Server) {
	p, _ := s.Policy()
	if p == nil {
		return
	}
	f.mu.Lock()
	all := slices.Collect(maps.Keys(f.all))
	f.mu.Unlock()
	for _, one := range all { // without the lock: expressions may be slow
		if p.refuses(one) == nil && !p.shuts(one) {
			continue
		}
		f.mu.Lock()
		_, under := f.all[one]
		delete(f.all, one)
		f.mu.Unlock()
		if under {
			go one.cut()
		}
	}
}

// shuts reports whether a breaker that is forced open refuses the flow.
func (p *Policy) shuts(f *flow) bool {
	return !f.within && len(f.asked) > 0 && p.limits.Shut(http.Header(f.asked[0].Header).Get("User-Agent"), f.asked...)
}

// refuses returns why the intercept rules refuse f, or nil if they allow all of it.
func (p *Policy) refuses(f *flow) *denial {
	if len(f.asked) == 0 {
		return &denial{unseen: true}
	}
	if f.direct != nil {
		if refused := p.denies(f.direct, match.Yes); refused != nil {
			return refused
		}
	}
	for i := range f.asked {
		r := &f.asked[i]
		d := p.denied
		switch {
		case f.within:
			d = p.surely
		case r.Scheme == "":
			d = p.blind
		}
		if refused := d(r); refused != nil {
			return refused
		}
		if f.failed && r.Host != "" { // TLS through a forward proxy may have no server name
			if refused := p.denies(r, match.Unseen); refused != nil {
				return refused
			}
		}
	}
	if f.opaque && p.decrypts(f.asked...) {
		return &denial{unseen: true}
	}
	return nil
}
