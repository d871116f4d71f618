package compile

import (
	"encoding/binary"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Cache keeps rendered objects from one Compile for the next, because most objects do not
// change in between. It is not safe for concurrent use. Objects with the same UID and
// generation must have the same spec.
type Cache struct {
	breakers   map[types.UID]*breaker
	injections map[types.UID]*injection
	limits     map[origin.Name]objectLimits
}

// breaker returns c rendered, from the cache if c is unchanged.
func (k *Cache) breaker(c *v1alpha1.CircuitBreaker) *breaker {
	b := k.breakers[c.UID]
	if b == nil || b.generation != c.Generation || b.recover != c.Annotations[v1alpha1.RecoverAnnotation] {
		return newBreaker(c)
	}
	for key, p := range b.portions {
		if !p.used {
			delete(b.portions, key)
		}
		p.before, p.made, p.used = p.made, map[string]*meshv1.Breaker{}, false
	}
	return b
}

func (k *Cache) injection(f *v1alpha1.FaultInjection) *injection {
	if i := k.injections[f.UID]; i != nil && i.generation == f.Generation {
		return i
	}
	return newInjection(f)
}

// portion is the part of a CircuitBreaker that applies to all pods that match the same
// pod selectors of its rules.
type portion struct {
	rendered *meshv1.Breaker
	digest   []byte
	cost     cost
	egress   *egress
	partly   bool // a rule for the apiserver has no effect
	// shared are the indexes in rendered.Rules of rules of scope Workload.
	shared []int
	keys   []string // the keys of these rules
	// made are copies of rendered with shares, by their encoded shares; before are those of
	// the previous Compile.
	made, before map[string]*meshv1.Breaker
	used         bool // in this Compile
}

// portion returns the portion for a pod with these labels. If elsewhere is set, it
// contains only the rules for other hosts.
func (b *breaker) portion(name string, of labels.Set, elsewhere bool) *portion {
	key := make([]byte, len(b.selectors)+1)
	for i, s := range b.selectors {
		if s.Matches(of) {
			key[i] = 1
		}
	}
	if elsewhere {
		key[len(b.selectors)] = 1
	}
	if p := b.portions[string(key)]; p != nil {
		p.used = true
		return p
	}
	p := &portion{
		rendered: &meshv1.Breaker{Name: name, Intercepts: b.intercepts},
		made:     map[string]*meshv1.Breaker{},
		egress:   b.egress,
		used:     true,
	}
	otherHosts := len(b.intercepts) > 0
	for _, r := range b.limits {
		if r.selector >= 0 && key[r.selector] == 0 {
			continue
		}
		if elsewhere {
			p.partly = p.partly || len(r.Resources)+len(r.Paths) > 0
			if len(r.Http) == 0 {
				continue
			}
		}
		if r.Shared {
			p.shared, p.keys = append(p.shared, len(p.rendered.Rules)), append(p.keys, r.Key)
		}
		p.rendered.Rules = append(p.rendered.Rules, r.LimitRule)
		otherHosts = otherHosts || len(r.Http) > 0
	}
	if !otherHosts {
		p.egress = nil
	}
	p.rendered.RefuseUnseen = p.egress != nil && p.egress.refuseUnseen
	p.cost = cost{proto.Size(p.rendered), len(p.rendered.Rules) + len(p.rendered.Intercepts), b.expressions}
	p.digest, _ = digest(p.rendered) // no error: newBreaker reports rules that cannot be encoded
	b.portions[string(key)] = p
	return p
}

// with returns the breaker with these shares set in its shared rules, and the key of the
// shares.
func (p *portion) with(shares []*meshv1.Share) (rendered *meshv1.Breaker, key string) {
	var text []byte
	for _, s := range shares {
		text = binary.AppendUvarint(binary.AppendUvarint(text, uint64(s.GetIndex())), uint64(s.GetOf()))
	}
	key = string(text)
	if rendered = p.made[key]; rendered != nil {
		return rendered, key
	}
	if rendered = p.before[key]; rendered == nil {
		rendered = &meshv1.Breaker{Name: p.rendered.Name, Intercepts: p.rendered.Intercepts, RefuseUnseen: p.rendered.RefuseUnseen, Rules: append([]*meshv1.LimitRule(nil), p.rendered.Rules...)}
		copies := make([]meshv1.LimitRule, len(p.shared))
		for n, i := range p.shared {
			rendered.Rules[i] = &copies[n]
			shared(rendered.Rules[i], p.rendered.Rules[i], shares[n])
		}
	}
	p.made[key] = rendered
	return rendered, key
}

// shared sets out to a shallow copy of r with a share.
func shared(out, r *meshv1.LimitRule, share *meshv1.Share) {
	out.Name, out.Key, out.Recover = r.Name, r.Key, r.Recover
	out.Resources, out.Paths, out.Http, out.UserAgents = r.Resources, r.Paths, r.Http, r.UserAgents
	out.Bucket, out.MaxInFlight, out.Backoff, out.Trip = r.Bucket, r.MaxInFlight, r.Backoff, r.Trip
	out.Trigger, out.Recovery, out.Share, out.SomePods = r.Trigger, r.Recovery, share, r.SomePods
}
