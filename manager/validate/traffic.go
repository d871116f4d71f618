package validate

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/compile/rules"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/bounds"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/invalid"
)

// Paths at which Breakers and Injections are served.
const (
	BreakersPath   = "/validate-circuitbreaker"
	InjectionsPath = "/validate-faultinjection"
)

// Breakers is the admission of CircuitBreakers.
type Breakers struct{ Reader client.Reader }

// Injections is the admission of FaultInjections.
type Injections struct{ Reader client.Reader }

// Handle implements admission.Handler.
func (w *Breakers) Handle(ctx context.Context, req admission.Request) admission.Response {
	return review(req, &v1alpha1.CircuitBreaker{}, "circuitbreaker", Breaker, func(c *v1alpha1.CircuitBreaker) []string {
		return breakerWarnings(c, trusting(ctx, w.Reader, req.Namespace, c.Spec.Selector))
	})
}

// Handle implements admission.Handler.
func (w *Injections) Handle(ctx context.Context, req admission.Request) admission.Response {
	return review(req, &v1alpha1.FaultInjection{}, "faultinjection", Injection, func(f *v1alpha1.FaultInjection) []string {
		return injectionWarnings(f, trusting(ctx, w.Reader, req.Namespace, f.Spec.Selector))
	})
}

// review answers a request for an object that no other object affects. It decodes into o.
func review[T client.Object](req admission.Request, o T, kind string, problems func(T) field.ErrorList, warnings func(T) []string) admission.Response {
	if err := bounds.Unmarshal(v1alpha1.GroupName+"_"+kind+"s", req.Object.Raw, o); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if o.GetDeletionTimestamp() != nil {
		return admission.Allowed("") // so that finalizers can be removed
	}
	if errs := problems(o); len(errs) > 0 {
		return refuse(kind, "Invalid", invalid.Message(errs))
	}
	return admission.Allowed("").WithWarnings(warnings(o)...)
}

// trusting returns a function that reports whether any of the selected pods trusts the egress
// CA. It reports true if the pods cannot be read, so that there is no warning.
func trusting(ctx context.Context, reader client.Reader, namespace string, s *metav1.LabelSelector) func() bool {
	return func() bool {
		selector, err := metav1.LabelSelectorAsSelector(s)
		if err != nil {
			return true
		}
		onMesh, _ := labels.NewRequirement(v1alpha1.EnableProxyLabel, "in", []string{"true"})
		var pods corev1.PodList
		if err := reader.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabelsSelector{Selector: selector.Add(*onMesh)}); err != nil {
			return true
		}
		return slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Annotations[v1alpha1.EgressTrustAnnotation] == "true" })
	}
}

// Breaker returns the errors of a CircuitBreaker that its schema does not find.
func Breaker(c *v1alpha1.CircuitBreaker) field.ErrorList {
	spec := field.NewPath("spec")
	errs := podSelector(c.Spec.Selector, spec.Child("selector"))
	for i, l := range c.Spec.RateLimitings {
		path := spec.Child("rateLimitings").Index(i)
		errs = append(errs, podSelector(l.PodSelector, path.Child("podSelector"))...)
		for j, m := range l.ResourceRules {
			errs = append(errs, resourceNames(path.Child("resourceRules").Index(j), m.APIGroups, m.Namespaces, m.Names)...)
		}
	}
	return append(errs, compile.BreakerProblems(c)...)
}

// Injection returns the errors of a FaultInjection that its schema does not find.
func Injection(f *v1alpha1.FaultInjection) field.ErrorList {
	spec := field.NewPath("spec")
	errs := podSelector(f.Spec.Selector, spec.Child("selector"))
	for i, r := range f.Spec.HTTPFaultInjections {
		path := spec.Child("httpFault").Index(i)
		if r.Match == nil {
			continue
		}
		for j, m := range r.Match.Resources {
			errs = append(errs, resourceNames(path.Child("match", "resources").Index(j), m.APIGroups, m.Namespaces, m.Names)...)
		}
	}
	return append(errs, compile.InjectionProblems(f)...)
}

// resourceNames returns the errors that a schema cannot find. "*" beside names means all, as in
// the APIs that this one descends from.
func resourceNames(at *field.Path, groups, namespaces, names []string) (errs field.ErrorList) {
	each := func(child string, values []string, problems func(string) []string) {
		for i, v := range values {
			if v == "*" {
				continue
			}
			if msgs := problems(v); len(msgs) > 0 {
				errs = append(errs, field.Invalid(at.Child(child).Index(i), v, strings.Join(msgs, "; ")))
			}
		}
	}
	each("apiGroups", groups, func(v string) []string {
		if v == "" {
			return nil // the core group
		}
		return validation.IsDNS1123Subdomain(v)
	})
	each("namespaces", namespaces, validation.IsDNS1123Label)
	each("names", names, func(v string) []string {
		if v == "" || len(v) > 253 {
			return []string{"must be the name of an object, of 1 to 253 characters"}
		}
		return content.IsPathSegmentName(v)
	})
	return errs
}

const seenOnly = `https requests are decrypted only in pods created with the annotation ` + v1alpha1.TrustEgressAnnotation + `: "true", and no pod that is selected has it`

const connectUnmatched = "the method CONNECT matches nothing: rules for a host apply to CONNECT, and rules with methods apply to the requests in its tunnel; a rule without methods applies to both"

// connects reports whether a match names the method CONNECT.
func connects(m *meshv1.HttpMatch) bool { return slices.Contains(m.GetMethods(), http.MethodConnect) }

// clusterScoped are well-known resources without a namespace. Requests for a namespace count as
// requests in it.
var clusterScoped = map[string]bool{
	"nodes": true, "persistentvolumes": true, "clusterroles": true, "clusterrolebindings": true, "customresourcedefinitions": true,
	"storageclasses": true, "priorityclasses": true, "ingressclasses": true, "runtimeclasses": true, "csidrivers": true, "csinodes": true,
	"volumeattachments": true, "certificatesigningrequests": true, "apiservices": true, "tokenreviews": true, "subjectaccessreviews": true,
	"validatingwebhookconfigurations": true, "mutatingwebhookconfigurations": true,
}

// custom reports whether a group is not one of Kubernetes' own, so that its resources may have
// any name.
func custom(group string) bool {
	return strings.Contains(group, ".") && !strings.HasSuffix(group, ".k8s.io")
}

// ofResources reports whether a path matches only resources: paths below /api/VERSION and
// /apis/GROUP/VERSION.
func ofResources(path string) bool {
	path, prefix := strings.CutSuffix(path, "*")
	if !prefix {
		path = strings.TrimSuffix(path, "/")
	}
	parts := strings.Split(path, "/") // the first is empty
	return len(parts) > 3 && parts[1] == "api" || len(parts) > 4 && parts[1] == "apis"
}

func breakerWarnings(c *v1alpha1.CircuitBreaker, trusting func() bool) (out []string) {
	for i, l := range c.Spec.RateLimitings {
		out = append(out, limitWarnings(fmt.Sprintf("spec.rateLimitings[%d]", i), l)...)
	}
	if len(c.Spec.RateLimitings)+len(c.Spec.TrafficInterceptRules) == 0 {
		out = append(out, "this has no effect: it has neither spec.rateLimitings nor spec.trafficInterceptRules")
	}
	rendered := compile.RenderBreaker(c)
	var matches []*meshv1.HttpMatch
	for _, r := range rendered.Rules {
		matches = append(matches, r.Http...)
	}
	for _, r := range rendered.Intercepts {
		matches = append(matches, r.Http...)
	}
	if slices.ContainsFunc(matches, connects) {
		out = append(out, connectUnmatched)
	}
	if rules.Hidden(rendered) && !trusting() {
		out = append(out, seenOnly+": paths, methods and user agents match nothing there, limits count connections, and trip.slowPercent sees none")
	}
	redirected := []int32{80, 443}
	if e := c.Spec.Egress; e != nil {
		if len(matches)+len(rendered.Intercepts) == 0 {
			out = append(out, "spec.egress has no effect: it applies to restRules and trafficInterceptRules, and there are none")
		}
		out = append(out, portWarnings(e.Ports)...)
		if len(e.Ports) > 0 {
			redirected = e.Ports
		}
	}
	return append(out, unseenPorts(matches, redirected)...)
}

// limitWarnings returns warnings about a rule that does less than it seems to.
func limitWarnings(at string, l v1alpha1.Limiting) (out []string) {
	for j, m := range l.ResourceRules {
		at := fmt.Sprintf("%s.resourceRules[%d]", at, j)
		out = append(out, resourceWarnings(at, m.APIGroups, m.Resources, m.Verbs, m.Names)...)
		every := slices.Contains(m.Namespaces, "*")
		if every && m.Scope != v1alpha1.RequestScopeNamespaced || slices.ContainsFunc(m.APIGroups, custom) {
			continue
		}
		instead := `namespaces ["*"]`
		if every {
			instead = "scope Cluster"
		}
		for _, resource := range m.Resources {
			if clusterScoped[resource] {
				out = append(out, fmt.Sprintf("%s has no effect on %s, which are in no namespace: give them an entry with %s", at, resource, instead))
			}
		}
	}
	out = append(out, pathWarnings(at, "resourceRules", l.NonResourceRules)...)
	if l.Scope == v1alpha1.LimitScopeWorkload && l.Bucket == nil && l.MaxInFlight == nil {
		out = append(out, at+".scope Workload has no effect: only bucket and maxInFlight are shared, and each pod counts its own failures")
	}
	opens := (l.TriggerPolicy == "" || l.TriggerPolicy == v1alpha1.TriggerNormal) && (l.Bucket != nil || l.Trip != nil)
	if l.RecoverPolicy != nil && !opens {
		out = append(out, at+".recoverPolicy has no effect: a breaker opens, and then recovers, with triggerPolicy Normal and a bucket or trip")
	}
	return out
}

// unseenPorts returns warnings about ports in rules that are not redirected.
func unseenPorts(matches []*meshv1.HttpMatch, redirected []int32) (out []string) {
	ports := map[int32]bool{}
	for _, m := range matches {
		ports[int32(m.Port)] = true
	}
	delete(ports, 0) // any
	for _, p := range redirected {
		delete(ports, p)
	}
	for _, p := range slices.Sorted(maps.Keys(ports)) {
		out = append(out, fmt.Sprintf("a rule is about port %d, which is not redirected, so that the rule has no effect on it: list all ports in spec.egress.ports", p))
	}
	return out
}

// resourceWarnings returns warnings about an entry that matches less than it seems to.
func resourceWarnings(at string, groups, resources, verbs, names []string) (out []string) {
	has := func(list []string, v string) bool {
		return len(list) == 0 || slices.Contains(list, "*") || slices.Contains(list, v)
	}
	one := []string{"get", "create", "update", "patch", "delete"}
	if len(names) == 0 || slices.Contains(names, "*") {
		leases := len(resources) > 0 && !slices.ContainsFunc(resources, func(r string) bool { return r != "leases" })
		if leases && has(groups, "coordination.k8s.io") && slices.ContainsFunc(one, func(v string) bool { return has(verbs, v) }) {
			out = append(out, at+" does not match requests for single leases: locks are exempt unless names has theirs")
		}
	} else if slices.Equal(verbs, []string{"create"}) && slices.ContainsFunc(resources, func(r string) bool { return r != "*" && r != "leases" && !strings.Contains(r, "/") }) {
		out = append(out, at+" does not match creates, because the name is in the body: leave names out, unless it is a shard's lock")
	}
	return out
}

// pathWarnings returns warnings about paths of resources; instead is the field for resources.
func pathWarnings(at, instead string, rules []v1alpha1.NonResourceRule) (out []string) {
	for i, m := range rules {
		for _, path := range m.NonResourceURLs {
			if ofResources(path) {
				out = append(out, fmt.Sprintf("%s.nonResourceRules[%d] has no effect on %s, where resources are: use %s", at, i, path, instead))
			}
		}
	}
	return out
}

// dead reports whether a schedule contains no day of any year.
func dead(e *v1alpha1.EffectiveTimeRange) bool {
	days := []int{31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}
	return len(e.DaysOfMonth) > 0 && len(e.Months) > 0 && !slices.ContainsFunc(e.Months, func(m int) bool {
		return m >= 1 && m <= 12 && slices.Min(e.DaysOfMonth) <= days[m-1]
	})
}

// idle reports whether a delay is zero.
func idle(d *v1alpha1.FaultDelay) bool {
	if d == nil {
		return false
	}
	by, err := time.ParseDuration(string(d.FixedDelay))
	return err == nil && by == 0
}

func portWarnings(ports []int32) (out []string) {
	if slices.Contains(ports, 53) {
		out = append(out, "spec.egress.ports has 53: DNS uses UDP, which is refused to the listed ports, so that the pods cannot resolve names")
	}
	return out
}

func injectionWarnings(f *v1alpha1.FaultInjection, trusting func() bool) (out []string) {
	if f.Spec.Duration == nil && !f.Spec.Disabled {
		out = append(out, "spec.duration is not set: faults are injected until this is deleted or disabled")
	}
	if len(f.Spec.HTTPFaultInjections) == 0 {
		out = append(out, "spec.httpFault is empty: nothing is injected")
	}
	otherHosts := false
	for i, r := range f.Spec.HTTPFaultInjections {
		at := fmt.Sprintf("spec.httpFault[%d]", i)
		out = append(out, faultWarnings(at, r)...)
		if r.Match != nil {
			out = append(out, matchWarnings(at+".match", r.Match)...)
			otherHosts = otherHosts || len(r.Match.HTTPMatch) > 0
		}
	}
	rendered := compile.RenderFaults(f)
	if slices.ContainsFunc(rendered, func(r *meshv1.FaultRule) bool { return slices.ContainsFunc(r.Http, connects) }) {
		out = append(out, connectUnmatched)
	}
	if rules.HiddenOfFaults(rendered) && !trusting() {
		out = append(out, seenOnly+": paths, methods and headers match nothing there, abort refuses connections, and faults in responses affect everything that a server sends")
	}
	if e := f.Spec.Egress; e != nil {
		if !otherHosts {
			out = append(out, "spec.egress has no effect: it applies to httpMatch, and no rule has it")
		}
		out = append(out, portWarnings(e.Ports)...)
	}
	return out
}

// faultWarnings returns warnings about faults without effect.
func faultWarnings(at string, r v1alpha1.HTTPFaultInjection) (out []string) {
	if r.Watch != nil && !about(r.Match, "watch") {
		out = append(out, at+".watch has no effect: match.resources has no entry with the verb watch")
	}
	if r.StaleList != nil && !about(r.Match, "list") {
		out = append(out, at+".staleList has no effect: match.resources has no entry with the verb list")
	}
	if idle(r.Delay) {
		out = append(out, at+".delay has no effect: fixedDelay is 0s")
	}
	if r.Watch != nil && idle(r.Watch.Delay) {
		out = append(out, at+".watch.delay has no effect: fixedDelay is 0s")
	}
	if r.EffectiveTime != nil && dead(r.EffectiveTime) {
		out = append(out, at+" has no effect: none of effectiveTime.months has one of daysOfMonth")
	}
	return out
}

// about reports whether a match includes requests with a verb.
func about(m *v1alpha1.FaultMatch, verb string) bool {
	return m == nil || len(m.Resources)+len(m.NonResourceRules)+len(m.HTTPMatch) == 0 || slices.ContainsFunc(m.Resources, func(m v1alpha1.FaultResourceMatch) bool {
		return len(m.Verbs) == 0 || slices.Contains(m.Verbs, "*") || slices.Contains(m.Verbs, verb)
	})
}

// matchWarnings returns warnings about entries that match less than they seem to.
func matchWarnings(at string, match *v1alpha1.FaultMatch) (out []string) {
	for j, m := range match.Resources {
		out = append(out, resourceWarnings(fmt.Sprintf("%s.resources[%d]", at, j), m.APIGroups, m.Resources, m.Verbs, m.Names)...)
	}
	out = append(out, pathWarnings(at, "resources", match.NonResourceRules)...)
	for j, m := range match.HTTPMatch {
		if p := m.Path; p != nil && (p.Exact != "" && p.Exact[0] != '/' || p.Prefix != "" && p.Prefix[0] != '/') {
			out = append(out, fmt.Sprintf("%s.httpMatch[%d].path matches nothing: paths begin with \"/\"", at, j))
		}
	}
	return out
}
