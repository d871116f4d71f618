package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// slowly is how long a fault delays lists of Endpoints.
const slowly = 3 * time.Second

// limitTest has the subtests of TestLimits: one pod under one CircuitBreaker.
type limitTest struct {
	pod     *corev1.Pod
	ns      string
	caller  hasty
	secrets string
	maps    string
	b       *meshv1alpha1.CircuitBreaker
}

// A pod's requests are limited by its rules. Refusals name the rule and when to retry.
func TestLimits(t *testing.T) {
	t.Parallel()
	pod := clientPod(t)
	ns, caller := pod.Namespace, hastyClient(t, pod)
	create(t, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "big"}, StringData: map[string]string{"a": "b"}})
	secrets, maps := "/api/v1/namespaces/"+ns+"/secrets", "/api/v1/namespaces/"+ns+"/configmaps"

	b := breaker(t, ns, "limits", everyLimit(ns), 1)

	s := &limitTest{pod: pod, ns: ns, caller: caller, secrets: secrets, maps: maps, b: b}
	t.Run("bucket", s.bucket)
	t.Run("client-go obeys Retry-After", s.retryAfter)
	t.Run("specific before general", s.specificBeforeGeneral)
	t.Run("locks are exempt", s.exemptLocks)
	t.Run("user agents", s.userAgents)
	t.Run("labels", s.labels)
	t.Run("subresources", s.subresources)
	t.Run("non-resource URLs", s.nonResources)
	// Faults make requests slow, and make them fail.
	faults(t, ns, "slow", `
httpFault:
- name: slow
  match: {resources: [{resources: [endpoints], verbs: [list]}]}
  delay: {fixedDelay: `+slowly.String()+`, percent: "100"}
- name: fails
  match: {resources: [{resources: [resourcequotas]}]}
  abort: {httpStatus: 500, percent: "100"}
  count: 1
`, 1)
	t.Run("in flight", s.inFlight)
	t.Run("backoff", s.backoff)
	t.Run("kubectl", s.kubectl)
	t.Run("invalid rules are refused", s.invalid)
	t.Run("disabled", s.disabled)
}

// everyLimit returns a specification with a rule for every kind of limit and of match.
func everyLimit(ns string) string {
	return `
rateLimitings:
- name: general
  resourceRules: [{apiGroups: ["*"], resources: ["*"], verbs: ["*"], namespaces: ["*"]}]
  bucket: {burst: 1000, interval: 1s, limit: 1000}
  triggerPolicy: LimiterOnly
- name: secrets
  resourceRules: [{apiGroups: [""], resources: [secrets], verbs: [get, list], namespaces: ["*"]}]
  bucket: {burst: 2, interval: 1h, limit: 1}
  triggerPolicy: LimiterOnly
- name: services
  resourceRules: [{apiGroups: [""], resources: [services], verbs: [list], namespaces: ["*"]}]
  bucket: {burst: 1, interval: 2s, limit: 1}
  triggerPolicy: LimiterOnly
- name: no-configmaps
  resourceRules: [{apiGroups: [""], resources: [configmaps], verbs: ["*"], namespaces: ["*"]}]
  triggerPolicy: ForceOpened
- name: but-here
  resourceRules: [{apiGroups: [""], resources: [configmaps], verbs: [get, list], namespaces: [` + ns + `]}]
  triggerPolicy: ForceClosed
- name: leases
  resourceRules: [{apiGroups: [coordination.k8s.io], resources: ["*"], verbs: ["*"], namespaces: ["*"]}]
  triggerPolicy: ForceOpened
- name: a-lock
  resourceRules: [{apiGroups: [coordination.k8s.io], resources: [leases], verbs: ["*"], namespaces: ["*"], names: [held]}]
  triggerPolicy: ForceOpened
- name: endpoints
  resourceRules: [{apiGroups: [""], resources: [endpoints], verbs: ["*"], namespaces: ["*"]}]
  maxInFlight: 1
  triggerPolicy: LimiterOnly
- name: by-kubectl
  resourceRules: [{apiGroups: [""], resources: [nodes], verbs: ["*"], namespaces: ["*"]}]
  userAgents: ["kubectl*"]
  triggerPolicy: ForceOpened
- name: version
  nonResourceRules: [{nonResourceURLs: [/version*], verbs: [get]}]
  bucket: {burst: 1, interval: 1h, limit: 1}
  triggerPolicy: LimiterOnly
- name: quotas
  resourceRules: [{apiGroups: [""], resources: [resourcequotas], verbs: ["*"], namespaces: ["*"]}]
  exponentialBackoff: {continuouslyFailureTimes: 1, baseDelayInMillisecond: 30000, maxDelayInMillisecond: 60000}
  triggerPolicy: LimiterOnly
- name: of-its-labels
  resourceRules: [{apiGroups: [""], resources: [podtemplates], verbs: ["*"], namespaces: ["*"]}]
  podSelector: {matchLabels: {` + podNameLabel + `: client}}
  triggerPolicy: ForceOpened
- name: of-others
  resourceRules: [{apiGroups: [""], resources: [replicationcontrollers], verbs: ["*"], namespaces: ["*"]}]
  podSelector: {matchExpressions: [{key: ` + podNameLabel + `, operator: NotIn, values: [client]}]}
  triggerPolicy: ForceOpened
- name: no-logs
  resourceRules: [{apiGroups: [""], resources: [pods/log], verbs: ["*"], namespaces: ["*"]}]
  triggerPolicy: ForceOpened
- name: no-scaling
  resourceRules: [{apiGroups: ["*"], resources: ["*/scale"], verbs: ["*"], namespaces: ["*"]}]
  triggerPolicy: ForceOpened
`
}

func (s *limitTest) bucket(t *testing.T) {
	start := time.Now()
	for range 2 {
		require.Equal(t, http.StatusOK, s.caller.get(t, s.secrets).code)
	}
	a := s.caller.get(t, s.secrets+"/big")
	a.refused(t, http.StatusTooManyRequests, s.ns+"/limits", "secrets")
	require.LessOrEqual(t, a.retryAfter(), 3600)
	require.GreaterOrEqual(t, float64(a.retryAfter()), (time.Hour - time.Since(start)).Seconds(), "an hour after the first request")
	require.EqualValues(t, a.retryAfter(), a.Details.RetryAfterSeconds)
	require.Equal(t, http.StatusOK, s.caller.get(t, "/api/v1/namespaces/"+s.ns+"/pods").code, "another rule applies")

	out := shell(t, s.pod, `curl $curl --output body --write-out '%{http_code} %header{retry-after}' $api`+s.secrets+` || true`)
	require.Regexp(t, `^429 3\d{3}$`, out)
	snapshot(t, s.b, s.pod.Name, "secrets", func(s meshv1alpha1.LimitingSnapshot) bool {
		return s.Passed == 2 && s.Refused >= 2 && s.State == meshv1alpha1.BreakerClosed
	})
}

func (s *limitTest) retryAfter(t *testing.T) {
	clientset, err := kubernetes.NewForConfig(from(t, s.pod))
	require.NoError(t, err)
	start := time.Now()
	for range 2 {
		_, err := clientset.CoreV1().Services(s.ns).List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
	}
	require.GreaterOrEqual(t, time.Since(start), time.Second)
}

func (s *limitTest) specificBeforeGeneral(t *testing.T) {
	require.Equal(t, http.StatusOK, s.caller.get(t, s.maps).code)
	s.caller.get(t, "/api/v1/configmaps").refused(t, http.StatusServiceUnavailable, s.ns+"/limits", "no-configmaps")
	s.caller.ask(t, http.MethodDelete, s.maps+"/none").refused(t, http.StatusServiceUnavailable, s.ns+"/limits", "no-configmaps")
}

func (s *limitTest) exemptLocks(t *testing.T) {
	leases := "/apis/coordination.k8s.io/v1/namespaces/" + s.ns + "/leases"
	require.Equal(t, http.StatusCreated, s.caller.ask(t, http.MethodPost, leases,
		`{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "lock"}}`).code)
	require.Equal(t, http.StatusOK, s.caller.ask(t, http.MethodPatch, leases+"/lock", `{"spec": {"holderIdentity": "me"}}`).code)
	s.caller.get(t, leases).refused(t, http.StatusServiceUnavailable, s.ns+"/limits", "leases") // a list is no request for a lock
	s.caller.ask(t, http.MethodPatch, leases+"/held", `{}`).refused(t, http.StatusServiceUnavailable, s.ns+"/limits", "a-lock")
}

func (s *limitTest) userAgents(t *testing.T) {
	require.Contains(t, shell(t, s.pod, "kubectl get --raw /api/v1/nodes 2>&1 || true"), "by-kubectl")
	shell(t, s.pod, "curl $curl --output body $api/api/v1/nodes")
}

func (s *limitTest) labels(t *testing.T) {
	s.caller.get(t, "/api/v1/namespaces/"+s.ns+"/podtemplates").refused(t, http.StatusServiceUnavailable, s.ns+"/limits", "of-its-labels")
	require.Equal(t, http.StatusOK, s.caller.get(t, "/api/v1/namespaces/"+s.ns+"/replicationcontrollers").code)
}

func (s *limitTest) subresources(t *testing.T) {
	of := "/api/v1/namespaces/" + s.ns + "/pods/" + s.pod.Name
	require.Equal(t, http.StatusOK, s.caller.get(t, of).code)
	require.Equal(t, http.StatusOK, s.caller.get(t, of+"/status").code)
	s.caller.get(t, of+"/log").refused(t, http.StatusServiceUnavailable, s.ns+"/limits", "no-logs")
	require.Contains(t, shell(t, s.pod, "kubectl logs "+s.pod.Name+" 2>&1 || true"), "no-logs")
	s.caller.get(t, "/apis/apps/v1/namespaces/"+s.ns+"/deployments/none/scale").refused(t, http.StatusServiceUnavailable, s.ns+"/limits", "no-scaling")
}

func (s *limitTest) nonResources(t *testing.T) {
	require.Equal(t, http.StatusOK, s.caller.get(t, "/version").code)
	s.caller.get(t, "/version/").refused(t, http.StatusTooManyRequests, s.ns+"/limits", "version")
	require.Equal(t, http.StatusOK, s.caller.get(t, "/readyz").code)
}

func (s *limitTest) inFlight(t *testing.T) {
	endpoints := "/api/v1/namespaces/" + s.ns + "/endpoints"
	until(t, "a refusal", func(context.Context) error {
		start := time.Now()
		answers := make(chan int, 2)
		for range 2 {
			go func() {
				a, err := s.caller.try(t.Context(), http.MethodGet, endpoints)
				assert.NoError(t, err)
				answers <- a.code
			}()
		}
		codes := []int{<-answers, <-answers}
		if slices.Equal(codes, []int{http.StatusOK, http.StatusOK}) {
			require.GreaterOrEqual(t, time.Since(start), 2*slowly, "both were in flight at the same time")
			return errors.New("the machine was too slow to have both in flight")
		}
		require.ElementsMatch(t, []int{http.StatusOK, http.StatusTooManyRequests}, codes)
		return nil
	})
	until(t, "none to be in flight", func(ctx context.Context) error {
		return s.caller.answers(ctx, endpoints+"/none", http.StatusNotFound)
	})
}

func (s *limitTest) backoff(t *testing.T) {
	quotas := "/api/v1/namespaces/" + s.ns + "/resourcequotas"
	require.Equal(t, http.StatusInternalServerError, s.caller.get(t, quotas).code)
	a := s.caller.get(t, quotas)
	a.refused(t, http.StatusTooManyRequests, s.ns+"/limits", "quotas")
	require.Positive(t, a.retryAfter())
	require.LessOrEqual(t, a.retryAfter(), 30)
	until(t, "the end of the backoff", func(ctx context.Context) error { return s.caller.answers(ctx, quotas, http.StatusOK) })
}

func (s *limitTest) kubectl(t *testing.T) {
	head, row := columns(t, s.pod, "circuitbreakers", "limits")
	require.Equal(t, []string{"NAME", "PODS", "IN FORCE", "OPENED", "REFUSED", "STATE", "AGE"}, head)
	require.Equal(t, []string{"limits", "1", "1", "1"}, row[:4], "a breaker that is forced open counts as opened")
	require.NotEqual(t, "0", row[4])
	require.Equal(t, "InForce", row[5])
	require.Contains(t, shell(t, s.pod, "kubectl wait --for=condition=Ready cbk/limits"), "condition met")
}

func (s *limitTest) invalid(t *testing.T) {
	for rule, why := range map[string]string{
		`rateLimitings: [{name: a, restRules: [{url: x.org}]}]`:                                                     "set a limit",
		`rateLimitings: [{name: a, maxInFlight: 1}]`:                                                                "list what is limited",
		`rateLimitings: [{name: a, restRules: [{url: x.org}], triggerPolicy: Often}]`:                               "Often",
		`rateLimitings: [{name: a, restRules: [{url: x.org}], bucket: {burst: 0, interval: 1s, limit: 1}}]`:         "burst",
		`rateLimitings: [{name: a, restRules: [{url: "ftp://x.org"}], maxInFlight: 1}]`:                             "http or https", // the webhook
		`trafficInterceptRules: [{name: a, interceptType: Blacklist, contentType: Regexp, contents: ["(?=x)"]}]`:    "contents",
		`trafficInterceptRules: [{name: a, interceptType: Greylist, contentType: Regexp, contents: ["a"]}]`:         "Greylist",
		`trafficInterceptRules: [{name: a, interceptType: Blacklist, contentType: Normal, contents: ["http://a"]}]`: "without a scheme",
	} {
		out := shell(t, s.pod, `kubectl create -f - 2>&1 <<'END' || true
{apiVersion: ctrlmesh.kusionstack.io/v1alpha1, kind: CircuitBreaker, metadata: {name: wrong}, spec: {selector: {}, `+rule+`}}
END`)
		require.Contains(t, out, why, rule)
	}
}

func (s *limitTest) disabled(t *testing.T) {
	s.b.Spec.Disabled = true
	write(t, s.b)
	notInForce(t, s.b, "Disabled")
	require.Equal(t, http.StatusOK, s.caller.get(t, "/api/v1/configmaps?limit=1").code)
	require.Equal(t, http.StatusOK, s.caller.get(t, s.secrets).code)
}

// The pods of a workload together never pass more requests than the rule allows, by the
// apiserver's audit log, also while the workload is scaled.
func TestWorkloadLimit(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "traffic")
	probeRights(t, ns)
	pods := clientSet(t, ns, "set", 3, map[string]string{"app": "set"})
	b := breaker(t, ns, "together", `
rateLimitings:
- name: secrets
  resourceRules: [{apiGroups: [""], resources: [secrets], verbs: [get], namespaces: ["*"]}]
  bucket: {burst: 6, interval: 1s, limit: 3}
  scope: Workload
  triggerPolicy: LimiterOnly
- name: services # fewer than there are pods: they take turns
  resourceRules: [{apiGroups: [""], resources: [services], verbs: [get], namespaces: ["*"]}]
  bucket: {burst: 1, interval: 2s, limit: 2}
  scope: Workload
  triggerPolicy: LimiterOnly
`, len(pods))
	w := &workloadTest{ns: ns, pods: pods, b: b}
	var names []string
	for _, pod := range pods {
		w.requireShare(t, pod, len(pods))
		names = append(names, ns+"/"+pod.Name)
	}
	w.log = cluster.RequestLog(mark(t), audit.Callers{Pods: names})
	ctx, cancel := context.WithCancel(t.Context())
	stop := func() { cancel(); w.asking.Wait() }
	defer stop()
	for _, pod := range pods {
		w.ask(ctx, t, pod)
	}
	// Nor much less, when all pods ask all the time: the burst and a quarter of the rate.
	until(t, "requests", func(context.Context) error {
		const within = 12
		all := w.requests(t)
		secrets, services := most(passages(t, all, "secrets"), within*time.Second), most(passages(t, all, "services"), within*time.Second)
		return orElse(secrets >= 6+within*3/4 && services >= 1+within/4, fmt.Sprintf("%d and %d passed in %d s", secrets, services, within))
	})

	w.scale(t, 1) // the one left has all of it
	w.scale(t, 2)
	w.ask(ctx, t, pods[1])
	alone := len(passages(t, w.requests(t), "secrets"))
	until(t, "requests of both", func(context.Context) error {
		return orElse(len(passages(t, w.requests(t), "secrets")) > alone+6, "more are asked")
	})
	stop()
	neverMore(t, passages(t, w.requests(t), "secrets"), 6, 3)
	neverMore(t, passages(t, w.requests(t), "services"), 1, 1)
}

// workloadTest has the pods of one workload send requests all the time.
type workloadTest struct {
	ns     string
	pods   []*corev1.Pod
	b      *meshv1alpha1.CircuitBreaker
	log    *kube.RequestLog
	asking sync.WaitGroup
}

// ask has a pod send requests until ctx ends or the pod is deleted: per second 20 for each
// resource, of which the rules allow 3 at most.
func (w *workloadTest) ask(ctx context.Context, t *testing.T, pod *corev1.Pod) {
	t.Helper()
	caller := hastyClient(t, pod)
	for _, resource := range []string{"secrets", "services"} {
		w.asking.Go(func() {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			kube.Every(ctx, 50*time.Millisecond, func(ctx context.Context, _ int) {
				if _, err := caller.try(ctx, http.MethodGet, dated("/api/v1/namespaces/"+w.ns+"/"+resource+"/none")); err != nil && deleted(ctx, pod) {
					cancel()
				}
			})
		})
	}
}

// deleted reports whether a pod is deleted. Another pod may have its name.
func deleted(ctx context.Context, pod *corev1.Pod) bool {
	now := &corev1.Pod{}
	err := cluster.Get(ctx, client.ObjectKeyFromObject(pod), now)
	return apierrors.IsNotFound(err) || err == nil && now.UID != pod.UID
}

// requests returns what the apiserver's audit log has of the pods.
func (w *workloadTest) requests(t *testing.T) []audit.Request {
	t.Helper()
	requests, err := w.log.Requests()
	require.NoError(t, err)
	return requests
}

// scale scales the workload to n pods, and waits until they share the limits.
func (w *workloadTest) scale(t *testing.T, n int) {
	t.Helper()
	scaled(t, w.ns, "set", int32(n))
	for i := range n {
		w.pods[i] = ready(t, w.ns, w.pods[i].Name)
		w.requireShare(t, w.pods[i], n)
	}
}

// requireShare waits until the status says that a pod has its share of n.
func (w *workloadTest) requireShare(t *testing.T, pod *corev1.Pod, n int) {
	t.Helper()
	for _, rule := range []string{"secrets", "services"} {
		snapshot(t, w.b, pod.Name, rule, func(s meshv1alpha1.LimitingSnapshot) bool { return strings.HasSuffix(s.Share, fmt.Sprint("/", n)) })
	}
}

// columns returns the table that kubectl in a pod prints of an object.
func columns(t *testing.T, pod *corev1.Pod, kind, name string) (head, row []string) {
	t.Helper()
	lines := strings.Split(shell(t, pod, "kubectl get "+kind+" "+name), "\n")
	require.Len(t, lines, 2)
	apart := regexp.MustCompile(`\s{2,}`)
	return apart.Split(strings.TrimSpace(lines[0]), -1), apart.Split(strings.TrimSpace(lines[1]), -1)
}

func scaled(t *testing.T, ns, name string, replicas int32) {
	t.Helper()
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	require.NoError(t, cluster.SubResource("scale").Update(t.Context(), set,
		client.WithSubResourceBody(&autoscalingv1.Scale{ObjectMeta: set.ObjectMeta, Spec: autoscalingv1.ScaleSpec{Replicas: replicas}})))
}

// dated adds to a path, and so to the audit log, when the request is sent.
func dated(path string) string { return fmt.Sprintf("%s?sent=%d", path, time.Now().UnixNano()) }

// passage is a request that an agent let pass at some time between these two.
type passage struct{ sent, received time.Time }

// passages returns the requests for a resource that the apiserver received, in the order in
// which it did. Their paths must be dated. Lists do not count.
func passages(t *testing.T, requests []audit.Request, resource string) (out []passage) {
	t.Helper()
	for _, r := range requests {
		if r.Resource != resource || r.Verb == "list" {
			continue
		}
		_, text, _ := strings.Cut(r.URI, "?sent=")
		sent, err := strconv.ParseInt(text, 10, 64)
		require.NoError(t, err, r.URI)
		out = append(out, passage{time.Unix(0, sent), r.Received})
	}
	slices.SortFunc(out, func(a, b passage) int { return a.received.Compare(b.received) })
	return out
}

// most returns the largest number of requests that the apiserver received within any interval
// of the given length.
func most(passed []passage, within time.Duration) (n int) {
	first := 0
	for i, p := range passed {
		for p.received.Sub(passed[first].received) > within {
			first++
		}
		n = max(n, i-first+1)
	}
	return n
}

// neverMore requires that at most burst + rate*time requests passed in any interval. Those
// that were sent and received within an interval passed in it, however slow the machine is.
func neverMore(t *testing.T, passed []passage, burst, perSecond float64) {
	t.Helper()
	for _, first := range passed {
		n := 0.0
		for _, p := range passed {
			if p.sent.Before(first.sent) {
				continue
			}
			n++
			took := p.received.Sub(first.sent).Seconds()
			require.LessOrEqual(t, n, burst+perSecond*took, "within %.3f s", took)
		}
	}
}
