package validate

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"pgregory.net/rapid"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// judges are what a CircuitBreaker and a FaultInjection have to pass.
type judges struct {
	breakers, injections crd
}

func newJudges(t testing.TB) *judges {
	return &judges{newCRD(t, "circuitbreakers"), newCRD(t, "faultinjections")}
}

// admit puts an object through the schema and the webhook.
func (j *judges) admit(t require.TestingT, o map[string]any) (rules compile.Rules, warnings []string, refused error) {
	never := func() bool { return false }
	of, into := j.breakers, any(&v1alpha1.CircuitBreaker{})
	if o["kind"] == "FaultInjection" {
		of, into = j.injections, &v1alpha1.FaultInjection{}
	}
	if errs := of.admit(o); len(errs) > 0 {
		return rules, nil, errs.ToAggregate()
	}
	data, err := json.Marshal(o)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, into))
	switch o := into.(type) {
	case *v1alpha1.CircuitBreaker:
		rules.Breakers = append(rules.Breakers, o)
		refused, warnings = Breaker(o).ToAggregate(), breakerWarnings(o, never)
	case *v1alpha1.FaultInjection:
		o.Status.ExpirationGeneration = o.Generation
		o.Status.ExpirationTime = &metav1.Time{Time: time.Unix(2e9, 0)}
		rules.Injections = append(rules.Injections, o)
		refused, warnings = Injection(o).ToAggregate(), injectionWarnings(o, never)
	}
	if refused != nil && refused.Error() == "" {
		refused = nil
	}
	return rules, warnings, refused
}

// enforced compiles rules as the manager does, and then as an agent.
func enforced(t require.TestingT, rules compile.Rules, sound bool) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "pod", UID: "1",
		Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"},
	}}
	rules.Now = time.Unix(1e9, 0)
	r := compile.Compile(nil, []*corev1.Pod{pod}, nil, rules)
	require.NotContains(t, r.Policies["1"].Version, "unsound")
	if sound {
		for _, b := range r.Breakers {
			require.Empty(t, b.Problems)
		}
		for _, i := range r.Injections {
			require.Empty(t, i.Problems)
		}
	}
	rendered := r.Policies["1"].Traffic
	for _, b := range rendered.GetBreakers() {
		for _, i := range b.Intercepts {
			for _, m := range i.Http {
				_, err := match.NewURL(m)
				require.NoError(t, err)
			}
		}
	}
	_, err := limit.Compile(rendered, limit.NewStore(), time.Now())
	require.NoError(t, err)
	_, err = fault.Compile(rendered, fault.NewStore("1"), time.Now())
	require.NoError(t, err)
}

// What users are shown, and what the ancestors' users have, is taken without a word of
// refusal, and has effect.
func TestManifestsAreTaken(t *testing.T) {
	j := newJudges(t)
	files, err := filepath.Glob("../../deploy/examples/*.yaml")
	require.NoError(t, err)
	more, err := filepath.Glob("testdata/*.yaml")
	require.NoError(t, err)
	taken := 0
	for _, file := range append(files, more...) {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		for doc := range bytes.SplitSeq(data, []byte("\n---\n")) {
			var o map[string]any
			require.NoError(t, yaml.Unmarshal(doc, &o))
			if o["kind"] != "CircuitBreaker" && o["kind"] != "FaultInjection" {
				continue
			}
			rules, _, err := j.admit(t, o)
			require.NoError(t, err, file)
			for _, b := range rules.Breakers {
				b.Spec.Selector = &metav1.LabelSelector{}
			}
			enforced(t, rules, true)
			taken++
		}
	}
	require.GreaterOrEqual(t, taken, 6)
}

// Whatever the apiserver takes by the schemas never panics, whether or not the webhook
// takes it too. What both take has effect, in agents too.
func TestWhateverValidatesIsEnforced(t *testing.T) {
	j := newJudges(t)
	counts := map[string]int{}
	for kind, of := range map[string]crd{"CircuitBreaker": j.breakers, "FaultInjection": j.injections} {
		t.Run(kind, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				spec := of.Structural.Properties["spec"]
				o := map[string]any{
					"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": kind,
					"metadata": map[string]any{"namespace": "ns", "name": "o", "uid": "1"},
					"spec":     written(rt, "spec", &spec),
				}
				rules, _, err := j.admit(rt, o)
				if len(rules.Breakers)+len(rules.Injections) == 0 {
					counts["refused by the schema"]++
					return
				}
				if err != nil {
					counts["refused by the webhook"]++
				} else {
					counts["taken"]++
				}
				enforced(rt, rules, err == nil)
			})
		})
	}
	t.Log(counts)
	require.Greater(t, counts["taken"], 10, "what is written is of use")
}

// some values that fields of these names have, so that much of what is written makes sense.
var some = map[string][]any{
	"name":               {"a", "b", "c", "rule one", "\n"},
	"fixedDelay":         {"1s", "0s", "3h"},
	"interval":           {"1s", "10s", "1h30m", "1ns"},
	"sleepingWindowSize": {"10s", "1000h"},
	"duration":           {"1h", "0s", "99999999h"},
	"age":                {"10s", "0s"},
	"window":             {"10s", "0s"},
	"slowCall":           {"2s", "0.5s"},
	"after":              {"1s", "0s"}, "lasts": {"1s"}, "madeUpAfter": {"1s", "0s"},
	"percent": {"0", "100", "50.5"}, "errorPercent": {"50"}, "slowPercent": {"99.9"},
	"startTime": {"08:00:00", "23:59:59"}, "endTime": {"00:00:00", "08:00:00"},
	"timeZone": {"", "UTC", "Europe/Berlin", "Local", "Nowhere/Land", "../x"},
	"url":      {"https://api.example.com/v1/*", "*.example.com:8443", "*", "[::1]:80/x", "a//b", "http://", ":80", "*.*", "x?y", "[::1", "ftp://x", "é"},
	"contents": {"api.example.com", "*.example.com/x", "a.com/x*", `.*\.evil\.com`, `a/(b|c)+`, "(", `\Qa`, "a)(b", "(a{1000}){1000}", "[", "*"},
	"regex":    {"", ".*", "(", `\Qa`, "x{1000}", "(?i)A"},
	"exact":    {"", "a.com"}, "prefix": {"", "/v1"},
	"namespaces": {"*", "a", "", "A B"}, "names": {"*", "x", "", "system:a", "a/b"},
	"apiGroups": {"*", "", "apps", "A_B"}, "resources": {"*", "pods", "pods/status", "*/scale", "pods/*"},
	"userAgents": {"a", "kubectl/*", "*"}, "method": {"", "*", "get", "POST"}, "methods": {"*", "GET", "post"},
	"nonResourceURLs": {"*", "/healthz", "/api/*"}, "key": {"app", "a//b"}, "values": {"x", "y z"},
	"operator": {"In", "Exists", "Within"},
}

// written is any value of a schema, more or less.
func written(rt *rapid.T, name string, s *schema.Structural) any {
	if s.ValueValidation != nil && len(s.ValueValidation.Enum) > 0 {
		return rapid.SampledFrom(s.ValueValidation.Enum).Draw(rt, name).Object
	}
	switch s.Type {
	case "object":
		out := map[string]any{}
		if s.AdditionalProperties != nil && s.AdditionalProperties.Structural != nil {
			for range rapid.IntRange(0, 2).Draw(rt, name) {
				out[rapid.SampledFrom([]string{"app", "tier", "a//b"}).Draw(rt, "key")] = written(rt, "values", s.AdditionalProperties.Structural)
			}
		}
		for _, p := range slices.Sorted(maps.Keys(s.Properties)) {
			child := s.Properties[p]
			required := s.ValueValidation != nil && slices.Contains(s.ValueValidation.Required, p)
			if rapid.IntRange(0, 9).Draw(rt, p+"?") < map[bool]int{true: 10, false: 4}[required] {
				out[p] = written(rt, p, &child)
			}
		}
		return out
	case "array":
		least := 0
		if s.ValueValidation != nil && s.ValueValidation.MinItems != nil {
			least = int(*s.ValueValidation.MinItems)
		}
		out := []any{}
		for range rapid.IntRange(least, 2).Draw(rt, name) {
			out = append(out, written(rt, name, s.Items))
		}
		return out
	case "integer":
		v := rapid.SampledFrom([]int64{0, 1, 2, 7, 12, 200, 409, 1000, 1 << 31, 1 << 40, -1}).Draw(rt, name)
		if vv := s.ValueValidation; vv != nil && rapid.IntRange(0, 9).Draw(rt, "in range") > 0 {
			if vv.Minimum != nil && float64(v) < *vv.Minimum {
				v = int64(*vv.Minimum)
			}
			if vv.Maximum != nil && float64(v) > *vv.Maximum {
				v = int64(*vv.Maximum)
			}
		}
		if s.ValueValidation != nil && s.ValueValidation.Format == "int32" {
			v = int64(int32(v))
		}
		return v
	case "boolean":
		return rapid.Bool().Draw(rt, name)
	}
	if values, ok := some[name]; ok {
		return rapid.SampledFrom(values).Draw(rt, name)
	}
	return rapid.String().Draw(rt, name)
}

const breakerSpec = `
selector: {}
rateLimitings:
- name: a
  resourceRules: [{apiGroups: ["*"], resources: [pods], verbs: ["*"], namespaces: [ns]}]
  restRules: [{url: "https://api.example.com/v1"}]
  podSelector: {matchLabels: {tier: one}}
  bucket: {burst: 10, interval: 1s, limit: 5}
  exponentialBackoff: {baseDelayInMillisecond: 10, maxDelayInMillisecond: 100}
  trip: {window: 10s, errorPercent: "50"}
  recoverPolicy: {type: SleepingWindow, sleepingWindowSize: 10s}
trafficInterceptRules:
- {name: b, interceptType: Whitelist, contentType: Regexp, contents: ['.*\.example\.com']}
`

const injectionSpec = `
selector: {}
duration: 1h
httpFault:
- name: a
  match: {resources: [{apiGroups: ["*"], resources: [pods], verbs: [watch], namespaces: [ns]}]}
  effectiveTime: {startTime: "08:00:00", endTime: "10:00:00", timeZone: Europe/Berlin}
  delay: {fixedDelay: 1s, percent: "50"}
  watch: {cut: {percent: "1"}}
`

func TestTrafficIsJudged(t *testing.T) {
	j := newJudges(t)
	for _, c := range []struct{ kind, old, new, says string }{
		{"CircuitBreaker", "", "", ""},
		{"CircuitBreaker", "selector: {}", "", "spec.selector: Required"},
		{"CircuitBreaker", "selector: {}", "selector: {matchLabels: {a: '-'}}", "spec.selector.matchLabels"},
		{"CircuitBreaker", "tier: one", "tier: '-'", "spec.rateLimitings[0].podSelector"},
		{"CircuitBreaker", "verbs: [\"*\"]", "verbs: [steal]", "spec.rateLimitings[0].resourceRules[0].verbs[0]"},
		{"CircuitBreaker", "namespaces: [ns]", "namespaces: [A]", "spec.rateLimitings[0].resourceRules[0].namespaces[0]"},
		{"CircuitBreaker", "namespaces: [ns]", `namespaces: ["*"], scope: Cluster`, ""},
		{"CircuitBreaker", "namespaces: [ns]", "namespaces: [ns], scope: Namespaced", ""},
		{"CircuitBreaker", "namespaces: [ns]", "namespaces: [ns], scope: Cluster", "requests of scope Cluster are in no namespace"},
		{"CircuitBreaker", "namespaces: [ns]", "namespaces: [ns], scope: Global", "spec.rateLimitings[0].resourceRules[0].scope"},
		{"CircuitBreaker", `apiGroups: ["*"]`, "apiGroups: [A]", "spec.rateLimitings[0].resourceRules[0].apiGroups[0]"},
		{"CircuitBreaker", "https://api", "ftp://api", "scheme must be http or https"},
		{"CircuitBreaker", "api.example.com/v1", "api.example.com:0/v1", "port must be a number"},
		{"CircuitBreaker", "api.example.com/v1", "api.example.com/*/v1", "at its end alone"},
		{"CircuitBreaker", "api.example.com/v1", "a b/v1", "host must be a name"},
		{"CircuitBreaker", "interval: 1s", "interval: 0s", "must be longer than 0s"},
		{"CircuitBreaker", "interval: 1s", "interval: 10000h", "must not be longer than"},
		{"CircuitBreaker", "interval: 1s, limit: 5", "interval: 1ns, limit: 5", "limit nothing"},
		{"CircuitBreaker", "interval: 1s, limit: 5}", "interval: 1s, limit: 0}", ""},
		{"CircuitBreaker", "interval: 1s, limit: 5}", "interval: 1s, limit: 0}\n  scope: Workload", "must be at least 1 with scope Workload"},
		{"CircuitBreaker", "maxDelayInMillisecond: 100", "maxDelayInMillisecond: 1", "not be less than baseDelay"},
		{"CircuitBreaker", "sleepingWindowSize: 10s", "sleepingWindowSize: 25h", "must not be longer than 24h"},
		{"CircuitBreaker", "type: SleepingWindow", "type: Manual", "sleepingWindowSize is for type SleepingWindow"},
		{"CircuitBreaker", `'.*\.example\.com'`, `'('`, "not a regular expression"},
		{"CircuitBreaker", `'.*\.example\.com'`, `'\Qa'`, "not a regular expression"},
		{"CircuitBreaker", `'.*\.example\.com'`, `'(abcdefgh){900}'`, "too large"},
		{"CircuitBreaker", `errorPercent: "50"`, `errorPercent: "0"`, "must be more than"},
		{"CircuitBreaker", `errorPercent: "50"`, `slowCall: 1s, slowPercent: "0.0"`, "must be more than"},
		{"CircuitBreaker", "trip:", "triggerPolicy: LimiterOnly\n  trip:", "no effect with triggerPolicy LimiterOnly"},
		{"CircuitBreaker", "contentType: Regexp", "contentType: Normal", "host must be a name"},
		{"CircuitBreaker", "contentType: Regexp", "contentType: Glob", "spec.trafficInterceptRules[0].contentType"},
		{"CircuitBreaker", "name: a", `name: "a\n"`, "printable"},
		{"FaultInjection", "", "", ""},
		{"FaultInjection", ", namespaces: [ns]", ", scope: Cluster", ""},
		{"FaultInjection", "namespaces: [ns]", "namespaces: [ns], scope: Cluster", "requests of scope Cluster are in no namespace"},
		{"FaultInjection", "duration: 1h", "duration: 0s", "must be longer than 0s"},
		{"FaultInjection", "duration: 1h", "duration: 9000h", "must not be longer than"},
		{"FaultInjection", "Europe/Berlin", "Mars/Base", "no such time zone"},
		{"FaultInjection", "Europe/Berlin", "Local", "no such time zone"},
		{"FaultInjection", `endTime: "10:00:00"`, `endTime: "08:00:00"`, "leave both out"},
		{"FaultInjection", `, endTime: "10:00:00"`, "", "go together"},
		{"FaultInjection", `percent: "50"`, `percent: "101"`, "spec.httpFault[0].delay.percent"},
		{"FaultInjection", "fixedDelay: 1s", "fixedDelay: 2h", "must not be longer than 1h"},
		{"FaultInjection", "match: {resources", "match: {httpMatch: [{host: {regex: '('}}], resources", "spec.httpFault[0].match.httpMatch[0].host.regex"},
		{"FaultInjection", "match: {resources", "match: {httpMatch: [{host: {exact: 'https://api.example.com:8443'}}], resources", "httpMatch[0].host.exact"},
		{"FaultInjection", "match: {resources", "match: {httpMatch: [{host: {exact: '2001:db8::1'}}, {host: {prefix: '2001:db8:'}}, {host: {prefix: 'API.'}}], resources", ""},
		{"FaultInjection", "match: {resources", "match: {httpMatch: [{host: {prefix: 'api.example.com:84'}}], resources", "httpMatch[0].host.prefix"},
		{"FaultInjection", `watch: {cut: {percent: "1"}}`, "watch: {}", "spec.httpFault[0].watch"},
		{"FaultInjection", "match: {resources", "match: {httpMatch: [{host: {exact: ''}}], resources", "set one of exact, prefix and regex"},
	} {
		spec := map[string]string{"CircuitBreaker": breakerSpec, "FaultInjection": injectionSpec}[c.kind]
		changed := strings.Replace(spec, c.old, c.new, 1)
		require.True(t, c.old == "" || changed != spec, c.old)
		o := map[string]any{"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": c.kind, "metadata": map[string]any{"name": "o"}}
		var value map[string]any
		require.NoError(t, yaml.Unmarshal([]byte(changed), &value))
		o["spec"] = value
		_, _, err := j.admit(t, o)
		if c.says == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, c.says, c.new)
		}
	}
}

// object is one with the spec, as it comes from a client: its numbers are whole.
func object(t *testing.T, kind, spec string) map[string]any {
	t.Helper()
	data, err := yaml.YAMLToJSON([]byte(spec))
	require.NoError(t, err)
	var value map[string]any
	require.NoError(t, utiljson.Unmarshal(data, &value))
	return map[string]any{"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": kind, "metadata": map[string]any{"name": "o"}, "spec": value}
}

func TestRulesAboutConnectAreWarnedOf(t *testing.T) {
	j := newJudges(t)
	for spec, warned := range map[string]bool{
		"{selector: {}, trafficInterceptRules: [{name: a, interceptType: Blacklist, contentType: Normal, contents: [a.example], methods: [GET, connect]}]}": true,
		"{selector: {}, trafficInterceptRules: [{name: a, interceptType: Blacklist, contentType: Normal, contents: [a.example]}]}":                          false,
		"{selector: {}, rateLimitings: [{name: a, restRules: [{url: a.example, method: CONNECT}], maxInFlight: 1}]}":                                        true,
		"{selector: {}, rateLimitings: [{name: a, restRules: [{url: a.example, method: GET}], maxInFlight: 1}]}":                                            false,
		"{selector: {}, duration: 1h, httpFault: [{name: a, match: {httpMatch: [{method: CONNECT}]}, delay: {fixedDelay: 1s, percent: '1'}}]}":              true,
		"{selector: {}, duration: 1h, httpFault: [{name: a, match: {httpMatch: [{host: {exact: a.example}}]}, delay: {fixedDelay: 1s, percent: '1'}}]}":     false,
	} {
		kind := "CircuitBreaker"
		if strings.Contains(spec, "httpFault") {
			kind = "FaultInjection"
		}
		_, warnings, err := j.admit(t, object(t, kind, spec))
		require.NoError(t, err, spec)
		require.Equal(t, warned, slices.Contains(warnings, connectUnmatched), spec)
	}
}

func TestBreakersWithoutEffectAreWarnedOf(t *testing.T) {
	j := newJudges(t)
	const limited = "selector: {}\nrateLimitings: [{name: a, "
	for spec, says := range map[string]string{
		`selector: {}`: "neither spec.rateLimitings nor spec.trafficInterceptRules",
		limited + `nonResourceRules: [{nonResourceURLs: ["/healthz", "/api/v1/pods*"], verbs: ["*"]}], maxInFlight: 1}]`:                                                 "on /api/v1/pods*,",
		limited + `nonResourceRules: [{nonResourceURLs: ["/apis/apps/v1/*"], verbs: ["*"]}], maxInFlight: 1}]`:                                                           "on /apis/apps/v1/*,",
		limited + `nonResourceRules: [{nonResourceURLs: ["/api/v1", "/api/v1/", "/apis/apps*", "/api*", "*"], verbs: ["*"]}], maxInFlight: 1}]`:                          "",
		limited + `nonResourceRules: [{nonResourceURLs: ["*"], verbs: ["*"]}], trip: {errorPercent: "1"}, scope: Workload}]`:                                             "scope Workload has no effect",
		limited + `nonResourceRules: [{nonResourceURLs: ["*"], verbs: ["*"]}], maxInFlight: 1, scope: Workload}]`:                                                        "",
		limited + `nonResourceRules: [{nonResourceURLs: ["*"], verbs: ["*"]}], maxInFlight: 1, recoverPolicy: {type: Manual}}]`:                                          "recoverPolicy has no effect",
		limited + `nonResourceRules: [{nonResourceURLs: ["*"], verbs: ["*"]}], trip: {errorPercent: "1"}, recoverPolicy: {type: Manual}}]`:                               "",
		limited + `nonResourceRules: [{nonResourceURLs: ["*"], verbs: ["*"]}], triggerPolicy: ForceOpened, trip: {errorPercent: "1"}, recoverPolicy: {type: Manual}}]`:   "recoverPolicy has no effect",
		limited + `resourceRules: [{apiGroups: [""], resources: [pods, nodes], verbs: [get], namespaces: [default]}], maxInFlight: 1}]`:                                  "no effect on nodes",
		limited + `resourceRules: [{apiGroups: ["", rbac.authorization.k8s.io, "*"], resources: [clusterroles], verbs: [get], namespaces: [default]}], maxInFlight: 1}]`: "no effect on clusterroles",
		limited + `resourceRules: [{apiGroups: [""], resources: [pods, nodes], verbs: [get], namespaces: ["*"], scope: Namespaced}], maxInFlight: 1}]`:                   "no effect on nodes, which are in no namespace: give them an entry with scope Cluster",
		limited + `resourceRules: [{apiGroups: [""], resources: [pods, nodes], verbs: [get], namespaces: ["*"], scope: Cluster}], maxInFlight: 1}]`:                      "",
		limited + `resourceRules: [{apiGroups: ["", longhorn.io], resources: [nodes], verbs: [get], namespaces: [default]}], maxInFlight: 1}]`:                           "",
		limited + `resourceRules: [{apiGroups: [""], resources: [pods, nodes], verbs: [get], namespaces: ["*"]}], maxInFlight: 1}]`:                                      "",
	} {
		_, warnings, err := j.admit(t, object(t, "CircuitBreaker", spec))
		require.NoError(t, err, spec)
		if says == "" {
			require.Empty(t, warnings, spec)
		} else {
			require.Len(t, warnings, 1, spec)
			require.Contains(t, warnings[0], says)
		}
	}
}

func TestTrafficIsWarnedOf(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	handle := func(o any, existing ...client.Object) []string {
		t.Helper()
		reader := fake.NewClientBuilder().WithScheme(scheme).WithObjects(existing...).Build()
		req := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Namespace: "ns"}}
		var err error
		req.Object.Raw, err = json.Marshal(o)
		require.NoError(t, err)
		var r admission.Response
		if _, ok := o.(*v1alpha1.CircuitBreaker); ok {
			r = (&Breakers{reader}).Handle(t.Context(), req)
		} else {
			r = (&Injections{reader}).Handle(t.Context(), req)
		}
		require.True(t, r.Allowed, r.Result)
		return r.Warnings
	}
	b := &v1alpha1.CircuitBreaker{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(breakerSpec), &b.Spec))
	trusts := pod("p", map[string]string{})
	trusts.Annotations = map[string]string{v1alpha1.EgressTrustAnnotation: "true"}
	require.Contains(t, handle(b, pod("p", map[string]string{}))[0], v1alpha1.TrustEgressAnnotation)
	require.Empty(t, handle(b, trusts))
	anyPath := b.DeepCopy()
	anyPath.Spec.RateLimitings = nil
	anyPath.Spec.TrafficInterceptRules = []v1alpha1.TrafficInterceptRule{
		{Name: "a", InterceptType: v1alpha1.InterceptBlacklist, ContentType: v1alpha1.ContentPrefix, Contents: []string{"evil.com/"}},
		{Name: "b", InterceptType: v1alpha1.InterceptBlacklist, ContentType: v1alpha1.ContentRegexp, Contents: []string{`evil\.org/.*`}},
	}
	require.Empty(t, handle(anyPath), "any path is none")
	agents := b.DeepCopy()
	agents.Spec.TrafficInterceptRules = nil
	agents.Spec.RateLimitings[0].RestRules = []v1alpha1.RestRule{{URL: "https://api.example.com", Method: "*"}}
	agents.Spec.RateLimitings = agents.Spec.RateLimitings[:1]
	require.Contains(t, handle(agents)[0], "count connections")
	require.Empty(t, handle(agents, trusts))
	agents.Spec.RateLimitings[0].TriggerPolicy = v1alpha1.TriggerForceOpened
	require.NotContains(t, strings.Join(handle(agents), "\n"), "https", "there is nothing to count")
	agents.Spec.RateLimitings[0].UserAgents = []string{"curl*"}
	require.Contains(t, strings.Join(handle(agents), "\n"), "user agents")
	agents.Spec.Egress = &v1alpha1.EgressConfig{Ports: []int32{53, 443}}
	require.Contains(t, strings.Join(handle(agents, trusts), "\n"), "53")
	agents.Spec.Egress.Ports = nil
	agents.Spec.RateLimitings[0].RestRules = nil
	agents.Spec.RateLimitings[0].NonResourceRules = []v1alpha1.NonResourceRule{{NonResourceURLs: []string{"*"}, Verbs: []string{"*"}}}
	require.Contains(t, strings.Join(handle(agents), "\n"), "spec.egress has no effect")
	b.Spec.RateLimitings[0].RestRules[0].URL = "http://api.example.com:8080/v1"
	require.Contains(t, handle(b)[0], "port 8080")
	b.Spec.Egress = &v1alpha1.EgressConfig{Ports: []int32{8080}}
	require.Empty(t, handle(b))
	b.Spec.Selector.MatchLabels, b.DeletionTimestamp = map[string]string{"a": "-"}, &metav1.Time{Time: time.Now()}
	require.Empty(t, handle(b), "what is deleted is not judged")

	f := &v1alpha1.FaultInjection{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(injectionSpec), &f.Spec))
	require.Empty(t, handle(f))
	for spec, says := range map[string]string{
		`httpFault: []`: "nothing is injected",
		`httpFault: [{name: a, delay: {fixedDelay: 0s, percent: "1"}}]`:                                                                                       "fixedDelay is 0s",
		`httpFault: [{name: a, watch: {delay: {fixedDelay: 0s, percent: "1"}}}]`:                                                                              "watch.delay has no effect",
		`httpFault: [{name: a, reset: {percent: "1"}, effectiveTime: {daysOfMonth: [30, 31], months: [2]}}]`:                                                  "daysOfMonth",
		`httpFault: [{name: a, reset: {percent: "1"}, effectiveTime: {daysOfMonth: [31], months: [2, 3]}}]`:                                                   "",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {httpMatch: [{path: {exact: v1}}]}}]`:                                                            `begin with "/"`,
		`httpFault: [{name: a, reset: {percent: "1"}, match: {resources: [{resources: [leases]}]}}]`:                                                          "locks are exempt",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {resources: [{resources: [leases], verbs: [watch]}, {resources: [leases], names: [leader]}]}}]`:  "",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {resources: [{resources: [pods], verbs: [create], names: [x]}]}}]`:                               "in the body",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {resources: [{resources: [leases], verbs: [get, create, update], names: [my-lock]}]}}]`:          "",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {resources: [{resources: [leases], verbs: [create], names: [my-lock]}]}}]`:                       "",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {resources: [{resources: [pods], verbs: [create, update], names: [x]}]}}]`:                       "",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {nonResourceRules: [{nonResourceURLs: ["/healthz", "/api/v1/pods"], verbs: ["*"]}]}}]`:           "spec.httpFault[0].match.nonResourceRules[0] has no effect on /api/v1/pods,",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {nonResourceRules: [{nonResourceURLs: ["/healthz", "/api*"], verbs: ["*"]}]}}]`:                  "",
		`httpFault: [{name: a, reset: {percent: "1"}, match: {resources: [{resources: [pods/eviction], verbs: [create], names: [x]}, {resources: [pods]}]}}]`: "",
	} {
		o := &v1alpha1.FaultInjection{}
		require.NoError(t, yaml.UnmarshalStrict([]byte("selector: {}\nduration: 1h\n"+spec), &o.Spec))
		if got := strings.Join(handle(o, trusts), "\n"); says == "" {
			require.Empty(t, got, spec)
		} else {
			require.Contains(t, got, says, spec)
		}
	}
	f.Spec.Egress = &v1alpha1.FaultEgress{Ports: []int32{53}}
	warnings := strings.Join(handle(f), "\n")
	require.Contains(t, warnings, "spec.egress has no effect")
	require.Contains(t, warnings, "53")
	f.Spec.HTTPFaultInjections[0].Match.HTTPMatch = []v1alpha1.FaultHTTPMatch{{}}
	f.Spec.Egress.Ports = []int32{8080}
	require.Empty(t, handle(f))
	f.Spec.HTTPFaultInjections[0].Abort = &v1alpha1.FaultAbort{HTTPStatus: 500, Percent: "1"}
	require.Contains(t, strings.Join(handle(f), "\n"), "abort refuses connections")
	require.Empty(t, handle(f, trusts))
	f.Spec.HTTPFaultInjections[0].Match.HTTPMatch, f.Spec.Egress = nil, nil
	f.Spec.HTTPFaultInjections[0].Match.Resources[0].Verbs = []string{"get"}
	f.Spec.Duration = nil
	warnings = strings.Join(handle(f), "\n")
	require.Contains(t, warnings, "spec.duration is not set")
	require.Contains(t, warnings, "watch has no effect")
}
