package rules

import (
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

const (
	defaultSleepingWindow = 10 * time.Second
	defaultTripWindow     = 10 * time.Second
	defaultMinRequests    = 20
	defaultMadeUpAfter    = 30 * time.Second
)

var triggers = map[v1alpha1.TriggerPolicy]meshv1.Trigger{
	v1alpha1.TriggerLimiterOnly: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
	v1alpha1.TriggerForceOpened: meshv1.Trigger_TRIGGER_FORCE_OPENED,
	v1alpha1.TriggerForceClosed: meshv1.Trigger_TRIGGER_FORCE_CLOSED,
}

var scopes = map[v1alpha1.RequestScope]meshv1.RequestScope{
	"":                              meshv1.RequestScope_REQUEST_SCOPE_ALL,
	v1alpha1.RequestScopeAll:        meshv1.RequestScope_REQUEST_SCOPE_ALL,
	v1alpha1.RequestScopeNamespaced: meshv1.RequestScope_REQUEST_SCOPE_NAMESPACED,
	v1alpha1.RequestScopeCluster:    meshv1.RequestScope_REQUEST_SCOPE_CLUSTER,
}

// Limit is a rule of a CircuitBreaker.
type Limit struct {
	*meshv1.LimitRule
	// Selects selects the pods that the rule applies to; nil for all.
	Selects labels.Selector
	// Shared reports whether the members of a workload share the limit.
	Shared bool
}

// Limit renders a rule of a CircuitBreaker.
func (r *Renderer) Limit(in *v1alpha1.Limiting, path *field.Path) Limit {
	out := Limit{LimitRule: &meshv1.LimitRule{
		Name:       in.Name,
		UserAgents: in.UserAgents,
		Trigger:    triggers[in.TriggerPolicy],
	}}
	r.limited(out.LimitRule, in, path)
	if in.PodSelector != nil {
		sel, err := metav1.LabelSelectorAsSelector(in.PodSelector)
		if err != nil {
			r.invalid(path.Child("podSelector"), metav1.FormatLabelSelector(in.PodSelector), "%v", err)
		}
		out.Selects = sel
		out.SomePods = err == nil && !sel.Empty()
	}
	if in.Bucket != nil {
		out.Bucket = r.bucket(in.Bucket, path.Child("bucket"))
	}
	if in.MaxInFlight != nil {
		out.MaxInFlight = r.count(int64(*in.MaxInFlight), 1, path.Child("maxInFlight"))
	}
	if b := in.ExponentialBackoff; b != nil {
		out.Backoff = r.backoff(b, path.Child("exponentialBackoff"))
	}
	if in.Trip != nil {
		out.Trip = r.trip(in.Trip, path.Child("trip"))
		if in.TriggerPolicy == v1alpha1.TriggerLimiterOnly {
			r.invalid(path.Child("trip"), "(set)", "has no effect with triggerPolicy LimiterOnly, with which nothing opens: choose Normal, or leave it out")
		}
	}
	out.Recovery = r.recovery(in.RecoverPolicy, path.Child("recoverPolicy"))
	r.shareOf(&out, in, path)
	return out
}

// limited renders the requests that a rule limits.
func (r *Renderer) limited(out *meshv1.LimitRule, in *v1alpha1.Limiting, path *field.Path) {
	if len(in.ResourceRules)+len(in.NonResourceRules)+len(in.RestRules) == 0 {
		r.Errs = append(r.Errs, field.Required(path, "list what is limited in resourceRules, nonResourceRules or restRules"))
	}
	for i, m := range in.ResourceRules {
		out.Resources = append(out.Resources, &meshv1.ResourceMatch{
			Clusters:  m.Clusters,
			ApiGroups: m.APIGroups, Resources: m.Resources, Verbs: m.Verbs, Namespaces: m.Namespaces, Names: m.Names, Scope: r.scope(m.Scope, m.Namespaces, path.Child("resourceRules").Index(i)),
		})
	}
	out.Paths = pathsOf(in.NonResourceRules)
	for i, m := range in.RestRules {
		if match := r.url(m.URL, path.Child("restRules").Index(i).Child("url")); match != nil {
			match.Methods = methodsOf(m.Method)
			out.Http = append(out.Http, match)
		}
	}
}

// scope renders which requests a rule for resources in some namespaces matches.
func (r *Renderer) scope(in v1alpha1.RequestScope, namespaces []string, path *field.Path) meshv1.RequestScope {
	out, known := scopes[in]
	if !known {
		r.Errs = append(r.Errs, field.NotSupported(path.Child("scope"), in, []v1alpha1.RequestScope{v1alpha1.RequestScopeNamespaced, v1alpha1.RequestScopeCluster, v1alpha1.RequestScopeAll}))
	}
	if in == v1alpha1.RequestScopeCluster && len(namespaces) > 0 && !slices.Contains(namespaces, "*") {
		r.invalid(path.Child("namespaces"), namespaces, `requests of scope Cluster are in no namespace: write "*"`)
	}
	return out
}

func (r *Renderer) bucket(b *v1alpha1.Bucket, path *field.Path) *meshv1.Bucket {
	interval := r.duration(b.Interval, maxInterval, true, path.Child("interval"))
	if interval > 0 && b.Limit > 0 && float64(b.Limit)/interval.Seconds() > maxRefill {
		r.invalid(path, fmt.Sprintf("%d in %s", b.Limit, b.Interval), "more than %d a second limit nothing: make limit smaller or interval longer", int(maxRefill))
	}
	return &meshv1.Bucket{
		Burst:      r.count(b.Burst, 1, path.Child("burst")),
		Limit:      r.count(b.Limit, 0, path.Child("limit")),
		IntervalNs: int64(interval),
	}
}

// shareOf sets whether the members of a workload share the limits of a rule, and reports
// limits that they cannot share.
func (r *Renderer) shareOf(out *Limit, in *v1alpha1.Limiting, path *field.Path) {
	// Trip and backoff count the pod's own errors, so they are never shared.
	out.Shared = in.Scope == v1alpha1.LimitScopeWorkload && (in.Bucket != nil || in.MaxInFlight != nil)
	if out.Shared && in.Bucket != nil && in.Bucket.Limit == 0 {
		r.invalid(path.Child("bucket", "limit"), in.Bucket.Limit, "must be at least 1 with scope Workload: where members are more than burst they take turns in what is added, and there would be none")
	}
	if out.Shared {
		out.Share = &meshv1.Share{}
	}
}

func (r *Renderer) backoff(in *v1alpha1.ExponentialBackoff, path *field.Path) *meshv1.Backoff {
	if in.BaseDelayInMillisecond < 1 {
		r.invalid(path.Child("baseDelayInMillisecond"), in.BaseDelayInMillisecond, "must be at least 1")
	}
	if in.MaxDelayInMillisecond < in.BaseDelayInMillisecond {
		r.invalid(path.Child("maxDelayInMillisecond"), in.MaxDelayInMillisecond, "must not be less than baseDelayInMillisecond")
	}
	return &meshv1.Backoff{
		Failures: uint32(max(in.ContinuouslyFailureTimes, 1)),
		BaseNs:   int64(in.BaseDelayInMillisecond) * int64(time.Millisecond),
		MaxNs:    int64(in.MaxDelayInMillisecond) * int64(time.Millisecond),
	}
}

func (r *Renderer) trip(in *v1alpha1.Trip, path *field.Path) *meshv1.Trip {
	out := &meshv1.Trip{WindowNs: int64(defaultTripWindow), MinRequests: defaultMinRequests}
	if in.Window != "" {
		out.WindowNs = int64(r.duration(in.Window, maxWindow, true, path.Child("window")))
	}
	if in.MinRequests > 0 {
		out.MinRequests = uint32(in.MinRequests)
	}
	if in.ErrorPercent != "" {
		out.ErrorPercent = r.threshold(in.ErrorPercent, path.Child("errorPercent"))
	}
	if in.SlowPercent != "" {
		out.SlowPercent = r.threshold(in.SlowPercent, path.Child("slowPercent"))
		out.SlowNs = int64(r.duration(in.SlowCall, maxWindow, true, path.Child("slowCall")))
	}
	return out
}

func (r *Renderer) recovery(in *v1alpha1.RecoverPolicy, path *field.Path) *meshv1.Recovery {
	switch {
	case in == nil:
	case in.Type == v1alpha1.RecoverManual:
		return nil
	case in.SleepingWindowSize != nil:
		return &meshv1.Recovery{SleepingWindowNs: int64(r.duration(*in.SleepingWindowSize, maxWindow, true, path.Child("sleepingWindowSize")))}
	}
	return &meshv1.Recovery{SleepingWindowNs: int64(defaultSleepingWindow)}
}

// Intercept renders a traffic intercept rule. It omits invalid contents.
func (r *Renderer) Intercept(in *v1alpha1.TrafficInterceptRule, path *field.Path) *meshv1.InterceptRule {
	out := &meshv1.InterceptRule{Name: in.Name, Deny: in.InterceptType != v1alpha1.InterceptWhitelist}
	methods := methodsOf(in.Methods...)
	for i, c := range in.Contents {
		if match := r.content(in.ContentType, c, path.Child("contents").Index(i)); match != nil {
			match.Methods = methods
			out.Http = append(out.Http, match)
		}
	}
	return out
}
