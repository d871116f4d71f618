package compile

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	_ "time/tzdata" // agents have it too

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile/rules"
)

var defaultPorts = []int32{80, 443}

// BreakerProblems returns the invalid parts of a CircuitBreaker, which would have no
// effect.
func BreakerProblems(c *v1alpha1.CircuitBreaker) field.ErrorList { return newBreaker(c).errs }

// InjectionProblems returns the invalid parts of a FaultInjection, which would have no
// effect.
func InjectionProblems(f *v1alpha1.FaultInjection) field.ErrorList { return newInjection(f).errs }

// RenderBreaker returns all valid rules of a CircuitBreaker as agents receive them.
func RenderBreaker(c *v1alpha1.CircuitBreaker) *meshv1.Breaker { return newBreaker(c).all() }

// RenderFaults returns all valid rules of a FaultInjection as agents receive them.
func RenderFaults(f *v1alpha1.FaultInjection) []*meshv1.FaultRule { return newInjection(f).all.rules }

// breaker is a CircuitBreaker, rendered for policies.
type breaker struct {
	rendered
	recover string
	// selectors are the distinct pod selectors of the rules.
	selectors  []labels.Selector
	portions   map[string]*portion
	limits     []limitRule
	intercepts []*meshv1.InterceptRule
	// egress is nil if no rule applies to other hosts.
	egress *egress
	// expressions is the total size of all regular expressions.
	expressions int
	errs        field.ErrorList
}

type limitRule struct {
	rules.Limit
	selector int // the index of Selects in breaker.selectors; -1 for all pods
}

// rendered is the part of a compiled object that depends on its spec alone.
type rendered struct {
	generation int64
	ruling     ruling
	rules      []Rule
}

// egress is how one object redirects connections to other hosts.
type egress struct {
	ports        []int32
	refuseUnseen bool
}

// injection is a FaultInjection, rendered for policies.
type injection struct {
	rendered
	all, elsewhere faults // elsewhere: only the rules for other hosts
	egress         *egress
	errs           field.ErrorList
}

// faults are rules of a FaultInjection.
type faults struct {
	rules  []*meshv1.FaultRule
	digest []byte
	cost   cost
	partly bool // a rule for the apiserver has no effect
}

// newBreaker renders the valid parts of a CircuitBreaker.
func newBreaker(c *v1alpha1.CircuitBreaker) *breaker {
	b := &breaker{recover: c.Annotations[v1alpha1.RecoverAnnotation], portions: map[string]*portion{}}
	r := rules.Renderer{}
	selectors := map[string]int{}
	spec := field.NewPath("spec")
	otherHosts, whitelist := false, false
	for i := range c.Spec.RateLimitings {
		in := &c.Spec.RateLimitings[i]
		before := len(r.Errs)
		limit := r.Limit(in, spec.Child("rateLimitings").Index(i))
		if len(r.Errs) > before {
			continue
		}
		rule := limitRule{limit, -1}
		rule.Recover = shortened(c.Annotations[v1alpha1.RecoverAnnotation])
		rule.Key = key(c.UID, in.Name, rule.LimitRule, func(m proto.Message) {
			m.(*meshv1.LimitRule).Recover, m.(*meshv1.LimitRule).Share = "", nil
		})
		if rule.Selects != nil {
			text := rule.Selects.String()
			if _, ok := selectors[text]; !ok {
				selectors[text] = len(b.selectors)
				b.selectors = append(b.selectors, rule.Selects)
			}
			rule.selector = selectors[text]
		}
		b.rules = append(b.rules, Rule{rule.Name, rule.Key})
		b.limits = append(b.limits, rule)
		otherHosts = otherHosts || len(rule.Http) > 0
	}
	for i := range c.Spec.TrafficInterceptRules {
		in := &c.Spec.TrafficInterceptRules[i]
		// Invalid entries of a list are omitted. A Whitelist still denies everything
		// that its valid entries do not allow.
		rule := r.Intercept(in, spec.Child("trafficInterceptRules").Index(i))
		b.intercepts = append(b.intercepts, rule)
		otherHosts, whitelist = true, whitelist || !rule.Deny
	}
	if otherHosts {
		b.egress = &egress{defaultPorts, whitelist}
		if e := c.Spec.Egress; e != nil {
			if len(e.Ports) > 0 {
				b.egress.ports = e.Ports
			}
			if e.Unseen != "" {
				b.egress.refuseUnseen = e.Unseen == v1alpha1.UnseenDeny
			}
		}
	}
	b.expressions, b.errs = r.Expressions, r.Errs
	b.generation, b.ruling = c.Generation, newRuling(c.Spec, c.Spec.Selector, b.errs)
	if _, err := digest(b.all()); err != nil {
		b.ruling.Problem = &Problem{v1alpha1.ReasonInvalid, err.Error()} // it did not come as JSON
	}
	return b
}

// all returns all rules, as for a pod that every rule selects.
func (b *breaker) all() *meshv1.Breaker {
	return &meshv1.Breaker{Intercepts: b.intercepts, Rules: collect.Map(b.limits, func(r limitRule) *meshv1.LimitRule { return r.LimitRule })}
}

func newInjection(f *v1alpha1.FaultInjection) *injection {
	out := &injection{}
	r := rules.Renderer{}
	path := field.NewPath("spec", "httpFault")
	for i := range f.Spec.HTTPFaultInjections {
		in := &f.Spec.HTTPFaultInjections[i]
		before := len(r.Errs)
		rule := r.Fault(in, path.Index(i))
		if len(r.Errs) > before {
			continue
		}
		rule.Key = key(f.UID, in.Name, rule, func(proto.Message) {})
		out.all.rules = append(out.all.rules, rule)
		out.rules = append(out.rules, Rule{rule.Name, rule.Key})
		if len(rule.Http) == 0 || len(rule.Resources)+len(rule.Paths) > 0 {
			out.elsewhere.partly = true
		}
		if len(rule.Http) > 0 {
			out.elsewhere.rules = append(out.elsewhere.rules, rule)
			out.egress = &egress{ports: defaultPorts}
			if e := f.Spec.Egress; e != nil && len(e.Ports) > 0 {
				out.egress.ports = e.Ports
			}
		}
	}
	if d := f.Spec.Duration; d != nil {
		r.Lifetime(*d, field.NewPath("spec", "duration"))
	}
	out.errs = r.Errs
	out.generation, out.ruling = f.Generation, newRuling(f.Spec, f.Spec.Selector, out.errs)
	for _, rendered := range []*faults{&out.all, &out.elsewhere} {
		m := &meshv1.Injection{Name: f.Name, Rules: rendered.rules}
		rendered.cost = cost{proto.Size(m), len(rendered.rules), r.Expressions}
		var err error
		if rendered.digest, err = digest(m); err != nil {
			out.ruling.Problem = &Problem{v1alpha1.ReasonInvalid, err.Error()} // it did not come as JSON
		}
	}
	return out
}

// key returns the key of a rule's counters. A changed rule has another key and starts
// counting anew.
func key(object types.UID, name string, rule proto.Message, without func(proto.Message)) string {
	rule = proto.Clone(rule)
	without(rule)
	content, err := proto.MarshalOptions{Deterministic: true}.Marshal(rule)
	if err != nil {
		return "" // not UTF-8: the rule is in no policy
	}
	h := sha256.New()
	for _, part := range []string{string(object), name} {
		_, _ = fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	_, _ = h.Write(content)
	return hex.EncodeToString(h.Sum(nil)[:10])
}

// specHash returns the hash that identifies a spec in statuses.
func specHash(spec any) string {
	b, err := json.Marshal(spec)
	if err != nil {
		return "" // cannot happen: the spec was decoded from JSON
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// shortened returns a short hash of an annotation's value, which may be long.
func shortened(value string) string {
	if value == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(value))
	return hex.EncodeToString(sum[:8])
}
