package compile

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // agents have it too

	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
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

var (
	triggers = map[v1alpha1.TriggerPolicy]meshv1.Trigger{
		v1alpha1.TriggerLimiterOnly: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
		v1alpha1.TriggerForceOpened: meshv1.Trigger_TRIGGER_FORCE_OPENED,
		v1alpha1.TriggerForceClosed: meshv1.Trigger_TRIGGER_FORCE_CLOSED,
	}
	defaultPorts = []int32{80, 443}
)

// BreakerProblems finds what a CircuitBreaker says that cannot be meant. What it is
// about would have no effect.
func BreakerProblems(c *v1alpha1.CircuitBreaker) field.ErrorList { return newBreaker(c).errs }

// InjectionProblems is the same of a FaultInjection.
func InjectionProblems(f *v1alpha1.FaultInjection) field.ErrorList { return newInjection(f).errs }

// breaker is a CircuitBreaker as pods are told of it.
type breaker struct {
	rendered
	recover string
	// selectors are the different ones of rules.
	selectors  []labels.Selector
	portions   map[string]*portion
	limits     []limitRule
	intercepts []*meshv1.InterceptRule
	// egress is nil where no rule is about other hosts.
	egress *egress
	// expressions is the size of all regular expressions.
	expressions int
	errs        field.ErrorList
}

type limitRule struct {
	*meshv1.LimitRule
	selects  labels.Selector // of pods
	selector int             // its index among those of the breaker; -1 for all pods
	shared   bool
}

// rendered is what is known of an object before it is known what became of it.
type rendered struct {
	generation int64
	ruling     ruling
	rules      []Rule
}

// egress is what one object asks of the connections to other hosts.
type egress struct {
	ports        []int32
	refuseUnseen bool
}

// injection is a FaultInjection as pods are told of it.
type injection struct {
	rendered
	all, elsewhere faults // elsewhere: those about other hosts alone
	egress         *egress
	errs           field.ErrorList
}

// faults are rules of a FaultInjection.
type faults struct {
	rules  []*meshv1.FaultRule
	digest []byte
	cost   cost
	partly bool // some rule is about the apiserver, and has no effect
}

// newBreaker renders what can be meant.
func newBreaker(c *v1alpha1.CircuitBreaker) *breaker {
	b := &breaker{recover: c.Annotations[v1alpha1.RecoverAnnotation], portions: map[string]*portion{}}
	r := renderer{}
	selectors := map[string]int{}
	spec := field.NewPath("spec")
	otherHosts, whitelist := false, false
	for i := range c.Spec.RateLimitings {
		in := &c.Spec.RateLimitings[i]
		before := len(r.errs)
		rule := r.limit(in, spec.Child("rateLimitings").Index(i))
		if len(r.errs) > before {
			continue
		}
		rule.Recover = shortened(c.Annotations[v1alpha1.RecoverAnnotation])
		rule.Key = key(c.UID, in.Name, rule.LimitRule, func(m proto.Message) {
			m.(*meshv1.LimitRule).Recover, m.(*meshv1.LimitRule).Share = "", nil
		})
		rule.selector = -1
		if rule.selects != nil {
			text := rule.selects.String()
			if _, ok := selectors[text]; !ok {
				selectors[text] = len(b.selectors)
				b.selectors = append(b.selectors, rule.selects)
			}
			rule.selector = selectors[text]
		}
		b.rules = append(b.rules, Rule{rule.Name, rule.Key})
		b.limits = append(b.limits, rule)
		otherHosts = otherHosts || len(rule.Http) > 0
	}
	for i := range c.Spec.TrafficInterceptRules {
		in := &c.Spec.TrafficInterceptRules[i]
		// What of a list cannot be read is left out of it; that there is a Whitelist
		// still refuses the rest.
		rule := r.intercept(in, spec.Child("trafficInterceptRules").Index(i))
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
	b.expressions, b.errs = r.expressions, r.errs
	b.generation, b.ruling = c.Generation, newRuling(c.Spec, c.Spec.Selector, b.errs)
	if _, err := digest(b.all()); err != nil {
		b.ruling.Problem = &Problem{v1alpha1.ReasonInvalid, err.Error()} // it did not come as JSON
	}
	return b
}

// all is what a pod is told that all rules are about.
func (b *breaker) all() *meshv1.Breaker {
	out := &meshv1.Breaker{Intercepts: b.intercepts}
	for _, r := range b.limits {
		out.Rules = append(out.Rules, r.LimitRule)
	}
	return out
}

func newInjection(f *v1alpha1.FaultInjection) *injection {
	out := &injection{}
	r := renderer{}
	path := field.NewPath("spec", "httpFault")
	for i := range f.Spec.HTTPFaultInjections {
		in := &f.Spec.HTTPFaultInjections[i]
		before := len(r.errs)
		rule := r.fault(in, path.Index(i))
		if len(r.errs) > before {
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
		r.duration(*d, maxDuration, true, field.NewPath("spec", "duration"))
	}
	out.errs = r.errs
	out.generation, out.ruling = f.Generation, newRuling(f.Spec, f.Spec.Selector, out.errs)
	for _, told := range []*faults{&out.all, &out.elsewhere} {
		m := &meshv1.Injection{Name: f.Name, Rules: told.rules}
		told.cost = cost{proto.Size(m), len(told.rules), r.expressions}
		var err error
		if told.digest, err = digest(m); err != nil {
			out.ruling.Problem = &Problem{v1alpha1.ReasonInvalid, err.Error()} // it did not come as JSON
		}
	}
	return out
}

// key names what a rule counts: another rule than before counts anew.
func key(object types.UID, name string, rule proto.Message, without func(proto.Message)) string {
	rule = proto.Clone(rule)
	without(rule)
	content, err := proto.MarshalOptions{Deterministic: true}.Marshal(rule)
	if err != nil {
		return "" // it is not UTF-8, so that no agent will be told of it
	}
	h := sha256.New()
	for _, part := range []string{string(object), name} {
		_, _ = fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	_, _ = h.Write(content)
	return hex.EncodeToString(h.Sum(nil)[:10])
}

// specHash is by what a spec is known in statuses.
func specHash(spec any) string {
	b, err := json.Marshal(spec)
	if err != nil {
		return "" // it came as JSON
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// shortened is a value of an annotation, which may be long, to tell from others.
func shortened(value string) string {
	if value == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(value))
	return hex.EncodeToString(sum[:8])
}

// renderer collects what cannot be meant.
type renderer struct {
	errs field.ErrorList
	// expressions is the size of all regular expressions.
	expressions int
}

func (r *renderer) invalid(path *field.Path, value any, format string, args ...any) {
	r.errs = append(r.errs, field.Invalid(path, value, fmt.Sprintf(format, args...)))
}

func (r *renderer) limit(in *v1alpha1.Limiting, path *field.Path) limitRule {
	out := limitRule{LimitRule: &meshv1.LimitRule{
		Name:       in.Name,
		UserAgents: in.UserAgents,
		Trigger:    triggers[in.TriggerPolicy],
	}}
	if len(in.ResourceRules)+len(in.NonResourceRules)+len(in.RestRules) == 0 {
		r.errs = append(r.errs, field.Required(path, "list what is limited in resourceRules, nonResourceRules or restRules"))
	}
	for _, m := range in.ResourceRules {
		out.Resources = append(out.Resources, &meshv1.ResourceMatch{
			ApiGroups: m.APIGroups, Resources: m.Resources, Verbs: m.Verbs, Namespaces: m.Namespaces, Names: m.Names,
		})
	}
	for _, m := range in.NonResourceRules {
		out.Paths = append(out.Paths, &meshv1.PathMatch{Paths: m.NonResourceURLs, Verbs: m.Verbs})
	}
	for i, m := range in.RestRules {
		if match := r.url(m.URL, path.Child("restRules").Index(i).Child("url")); match != nil {
			match.Methods = methodsOf(m.Method)
			out.Http = append(out.Http, match)
		}
	}
	if in.PodSelector != nil {
		sel, err := metav1.LabelSelectorAsSelector(in.PodSelector)
		if err != nil {
			r.invalid(path.Child("podSelector"), metav1.FormatLabelSelector(in.PodSelector), "%v", err)
		}
		out.selects = sel
		out.SomePods = err == nil && !sel.Empty()
	}
	if b := in.Bucket; b != nil {
		path := path.Child("bucket")
		interval := r.duration(b.Interval, maxInterval, true, path.Child("interval"))
		if interval > 0 && b.Limit > 0 && float64(b.Limit)/interval.Seconds() > maxRefill {
			r.invalid(path, fmt.Sprintf("%d in %s", b.Limit, b.Interval), "more than %d a second limit nothing: make limit smaller or interval longer", int(maxRefill))
		}
		out.Bucket = &meshv1.Bucket{
			Burst:      r.count(b.Burst, 1, path.Child("burst")),
			Limit:      r.count(b.Limit, 0, path.Child("limit")),
			IntervalNs: int64(interval),
		}
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
	// What opens on errors opens by the pod's own.
	out.shared = in.Scope == v1alpha1.LimitScopeWorkload && (in.Bucket != nil || in.MaxInFlight != nil)
	if out.shared && in.Bucket != nil && in.Bucket.Limit == 0 {
		r.invalid(path.Child("bucket", "limit"), in.Bucket.Limit, "must be at least 1 with scope Workload: where members are more than burst they take turns in what is added, and there would be none")
	}
	if out.shared {
		out.Share = &meshv1.Share{}
	}
	return out
}

func (r *renderer) count(n, least int64, path *field.Path) uint32 {
	if n < least || n > 1<<31-1 {
		r.invalid(path, n, "must be from %d to %d", least, 1<<31-1)
		return 0
	}
	return uint32(n)
}

func (r *renderer) backoff(in *v1alpha1.ExponentialBackoff, path *field.Path) *meshv1.Backoff {
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

func (r *renderer) trip(in *v1alpha1.Trip, path *field.Path) *meshv1.Trip {
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

func (r *renderer) recovery(in *v1alpha1.RecoverPolicy, path *field.Path) *meshv1.Recovery {
	switch {
	case in == nil:
	case in.Type == v1alpha1.RecoverManual:
		return nil
	case in.SleepingWindowSize != nil:
		return &meshv1.Recovery{SleepingWindowNs: int64(r.duration(*in.SleepingWindowSize, maxWindow, true, path.Child("sleepingWindowSize")))}
	}
	return &meshv1.Recovery{SleepingWindowNs: int64(defaultSleepingWindow)}
}

func (r *renderer) intercept(in *v1alpha1.TrafficInterceptRule, path *field.Path) *meshv1.InterceptRule {
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

func (r *renderer) fault(in *v1alpha1.HTTPFaultInjection, path *field.Path) *meshv1.FaultRule {
	out := &meshv1.FaultRule{Name: in.Name, Seed: in.Seed}
	if in.Count != nil && *in.Count > 0 {
		out.Count = uint64(*in.Count)
	}
	if m := in.Match; m != nil {
		for _, m := range m.Resources {
			out.Resources = append(out.Resources, &meshv1.ResourceMatch{
				ApiGroups: m.APIGroups, Resources: m.Resources, Verbs: m.Verbs, Namespaces: m.Namespaces, Names: m.Names,
				Headers: headersOf(m.Headers),
			})
		}
		for _, m := range m.NonResourceRules {
			out.Paths = append(out.Paths, &meshv1.PathMatch{Paths: m.NonResourceURLs, Verbs: m.Verbs})
		}
		for i, m := range m.HTTPMatch {
			path := path.Child("match", "httpMatch").Index(i)
			out.Http = append(out.Http, &meshv1.HttpMatch{
				Host:    r.text(m.Host, path.Child("host"), true),
				Path:    pathOf(r.text(m.Path, path.Child("path"), false)),
				Methods: methodsOf(m.Method),
				Headers: headersOf(m.Headers),
			})
		}
	}
	if in.EffectiveTime != nil {
		out.EffectiveTime = r.effective(in.EffectiveTime, path.Child("effectiveTime"))
	}
	if f := in.Delay; f != nil {
		path := path.Child("delay")
		out.Delay = &meshv1.Delay{FixedNs: int64(r.duration(f.FixedDelay, maxDelay, false, path.Child("fixedDelay"))), Percent: r.percent(f.Percent, path.Child("percent"))}
	}
	if f := in.Abort; f != nil {
		path := path.Child("abort")
		if f.HTTPStatus < 200 || f.HTTPStatus > 599 {
			r.invalid(path.Child("httpStatus"), f.HTTPStatus, "must be from 200 to 599")
		}
		out.Abort = &meshv1.Abort{Status: uint32(f.HTTPStatus), Reason: f.Reason, Percent: r.percent(f.Percent, path.Child("percent"))}
	}
	if f := in.Reset; f != nil {
		out.Reset_ = &meshv1.Reset{Percent: r.percent(f.Percent, path.Child("reset", "percent")), AfterAnswer: f.AfterAnswer}
	}
	if f := in.Truncate; f != nil {
		out.Truncate = &meshv1.Truncate{AfterBytes: uint64(max(f.AfterBytes, 0)), Percent: r.percent(f.Percent, path.Child("truncate", "percent"))}
	}
	if f := in.SlowBody; f != nil {
		path := path.Child("slowBody")
		if f.BytesPerSecond < 1 {
			r.invalid(path.Child("bytesPerSecond"), f.BytesPerSecond, "must be at least 1")
		}
		out.SlowBody = &meshv1.SlowBody{BytesPerSecond: uint64(max(f.BytesPerSecond, 0)), Percent: r.percent(f.Percent, path.Child("percent"))}
	}
	if f := in.StaleList; f != nil {
		path := path.Child("staleList")
		out.StaleList = &meshv1.StaleList{AgeNs: int64(r.duration(f.Age, maxInterval, true, path.Child("age"))), Percent: r.percent(f.Percent, path.Child("percent"))}
	}
	if in.Watch != nil {
		out.Watch = r.watch(in.Watch, path.Child("watch"))
	}
	return out
}

func (r *renderer) watch(in *v1alpha1.FaultWatch, path *field.Path) *meshv1.WatchFault {
	out := &meshv1.WatchFault{}
	after := func(d v1alpha1.Duration, path *field.Path) int64 {
		if d == "" {
			return 0
		}
		return int64(r.duration(d, maxInterval, false, path))
	}
	if f := in.Gone; f != nil {
		path := path.Child("gone")
		out.Gone = &meshv1.WatchFault_Gone{Percent: r.percent(f.Percent, path.Child("percent")), AfterNs: after(f.After, path.Child("after"))}
	}
	if f := in.Cut; f != nil {
		path := path.Child("cut")
		out.Cut = &meshv1.WatchFault_Cut{Percent: r.percent(f.Percent, path.Child("percent")), AfterNs: after(f.After, path.Child("after"))}
	}
	if f := in.Stall; f != nil {
		path := path.Child("stall")
		out.Stall = &meshv1.WatchFault_Stall{Percent: r.percent(f.Percent, path.Child("percent")), AfterNs: after(f.After, path.Child("after")), LastsNs: after(f.Lasts, path.Child("lasts"))}
	}
	if f := in.Delay; f != nil {
		path := path.Child("delay")
		out.Delay = &meshv1.WatchFault_Late{Percent: r.percent(f.Percent, path.Child("percent")), ByNs: int64(r.duration(f.FixedDelay, maxDelay, false, path.Child("fixedDelay")))}
	}
	if f := in.Duplicate; f != nil {
		out.Duplicate = &meshv1.WatchFault_Duplicate{Percent: r.percent(f.Percent, path.Child("duplicate", "percent"))}
	}
	if f := in.Drop; f != nil {
		path := path.Child("drop")
		out.Drop = &meshv1.WatchFault_Drop{Percent: r.percent(f.Percent, path.Child("percent")), MadeUpAfterNs: int64(defaultMadeUpAfter)}
		if f.MadeUpAfter != "" {
			out.Drop.MadeUpAfterNs = int64(r.duration(f.MadeUpAfter, maxDelay, true, path.Child("madeUpAfter")))
		}
	}
	return out
}

func (r *renderer) effective(in *v1alpha1.EffectiveTimeRange, path *field.Path) *meshv1.EffectiveTime {
	out := &meshv1.EffectiveTime{TimeZone: in.TimeZone}
	if in.StartTime != "" || in.EndTime != "" {
		out.Start, out.End = r.timeOfDay(in.StartTime, path.Child("startTime")), r.timeOfDay(in.EndTime, path.Child("endTime"))
		if in.StartTime == in.EndTime {
			r.invalid(path.Child("endTime"), in.EndTime, "is startTime: leave both out for all day")
		}
	}
	out.DaysOfWeek = r.numbers(in.DaysOfWeek, 0, 6, path.Child("daysOfWeek"))
	out.DaysOfMonth = r.numbers(in.DaysOfMonth, 1, 31, path.Child("daysOfMonth"))
	out.Months = r.numbers(in.Months, 1, 12, path.Child("months"))
	// "Local" would be that of whoever reads it.
	if _, err := time.LoadLocation(in.TimeZone); err != nil || in.TimeZone == "Local" {
		r.invalid(path.Child("timeZone"), in.TimeZone, "no such time zone: write a name of the IANA database, such as Europe/Berlin")
	}
	return out
}

func (r *renderer) timeOfDay(s string, path *field.Path) uint32 {
	t, err := time.Parse(time.TimeOnly, s)
	if err != nil || len(s) != len(time.TimeOnly) {
		r.invalid(path, s, `must be a time of day, such as "08:30:00"`)
	}
	return uint32(t.Hour()*3600 + t.Minute()*60 + t.Second())
}

func (r *renderer) numbers(in []int, least, most int, path *field.Path) (out []uint32) {
	for i, n := range in {
		if n < least || n > most {
			r.invalid(path.Index(i), n, "must be from %d to %d", least, most)
			continue
		}
		out = append(out, uint32(n))
	}
	return out
}

// Bounds on lengths of time.
const (
	maxDuration = 366 * 24 * time.Hour
	maxInterval = 366 * 24 * time.Hour
	maxWindow   = 24 * time.Hour
	maxDelay    = time.Hour

	maxRefill = 1e6 // a second
)

func (r *renderer) duration(in v1alpha1.Duration, most time.Duration, positive bool, path *field.Path) time.Duration {
	d, err := time.ParseDuration(string(in))
	switch {
	case err != nil:
		r.invalid(path, string(in), `must be a length of time, such as "500ms" or "1h30m", of less than 290 years`)
	case d < 0, positive && d == 0:
		r.invalid(path, string(in), "must be longer than 0s")
	case d > most:
		r.invalid(path, string(in), "must not be longer than %s", strings.TrimSuffix(strings.TrimSuffix(most.String(), "0s"), "0m"))
	default:
		return d
	}
	return 0
}

// threshold is a percentage that something is judged by.
func (r *renderer) threshold(in v1alpha1.Percent, path *field.Path) float64 {
	before := len(r.errs)
	p := r.percent(in, path)
	if p == 0 && len(r.errs) == before {
		r.invalid(path, string(in), `must be more than "0", which has no effect: leave it out instead`)
	}
	return p
}

func (r *renderer) percent(in v1alpha1.Percent, path *field.Path) float64 {
	p, err := strconv.ParseFloat(string(in), 64)
	if err != nil || !(p >= 0 && p <= 100) {
		r.invalid(path, string(in), `must be from "0" to "100"`)
		return 0
	}
	return p
}
