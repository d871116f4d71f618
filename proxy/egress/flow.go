package egress

import (
	"net/http"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// flow is a request or a connection that the rules allowed and that is under way.
type flow struct {
	asked  []match.HTTP
	direct *match.HTTP // not nil: the request as a server reads it that is no forward proxy, though the client assumes one
	opaque bool        // tunnelled as TLS without an attempt to decrypt it
	within bool        // the requests within it will be seen, and rules apply to them then
	failed bool        // it should have been decrypted, but could not be
	cut    func()
}

// decide cuts those of the flows that the policy refuses.
func (s *Server) decide(flows []*flow) {
	p, _ := s.Policy()
	if p == nil {
		return
	}
	for _, one := range flows {
		if (p.refuses(one) != nil || p.shuts(one)) && s.flows.Remove(one) {
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
	if long := p.tooLong(f); long != nil {
		return long
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
