package egress

import (
	"fmt"
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Policy is the compiled rules about a pod's requests to hosts other than the apiserver.
// It is immutable. A nil Policy, of a pod without such rules, passes everything without
// looking at it.
type Policy struct {
	breakers []breaker
	decrypt  bool
	limits   *limit.Rules
	faults   *fault.Rules
	steps    int // that expressions take at most for one request
}

// breaker is the intercept rules of one CircuitBreaker.
type breaker struct {
	name         string
	refuseUnseen bool
	deny, allow  matches
}

// matches are the matches of the rules that deny, or of those that allow.
type matches struct {
	of      int                   // number of rules, those without entries included
	entries match.Entries[string] // by the rules' names
}

// Compile returns the policy of m, or nil if m has no Egress. limits and faults must be
// compiled from m too.
func Compile(m *meshv1.Traffic, limits *limit.Rules, faults *fault.Rules) (*Policy, error) {
	if m.GetEgress() == nil {
		return nil, nil
	}
	out := &Policy{decrypt: m.GetEgress().GetDecrypt(), limits: limits, faults: faults}
	out.steps = limits.Hosts().Steps() + faults.Hosts().Steps()
	for _, b := range m.GetBreakers() {
		compiled := breaker{name: b.GetName(), refuseUnseen: b.GetRefuseUnseen()}
		for _, r := range b.GetIntercepts() {
			to := &compiled.allow
			if r.GetDeny() {
				to = &compiled.deny
			}
			to.of++
			if err := to.entries.Add(r.GetName(), nil, nil, r.GetHttp()); err != nil {
				return nil, fmt.Errorf("circuit breaker %s, rule %s: %w", b.GetName(), r.GetName(), err)
			}
		}
		compiled.deny.entries.Index()
		compiled.allow.entries.Index()
		out.steps += compiled.deny.entries.Hosts.Steps() + compiled.allow.entries.Hosts.Steps()
		if compiled.deny.of+compiled.allow.of > 0 || compiled.refuseUnseen {
			out.breakers = append(out.breakers, compiled)
		}
	}
	if out.steps > meshv1.MaxMatchSteps {
		return nil, fmt.Errorf("regular expressions take up to %d steps for one request, and at most %d are permitted: repeat less, or match hosts and paths without expressions", out.steps, meshv1.MaxMatchSteps)
	}
	return out, nil
}

// Refuse returns the policy of a pod whose rules are unknown: nothing passes.
func Refuse() *Policy {
	all := &meshv1.Breaker{Intercepts: []*meshv1.InterceptRule{{Deny: true, Http: []*meshv1.HttpMatch{{}}}}}
	p, err := Compile(&meshv1.Traffic{Egress: &meshv1.Egress{}, Breakers: []*meshv1.Breaker{all}}, nil, nil)
	if err != nil {
		panic(err) // a constant policy always compiles
	}
	return p
}

// denial is why a request is refused: which CircuitBreaker and rule.
type denial struct {
	breaker string // empty: the rules are unknown
	rule    string // empty: no rule allows the request
	unseen  bool   // the rule needs what cannot be seen
	long    int    // the maximum length of a path that expressions match; 0: it is not exceeded
}

// message returns the message to the client. The CircuitBreaker is in the namespace.
func (d *denial) message(namespace string) string {
	of := fmt.Sprintf("CircuitBreaker %s/%s", namespace, d.breaker)
	switch {
	case d.long > 0:
		return fmt.Sprintf("rules match the path by regular expressions, which this request permits up to %d bytes: send a shorter path, or let the rules match paths exactly or by prefix", d.long)
	case d.unseen && d.breaker == "":
		return "a CircuitBreaker needs to see what this connection is for"
	case d.breaker == "":
		return "the egress rules of this pod could not be applied, and all its requests to other hosts are refused: see the status of its CircuitBreakers and FaultInjections"
	case d.unseen:
		return fmt.Sprintf("%s: rule %s needs more of this request than is visible", of, d.rule)
	case d.rule == "":
		return of + ": none of its rules allows this"
	}
	return fmt.Sprintf("%s: rule %s denies this", of, d.rule)
}

// first returns the first denial of a CircuitBreaker, or nil.
func (p *Policy) first(of func(*breaker) *denial) *denial {
	if p == nil {
		return nil
	}
	for i := range p.breakers {
		if d := of(&p.breakers[i]); d != nil {
			return d
		}
	}
	return nil
}

// denied returns why the rules refuse a request, or nil if they allow it.
func (p *Policy) denied(r *match.HTTP) *denial {
	return p.first(func(b *breaker) *denial { return b.denied(r, b.refuseUnseen) })
}

// surely returns why the rules refuse a request regardless of what else will be seen of
// it. It returns nil if that is still open.
func (p *Policy) surely(r *match.HTTP) *denial {
	return p.first(func(b *breaker) *denial { return b.denied(r, false) })
}

// denies returns a rule that gives a verdict about denying a request, or nil. It ignores
// rules that allow.
func (p *Policy) denies(r *match.HTTP, verdict match.Verdict) *denial {
	return p.first(func(b *breaker) *denial {
		if found, by := b.deny.decide(r); found == verdict {
			return &denial{breaker: b.name, rule: by, unseen: verdict == match.Unseen}
		}
		return nil
	})
}

// blind returns why the rules refuse a connection that is neither TLS nor HTTP. Only
// rules for any host can match it. Where these do not allow it, refuseUnseen decides.
func (p *Policy) blind(r *match.HTTP) *denial {
	return p.first(func(b *breaker) *denial {
		if verdict, by := b.deny.decide(r); verdict == match.Yes {
			return &denial{breaker: b.name, rule: by}
		}
		if verdict, _ := b.allow.decide(r); b.refuseUnseen && verdict != match.Yes {
			return &denial{breaker: b.name, unseen: true}
		}
		return nil
	})
}

func (b *breaker) denied(r *match.HTTP, refuseUnseen bool) *denial {
	verdict, by := b.deny.decide(r)
	switch {
	case verdict == match.Yes:
		return &denial{breaker: b.name, rule: by}
	case verdict == match.Unseen && refuseUnseen:
		return &denial{breaker: b.name, rule: by, unseen: true}
	case b.allow.of == 0:
		return nil
	}
	switch verdict, by = b.allow.decide(r); {
	case verdict == match.No:
		return &denial{breaker: b.name}
	case verdict == match.Unseen && refuseUnseen:
		return &denial{breaker: b.name, rule: by, unseen: true}
	}
	return nil
}

// decide returns the strongest verdict of the rules (Yes before Unseen before No), and
// the first rule that gives it.
func (of *matches) decide(r *match.HTTP) (verdict match.Verdict, by string) {
	found, sure := of.entries.Hosts.Of(r.Host)
	for _, n := range found {
		switch e := &of.entries.URLs[n]; e.Match.MatchFound(r, sure) {
		case match.Yes:
			return match.Yes, e.Rule
		case match.Unseen:
			if verdict == match.No {
				verdict, by = match.Unseen, e.Rule
			}
		}
	}
	return verdict, by
}

// deep reports whether a rule needs more of the requests to a host than its name.
func (p *Policy) deep(host string) bool {
	return p.some(func(h *match.Hosts) bool { return h.Deep(host) })
}

// some reports whether is returns true for the matches of some rules.
func (p *Policy) some(is func(*match.Hosts) bool) bool {
	if p == nil {
		return false
	}
	for i := range p.breakers {
		if is(p.breakers[i].deny.entries.Hosts) || is(p.breakers[i].allow.entries.Hosts) {
			return true
		}
	}
	return is(p.limits.Hosts()) || is(p.faults.Hosts())
}

// tooLong returns the denial of a request whose path is too long for the expressions that
// match it, or nil. They match it once for each target of the request.
func (p *Policy) tooLong(f *flow) *denial {
	targets := len(f.asked)
	if f.direct != nil {
		targets++
	}
	long := meshv1.MaxMatchedPath / targets
	if len(f.asked[0].Path) <= long || !slices.ContainsFunc(f.asked, func(r match.HTTP) bool { return p.pathExpression(r.Host) }) {
		return nil
	}
	return &denial{long: long}
}

// pathExpression reports whether a rule matches the paths of a host by a regular expression.
func (p *Policy) pathExpression(host string) bool {
	return p.some(func(h *match.Hosts) bool { return h.PathExpression(host) })
}

// decrypts reports whether a TLS connection is to be decrypted, because a rule is about
// the requests within it. asked is what is seen of the connection.
func (p *Policy) decrypts(asked ...match.HTTP) bool {
	return p != nil && p.decrypt && slices.ContainsFunc(asked, func(r match.HTTP) bool {
		return r.Host != "" && (p.intercepts(&r) || p.limits.Decrypts(&r) || p.faults.Decrypts(&r))
	})
}

// intercepts reports whether intercept rules must see more of a request to decide.
func (p *Policy) intercepts(r *match.HTTP) bool {
	return slices.ContainsFunc(p.breakers, func(b breaker) bool {
		deny, _ := b.deny.decide(r)
		allow, _ := b.allow.decide(r)
		return deny == match.Unseen || deny == match.No && allow == match.Unseen
	})
}
