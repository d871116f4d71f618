package compile

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Rules are the objects with traffic rules, and what is needed to compile them.
type Rules struct {
	Breakers   []*v1alpha1.CircuitBreaker
	Injections []*v1alpha1.FaultInjection
	// NoFaults are the namespaces that forbid fault injection.
	NoFaults []string
	// Share returns a pod's share of a rule of scope Workload, by the names of the
	// CircuitBreaker, the rule and the pod. If it is nil, no pod has a share yet.
	Share func(breaker types.NamespacedName, rule, pod string, uid types.UID) *meshv1.Share
	// Cache keeps rendered objects for the next Compile; nil for no cache.
	Cache *Cache
	// RequestTimeout is the apiserver's --request-timeout, which is sent to all shards.
	RequestTimeout time.Duration
	// Elapsed is the clock by which Result.Took is measured; nil: it is not.
	Elapsed func() time.Duration
	// Now is the current time: FaultInjections that expired before have no effect.
	Now time.Time
}

// Breaker is the result of compiling one CircuitBreaker.
type Breaker struct {
	*v1alpha1.CircuitBreaker
	Ruling
}

// Injection is the result of compiling one FaultInjection.
type Injection struct {
	*v1alpha1.FaultInjection
	Ruling
}

// Ruling is the result that CircuitBreakers and FaultInjections have in common.
type Ruling struct {
	// Hash is the hash of the spec.
	Hash string
	// Problem says why the object has no effect at all; nil if it has. Its Reason is one
	// of Invalid, Disabled, Expired, Forbidden and Pending.
	Problem *Problem
	// Problems are the parts that have no effect.
	Problems []*Problem
	// Targets are the pods that the object selects, by name, whether or not it has effect.
	Targets []Target
	// Rules are the rules with effect, in the order of the spec, without intercept rules.
	Rules []Rule
}

// Rule is a rule that has counters in pods.
type Rule struct{ Name, Key string }

// Target is a pod that is selected.
type Target struct {
	Pod *corev1.Pod
	// Version is the version of the policy with which the spec is in force in the pod.
	Version string
	// Message says why the object has no effect, or only a part of it, in this pod alone.
	Message string
	// Shared are the keys of the rules of scope Workload of which the pod has or needs a
	// share. The members of one workload have the same namespace and PodPolicy.Workload.
	Shared []string
}

// Bounds on the traffic rules of one pod's policy, so that agents accept it: bytes, number
// of rules, and number of ports. meshv1.MaxMatchSteps bounds the regular expressions.
const (
	maxTraffic = 1 << 20
	maxRules   = 1024
	maxPorts   = 64
)

// maxObjects bounds the objects of a kind in a namespace that have effect, and the others whose pods
// are listed: each may select all pods of the namespace.
const maxObjects = 256

// cost is the part of these bounds that rules use up.
type cost struct{ size, rules, expressions int }

// trafficRules renders the traffic rules of pods.
type trafficRules struct {
	Rules
	noFaults   []string                    // sorted
	breakers   map[string][]*breakerSource // by namespace, each sorted by name
	injections map[string][]*injectionSource
	// made are the rendered rules, by digest, so that pods share them.
	made map[string]*meshv1.Traffic
	// until is when the next FaultInjection is omitted.
	until time.Time
}

// ruling is a Ruling under construction.
type ruling struct {
	Ruling
	selects labels.Selector // nil: nothing
	targets []*Target
}

type breakerSource struct {
	*v1alpha1.CircuitBreaker
	*breaker
	ruling        // shadows the ruling of the breaker
	rendered bool // at least one pod has a rule of it
}

type injectionSource struct {
	*v1alpha1.FaultInjection
	*injection
	ruling
	expires int64 // in seconds since 1970, as in policies; 0 for never
}

func newTrafficRules(rules Rules) *trafficRules {
	t := &trafficRules{
		Rules:      rules,
		noFaults:   slices.Sorted(slices.Values(rules.NoFaults)),
		breakers:   map[string][]*breakerSource{},
		injections: map[string][]*injectionSource{},
		made:       map[string]*meshv1.Traffic{},
	}
	t.Cache = cmp.Or(t.Cache, &Cache{})
	breakers, injections := map[types.UID]*breaker{}, map[types.UID]*injection{}
	ofBreakers, ofInjections := places{}, places{}
	for _, c := range slices.SortedFunc(slices.Values(rules.Breakers), byName) {
		known := t.Cache.breaker(c)
		breakers[c.UID] = known
		b := &breakerSource{CircuitBreaker: c, breaker: known, ruling: known.ruling}
		b.disabled(c, c.Spec.Disabled, v1alpha1.DisableBreakerLabel)
		ofBreakers.take(c.Namespace, "CircuitBreakers", &b.ruling)
		if b.Problem == nil {
			b.Rules = known.rules
		}
		t.breakers[c.Namespace] = append(t.breakers[c.Namespace], b)
	}
	for _, f := range slices.SortedFunc(slices.Values(rules.Injections), byName) {
		known := t.Cache.injection(f)
		injections[f.UID] = known
		s := &injectionSource{FaultInjection: f, injection: known, ruling: known.ruling}
		s.disabled(f, f.Spec.Disabled, v1alpha1.DisableFaultsLabel)
		if s.Problem == nil {
			if _, forbidden := slices.BinarySearch(t.noFaults, f.Namespace); forbidden {
				s.Problem = &Problem{v1alpha1.ReasonForbidden, fmt.Sprintf("namespace %s has the label %s, which forbids fault injection: remove the label, or try another namespace", f.Namespace, v1alpha1.NoFaultsLabel)}
			} else if f.Spec.Duration != nil {
				t.expiry(s)
			}
		}
		ofInjections.take(f.Namespace, "FaultInjections", &s.ruling)
		if s.Problem == nil {
			s.Rules = known.rules
		}
		t.injections[f.Namespace] = append(t.injections[f.Namespace], s)
	}
	t.Cache.breakers, t.Cache.injections = breakers, injections
	return t
}

func newRuling(spec any, selector *metav1.LabelSelector, errs field.ErrorList) ruling {
	r := ruling{Ruling: Ruling{Hash: specHash(spec), Problems: collect.Map(errs, func(e *field.Error) *Problem {
		return &Problem{v1alpha1.ReasonInvalid, e.Error()}
	})}}
	if selector == nil {
		r.Problem = &Problem{v1alpha1.ReasonInvalid, "spec.selector: say which pods: {} for all of the namespace"}
		return r
	}
	var err error
	if r.selects, err = metav1.LabelSelectorAsSelector(selector); err != nil {
		r.Problem = &Problem{v1alpha1.ReasonInvalid, "spec.selector: " + err.Error()}
	}
	return r
}

// disabled sets the problem of an object that is disabled or being deleted.
func (r *ruling) disabled(o metav1.Object, spec bool, label string) {
	_, labelled := o.GetLabels()[label]
	switch {
	case r.Problem != nil:
	case o.GetDeletionTimestamp() != nil:
		r.Problem = &Problem{v1alpha1.ReasonDisabled, "it is being deleted"}
	case spec:
		r.Problem = &Problem{v1alpha1.ReasonDisabled, "spec.disabled is set"}
	case labelled:
		r.Problem = &Problem{v1alpha1.ReasonDisabled, fmt.Sprintf("label %s disables it, whatever its value: remove the label to enable it", label)}
	}
}

// place is among the objects of a namespace, with or without effect. A FaultInjection whose end is
// still to be recorded is about to have effect.
type place struct {
	namespace string
	idle      bool
}

// places are how many places are taken.
type places map[place]int

// take takes a place for an object, or leaves the object out if there is none left.
func (p places) take(namespace, kind string, r *ruling) {
	at := place{namespace, r.Problem != nil && r.Problem.Reason != v1alpha1.ReasonPending}
	if p[at]++; p[at] <= maxObjects {
		return
	}
	if !at.idle {
		r.Problem = &Problem{v1alpha1.ReasonInvalid, fmt.Sprintf("its namespace has more than %d %s, and this is one of the last by name: delete others, or write the rules of several in one", maxObjects, kind)}
	}
	r.selects = nil
}

// lastReport is how long agents keep the rules of a FaultInjection that has expired. They
// stop applying the rules on time by themselves, and report the last counts meanwhile.
const lastReport = 5 * time.Second

// Expired returns the problem of a FaultInjection whose duration has passed.
func Expired(f *v1alpha1.FaultInjection) *Problem {
	return &Problem{v1alpha1.ReasonExpired, fmt.Sprintf("spec.duration of %s has passed: change the spec, or create it anew, to inject again", *f.Spec.Duration)}
}

// expiry sets when a FaultInjection with a duration expires, or its problem.
func (t *trafficRules) expiry(s *injectionSource) {
	at := s.Status.ExpirationTime
	current := s.Status.ExpirationGeneration == s.Generation
	switch {
	case at == nil, !current && !t.Now.Before(at.Time):
		s.Problem = &Problem{v1alpha1.ReasonPending, "the time at which this spec expires is not recorded yet"}
	case !t.Now.Before(at.Add(lastReport)):
		s.Problem = Expired(s.FaultInjection)
	default:
		// After a change of the spec, the recorded time of the previous spec applies until
		// the new time is recorded. Otherwise the rules would end and count anew.
		s.expires = at.Unix()
		if end := at.Add(lastReport); t.until.IsZero() || end.Before(t.until) {
			t.until = end
		}
	}
}

// fill sets the traffic rules of a pod's policy, and returns the pod's entries among
// the targets of the objects that select it. Rules for other hosts apply even if the pod's
// requests to the apiserver are refused or passed through. Rules for the apiserver are
// omitted then, so that the pod takes no share that other pods need.
func (t *trafficRules) fill(pod *corev1.Pod, p *meshv1.PodPolicy) (targets []*Target, digest []byte) {
	a := &assembly{trafficRules: t, pod: pod}
	switch {
	case p.Refuse != "":
		a.unread = "all requests of the pod to the apiserver are refused: " + p.Refuse
	case p.Passthrough:
		a.unread = "the requests of the pod to the apiserver are left unread, by spec.clientCertificates of the ShardingConfig that selects it: choose Refuse there"
		a.passes = true
	}
	for _, b := range t.breakers[pod.Namespace] {
		if target := a.target(&b.ruling); target != nil {
			targets = append(targets, target)
			a.breaker(b, target)
		}
	}
	for _, f := range t.injections[pod.Namespace] {
		if target := a.target(&f.ruling); target != nil {
			targets = append(targets, target)
			a.injection(f, target)
		}
	}
	p.Traffic, digest = a.traffic()
	return targets, digest
}

// assembly collects the traffic rules of one pod.
type assembly struct {
	*trafficRules
	pod *corev1.Pod
	// unread says why no rule for the apiserver has effect; empty if they have.
	unread string
	passes bool // requests to the apiserver pass through, and are not refused
	cost   cost
	out    meshv1.Traffic
	parts  []byte // the digests of the parts of out
}

// target adds the pod to the targets of r and returns its entry; nil if r does not select
// the pod.
func (a *assembly) target(r *ruling) *Target {
	if r.selects == nil || !r.selects.Matches(labels.Set(a.pod.Labels)) {
		return nil
	}
	target := &Target{Pod: a.pod}
	r.targets = append(r.targets, target)
	return target
}

// takes reports whether r has effect in the pod, and adds its cost if so.
func (a *assembly) takes(r *ruling, target *Target, c cost, e *egress) bool {
	sum := cost{a.cost.size + c.size, a.cost.rules + c.rules, a.cost.expressions + c.expressions}
	tooMuch := func(format string, args ...any) bool {
		target.Message = "left out of this pod, because together with the objects before it by name " + fmt.Sprintf(format, args...) + ": select the pod by fewer, or write less in them"
		return false
	}
	switch {
	case r.Problem != nil:
		return false
	case a.unread != "" && e == nil:
		target.Message = a.unread
		return false
	case sum.rules > maxRules:
		return tooMuch("it has %d rules, and a pod may have %d", sum.rules, maxRules)
	case sum.size > maxTraffic:
		return tooMuch("it exceeds the size of a policy")
	case sum.expressions > meshv1.MaxMatchSteps:
		return tooMuch("it has regular expressions that take up to %d steps for one request, and those of a pod may take %d", sum.expressions, meshv1.MaxMatchSteps)
	case e != nil && len(a.ports(e)) > maxPorts:
		return tooMuch("it redirects %d ports, and a pod may have %d (spec.egress.ports)", len(a.ports(e)), maxPorts)
	}
	a.cost = sum
	return true
}

func (a *assembly) breaker(b *breakerSource, target *Target) {
	p := b.portion(b.Name, labels.Set(a.pod.Labels), a.unread != "")
	if !a.takes(&b.ruling, target, p.cost, p.egress) {
		return
	}
	a.partly(target, p.partly)
	target.Shared = p.keys
	rendered := p.rendered
	a.parts = append(append(a.parts, 'b'), p.digest...)
	if a.Share != nil && len(p.shared) > 0 {
		shares := make([]*meshv1.Share, len(p.shared))
		for n, i := range p.shared {
			shares[n] = a.Share(nameOf(b.CircuitBreaker), p.rendered.Rules[i].Name, a.pod.Name, a.pod.UID)
		}
		var key string
		rendered, key = p.with(shares)
		a.parts = append(binary.AppendUvarint(a.parts, uint64(len(key))), key...)
	}
	if p.egress != nil {
		a.redirect(p.egress)
	}
	if len(rendered.Rules)+len(rendered.Intercepts) > 0 {
		a.out.Breakers = append(a.out.Breakers, rendered)
		b.rendered = true
	}
}

func (a *assembly) injection(f *injectionSource, target *Target) {
	rendered := &f.all
	if a.unread != "" {
		rendered = &f.elsewhere
	}
	if !a.takes(&f.ruling, target, rendered.cost, f.egress) {
		return
	}
	a.partly(target, rendered.partly)
	if len(rendered.rules) == 0 {
		target.Message = "none of its rules has effect: list some in spec.httpFault"
	} else {
		a.parts = append(append(a.parts, 'f'), rendered.digest...)
		a.parts = binary.AppendVarint(a.parts, f.expires)
		a.out.Injections = append(a.out.Injections, &meshv1.Injection{Name: f.Name, Rules: rendered.rules, Expires: f.expires})
		a.redirect(f.egress)
	}
}

// partly reports on the target that only a part of an object has effect. If all requests
// are refused anyway, nothing is missing.
func (a *assembly) partly(target *Target, partly bool) {
	if partly && a.passes {
		target.Message = "only its rules for other hosts have effect: " + a.unread
	}
}

// redirect adds the ports that rules for other hosts redirect; e is nil without such rules.
func (a *assembly) redirect(e *egress) {
	if e == nil {
		return
	}
	if a.out.Egress == nil {
		a.out.Egress = &meshv1.Egress{Decrypt: a.pod.Annotations[v1alpha1.EgressTrustAnnotation] == "true"}
	}
	a.out.Egress.Ports = a.ports(e)
}

// ports returns the redirected ports of the pod, including those of e.
func (a *assembly) ports(e *egress) []uint32 {
	out := slices.Concat(a.out.Egress.GetPorts(), collect.Map(e.ports, func(p int32) uint32 { return uint32(p) }))
	slices.Sort(out)
	return slices.Compact(out)
}

// traffic returns the rules of the pod and their digest; nil if no rule has effect.
func (a *assembly) traffic() (*meshv1.Traffic, []byte) {
	if len(a.out.Breakers)+len(a.out.Injections) == 0 {
		return nil, nil
	}
	if len(a.out.Injections) > 0 {
		a.out.NoFaults = a.noFaults
	}
	// The rest is short, so its digest is not cached.
	rest, _ := digest(&meshv1.Traffic{Egress: a.out.Egress, NoFaults: a.out.NoFaults})
	sum := sha256.Sum256(append(a.parts, rest...))
	key := string(sum[:])
	if a.made[key] == nil {
		a.made[key] = &a.out
	}
	return a.made[key], sum[:]
}

// result fills in the results of all objects.
func (t *trafficRules) result(res *Result) {
	res.Until = t.until
	for _, namespace := range slices.Sorted(maps.Keys(t.breakers)) {
		for _, b := range t.breakers[namespace] {
			for _, target := range b.targets {
				if !b.rendered && b.Problem == nil && target.Message == "" {
					target.Message = "none of its rules selects a pod: list some in spec.rateLimitings or spec.trafficInterceptRules, with podSelectors that pods match"
				}
			}
			res.Breakers = append(res.Breakers, Breaker{b.CircuitBreaker, b.done()})
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(t.injections)) {
		for _, f := range t.injections[namespace] {
			res.Injections = append(res.Injections, Injection{f.FaultInjection, f.done()})
		}
	}
}

func (r *ruling) done() Ruling {
	r.Targets = collect.Map(r.targets, func(t *Target) Target { return *t })
	return r.Ruling
}
