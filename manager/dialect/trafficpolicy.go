package dialect

import (
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
)

// Targets is the field with the targets of a TrafficPolicy. Its errors concern single targets,
// and the others are translated nevertheless.
var Targets = spec.Child("targetVirtualApps")

// everySecond is the interval of a bucket that openkruise gives in tokens per second.
const everySecond = "1s"

// TrafficPolicy translates a TrafficPolicy to CircuitBreakers. apps are all VirtualApps of its
// namespace: their subsets determine the selectors.
//
// Within a CircuitBreaker, only the most specific rule applies to a request, but all rules of a
// TrafficPolicy do. So each rule becomes a CircuitBreaker for each selector of pods.
func TrafficPolicy(policy *kruise.TrafficPolicy, apps []*kruise.VirtualApp) (Translation, field.ErrorList) {
	t := trafficPolicy{TrafficPolicy: policy}
	selectors := t.targets(apps)
	if n := len(selectors) * t.rules(); n > maxBreakers {
		t.errs = append(t.errs, field.Forbidden(spec, fmt.Sprintf("it would become %d CircuitBreakers, and at most %d are supported: write fewer ratePolicies, target fewer VirtualApps, or all of their subsets", n, maxBreakers)))
		return t.Translation, t.errs
	}
	if c := policy.Spec.CircuitBreaking; c != nil {
		path := spec.Child("circuitBreaking")
		if c.APIServer != nil {
			limiting := v1alpha1.Limiting{Name: "circuit-breaking", TriggerPolicy: v1alpha1.TriggerForceOpened}
			t.limiting(limiting, c.APIServer, selectors, path.Child("apiServer"))
		}
		if c.Webhook != nil {
			t.lacks(path.Child("webhook"), "admission reviews are not refused")
		}
	}
	if r := policy.Spec.RateLimiting; r != nil {
		for i := range r.RatePolicies {
			t.rate(i, &r.RatePolicies[i], selectors)
		}
	}
	if len(t.errs)+len(t.Breakers)+len(t.Warnings)+len(t.Remainder) == 0 {
		t.warn(spec, "this has no effect: it has neither circuitBreaking nor rateLimiting")
	}
	return t.Translation, t.errs
}

// trafficPolicy is a TrafficPolicy during its translation.
type trafficPolicy struct {
	*kruise.TrafficPolicy
	Translation
	errs field.ErrorList
}

// rules returns of how many rules a CircuitBreaker is made for each selector.
func (t *trafficPolicy) rules() (n int) {
	if c := t.Spec.CircuitBreaking; c != nil && c.APIServer != nil {
		n++
	}
	if r := t.Spec.RateLimiting; r != nil {
		n += len(r.RatePolicies)
	}
	return n
}

// targets returns disjoint selectors for the pods of all targets. VirtualApps with equal selectors
// have the same pods.
func (t *trafficPolicy) targets(apps []*kruise.VirtualApp) (out []*metav1.LabelSelector) {
	path := Targets
	if len(t.Spec.TargetVirtualApps) == 0 {
		t.errs = append(t.errs, field.Required(path, `name VirtualApps; "*" is all of this namespace`))
	}
	apps = slices.DeleteFunc(slices.Clone(apps), func(a *kruise.VirtualApp) bool {
		return a.Namespace != t.Namespace || empty(a.Spec.Selector) || len(selects(a.Spec.Selector, path)) > 0
	})
	slices.SortFunc(apps, func(a, b *kruise.VirtualApp) int { return strings.Compare(a.Name, b.Name) })
	for i, target := range t.Spec.TargetVirtualApps {
		if target.Name != "*" && !slices.ContainsFunc(apps, func(a *kruise.VirtualApp) bool { return a.Name == target.Name }) {
			t.warn(path.Index(i), "there is no VirtualApp %s in this namespace", target.Name)
		}
		t.unknownSubsets(i, target, apps)
	}
	seen := map[string]bool{}
	for _, app := range apps {
		for _, s := range t.podsOf(app, path) {
			if key := metav1.FormatLabelSelector(s); !seen[key] {
				seen[key] = true
				out = append(out, s)
			}
		}
	}
	return out
}

// unknownSubsets warns about subsets that no target has.
func (t *trafficPolicy) unknownSubsets(i int, target kruise.TargetVirtualApp, apps []*kruise.VirtualApp) {
	for j, name := range target.SpecificSubsets {
		known := name == "" || name == "*" || slices.ContainsFunc(apps, func(a *kruise.VirtualApp) bool {
			return (target.Name == "*" || target.Name == a.Name) &&
				slices.ContainsFunc(a.Spec.Subsets, func(s kruise.VirtualAppSubset) bool { return s.Name == name })
		})
		if !known {
			t.warn(Targets.Index(i).Child("specificSubsets").Index(j), "there is no subset %s", name)
		}
	}
}

// podsOf returns selectors for the pods of a VirtualApp that the policy concerns.
func (t *trafficPolicy) podsOf(app *kruise.VirtualApp, path *field.Path) (out []*metav1.LabelSelector) {
	var wanted []int
	for i := range len(app.Spec.Subsets) + 1 {
		name := "" // the default subset
		if i < len(app.Spec.Subsets) {
			name = app.Spec.Subsets[i].Name
		}
		if slices.ContainsFunc(t.Spec.TargetVirtualApps, func(target kruise.TargetVirtualApp) bool {
			every := len(target.SpecificSubsets) == 0 || slices.Contains(target.SpecificSubsets, "*")
			return (target.Name == "*" || target.Name == app.Name) && (every || slices.Contains(target.SpecificSubsets, name))
		}) {
			wanted = append(wanted, i)
		}
	}
	if len(wanted) == len(app.Spec.Subsets)+1 {
		return []*metav1.LabelSelector{app.Spec.Selector.DeepCopy()}
	}
	for _, i := range wanted {
		selectors, ok := podsOf(app, i)
		if !ok {
			t.errs = append(t.errs, field.Forbidden(path, fmt.Sprintf("the pods of a subset of VirtualApp %s need more than %d selectors: give its subsets fewer labels, or target all of them", app.Name, maxSelectors)))
			return nil
		}
		out = append(out, selectors...)
	}
	return out
}

func (t *trafficPolicy) rate(i int, in *kruise.RatePolicy, selectors []*metav1.LabelSelector) {
	path := spec.Child("rateLimiting", "ratePolicies").Index(i)
	out := v1alpha1.Limiting{Name: fmt.Sprintf("rate-policy-%d", i), TriggerPolicy: v1alpha1.TriggerLimiterOnly}
	if in.MaxInFlight == nil && in.Bucket == nil && in.ExponentialBackoff == nil {
		t.warn(path, "it has no effect: set bucket, maxInFlight or exponentialBackoff")
		return
	}
	before := len(t.errs)
	if n := in.MaxInFlight; n != nil {
		out.MaxInFlight = new(*n)
		t.atLeast(1, *n, path.Child("maxInFlight"))
	}
	if b := in.Bucket; b != nil {
		t.atLeast(0, b.QPS, path.Child("bucket", "qps"))
		t.atLeast(1, b.Burst, path.Child("bucket", "burst"))
		out.Bucket = &v1alpha1.Bucket{Burst: int64(b.Burst), Limit: int64(b.QPS), Interval: everySecond}
	}
	if b := in.ExponentialBackoff; b != nil {
		path := path.Child("exponentialBackoff")
		t.atLeast(1, b.BaseDelayInMillisecond, path.Child("baseDelayInMillisecond"))
		t.atLeast(b.BaseDelayInMillisecond, b.MaxDelayInMillisecond, path.Child("maxDelayInMillisecond"))
		t.atLeast(0, b.ContinuouslyFailureTimes, path.Child("continuouslyFailureTimes"))
		out.ExponentialBackoff = &v1alpha1.ExponentialBackoff{
			ContinuouslyFailureTimes: max(b.ContinuouslyFailureTimes, 1),
			BaseDelayInMillisecond:   b.BaseDelayInMillisecond, MaxDelayInMillisecond: b.MaxDelayInMillisecond,
		}
	}
	if len(t.errs) == before {
		t.limiting(out, &in.Rules, selectors, path.Child("rules"))
	}
}

func (t *trafficPolicy) atLeast(least, n int32, path *field.Path) {
	if n < least {
		t.errs = append(t.errs, field.Invalid(path, n, fmt.Sprintf("must be at least %d", least)))
	}
}

// limiting adds a breaker with one rule for each selector.
func (t *trafficPolicy) limiting(l v1alpha1.Limiting, rules *kruise.APIServerRules, selectors []*metav1.LabelSelector, path *field.Path) {
	if len(rules.ResourceRules)+len(rules.NonResourceRules) == 0 {
		t.warn(path, "it has no effect: list requests in resourceRules or nonResourceRules")
	}
	for i, r := range rules.ResourceRules {
		l.ResourceRules = append(l.ResourceRules, t.resources(r, path.Child("resourceRules").Index(i))...)
	}
	for i, r := range rules.NonResourceRules {
		path := path.Child("nonResourceRules").Index(i)
		t.filled(r.Verbs, path.Child("verbs"))
		if len(r.NonResourceURLs) == 0 {
			t.errs = append(t.errs, field.Required(path.Child("nonResourceURLs"), "list paths"))
		}
		l.NonResourceRules = append(l.NonResourceRules, v1alpha1.NonResourceRule{Verbs: slices.Clone(r.Verbs), NonResourceURLs: pathsOf(r.NonResourceURLs)})
	}
	if len(l.ResourceRules)+len(l.NonResourceRules) == 0 {
		return
	}
	for _, s := range selectors {
		t.Breakers = append(t.Breakers, t.breaker(l, s))
	}
}

// resources translates a rule: to one rule, or to one for requests in some namespaces and
// another for those without a namespace.
func (t *trafficPolicy) resources(r kruise.ResourceRule, path *field.Path) (out []v1alpha1.ResourceRule) {
	t.filled(r.Verbs, path.Child("verbs"))
	t.filled(r.APIGroups, path.Child("apiGroups"))
	t.filled(r.Resources, path.Child("resources"))
	t.errs = append(t.errs, aloneStar(r.Namespaces, path.Child("namespaces"))...)
	add := func(scope v1alpha1.RequestScope, namespaces ...string) {
		out = append(out, v1alpha1.ResourceRule{
			APIGroups: slices.Clone(r.APIGroups), Resources: slices.Clone(r.Resources),
			Verbs: slices.Clone(r.Verbs), Namespaces: slices.Clone(namespaces), Scope: scope,
		})
	}
	every := slices.Contains(r.Namespaces, "*")
	switch {
	case len(r.Namespaces) == 0 && !r.ClusterScope:
		t.errs = append(t.errs, field.Required(path.Child("namespaces"), "list namespaces, or set clusterScope"))
	case every && r.ClusterScope:
		add(v1alpha1.RequestScopeAll, "*")
	case every:
		add(v1alpha1.RequestScopeNamespaced, "*")
	default:
		if len(r.Namespaces) > 0 {
			add(v1alpha1.RequestScopeAll, r.Namespaces...)
		}
		if r.ClusterScope {
			add(v1alpha1.RequestScopeCluster, "*")
		}
	}
	return out
}

// filled adds the errors of a list that must not be empty.
func (t *trafficPolicy) filled(values []string, path *field.Path) {
	if len(values) == 0 {
		t.errs = append(t.errs, field.Required(path, `list values; "*" alone is all`))
	}
	t.errs = append(t.errs, aloneStar(values, path)...)
}

// pathsOf translates paths. A path of openkruise also matches those below it.
func pathsOf(urls []string) (out []string) {
	for _, url := range urls {
		if url == "*" {
			out = append(out, url)
			continue
		}
		path := strings.TrimSuffix(url, "*")
		if path == url && !strings.HasSuffix(url, "/") {
			out = append(out, url) // the path itself
		}
		out = append(out, strings.TrimSuffix(path, "/")+"/*")
	}
	return out
}

// breaker returns a breaker with one rule. Its name and uid depend on the rule's name and the
// selector, because the manager compiles an object of the same uid and generation once.
func (t *trafficPolicy) breaker(l v1alpha1.Limiting, selector *metav1.LabelSelector) *v1alpha1.CircuitBreaker {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(metav1.FormatLabelSelector(selector)))
	suffix := fmt.Sprintf("%s-%016x", l.Name, hash.Sum64())
	out := &v1alpha1.CircuitBreaker{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "CircuitBreaker"},
		ObjectMeta: *t.ObjectMeta.DeepCopy(),
	}
	out.Name += "-" + suffix
	if out.UID != "" {
		out.UID += types.UID("-" + suffix)
	}
	out.Spec.Selector = selector.DeepCopy()
	l.Scope = v1alpha1.LimitScopePod
	out.Spec.RateLimitings = []v1alpha1.Limiting{*l.DeepCopy()}
	return out
}
