package e2e

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// How long the breakers of TestBreakers stay open: longer than a request takes on a busy machine.
const bucketSleeps, tripSleeps = 20 * time.Second, 15 * time.Second

// breakerTest has the subtests of TestBreakers: one pod under one CircuitBreaker.
type breakerTest struct {
	pod    *corev1.Pod
	ns     string
	caller hasty
	in     string
	b      *meshv1alpha1.CircuitBreaker
}

// A breaker opens, reports it, and recovers: by itself, or when a user requests it.
func TestBreakers(t *testing.T) {
	t.Parallel()
	pod := clientPod(t)
	ns, caller := pod.Namespace, hastyClient(t, pod)
	in := "/api/v1/namespaces/" + ns
	b := breaker(t, ns, "breakers", `
rateLimitings:
- name: bucket
  resourceRules: [{apiGroups: [""], resources: [secrets], verbs: ["*"], namespaces: ["*"]}]
  bucket: {burst: 2, interval: 4s, limit: 2}
  recoverPolicy: {type: SleepingWindow, sleepingWindowSize: `+bucketSleeps.String()+`}
- name: sleeps
  resourceRules: [{apiGroups: [""], resources: [services], verbs: ["*"], namespaces: ["*"]}]
  trip: {window: 5m, minRequests: 3, errorPercent: "60"}
  recoverPolicy: {type: SleepingWindow, sleepingWindowSize: `+tripSleeps.String()+`}
- name: by-hand
  resourceRules: [{apiGroups: [""], resources: [configmaps], verbs: ["*"], namespaces: ["*"]}]
  trip: {window: 5m, minRequests: 3, errorPercent: "60"}
  recoverPolicy: {type: Manual}
- name: slow
  resourceRules: [{apiGroups: [""], resources: [endpoints], verbs: ["*"], namespaces: ["*"]}]
  trip: {window: 5m, minRequests: 2, slowPercent: "50", slowCall: 300ms}
  recoverPolicy: {type: Manual}
- name: conflicts # are no errors
  resourceRules: [{apiGroups: [""], resources: [limitranges], verbs: ["*"], namespaces: ["*"]}]
  trip: {window: 5m, minRequests: 2, errorPercent: "1"}
  recoverPolicy: {type: Manual}
- name: watches # are long
  resourceRules: [{apiGroups: [""], resources: [podtemplates], verbs: ["*"], namespaces: ["*"]}]
  trip: {window: 5m, minRequests: 1, slowPercent: "1", slowCall: 900ms}
  recoverPolicy: {type: Manual}
`, 1)
	faults(t, ns, "failing", `
httpFault:
- name: services
  match: {resources: [{resources: [services]}]}
  abort: {httpStatus: 500, percent: "100"}
  count: 4
- name: configmaps
  match: {resources: [{resources: [configmaps]}]}
  abort: {httpStatus: 500, percent: "100"}
  count: 3
- name: endpoints
  match: {resources: [{resources: [endpoints]}]}
  delay: {fixedDelay: 400ms, percent: "100"}
- name: limitranges
  match: {resources: [{resources: [limitranges], verbs: [list]}]}
  abort: {httpStatus: 409, percent: "100"}
- name: gone
  match: {resources: [{resources: [limitranges], names: [gone]}]}
  abort: {httpStatus: 410, percent: "100"}
`, 1)
	s := &breakerTest{pod: pod, ns: ns, caller: caller, in: in, b: b}
	t.Run("an empty bucket opens it", s.emptyBucket)
	t.Run("half open", s.halfOpen)
	t.Run("by hand", s.byHand)
	t.Run("slow calls", s.slowCalls)
	t.Run("calls that are no errors", s.noErrors)
}

// opened reports whether a breaker is open and says since when.
func opened(s meshv1alpha1.LimitingSnapshot) bool {
	return s.State == meshv1alpha1.BreakerOpened && s.LastTransitionTime != nil
}

// closed reports whether a breaker is closed.
func closed(s meshv1alpha1.LimitingSnapshot) bool { return s.State == meshv1alpha1.BreakerClosed }

func (s *breakerTest) emptyBucket(t *testing.T) {
	for range 2 {
		require.Equal(t, http.StatusOK, s.caller.get(t, s.in+"/secrets").code)
	}
	var start time.Time // of the request that opens it
	var a answered
	for begun := time.Now(); ; require.Less(t, time.Since(begun), patience) { // tokens are added meanwhile
		start = time.Now()
		if a = s.caller.get(t, s.in+"/secrets"); a.code != http.StatusOK {
			break
		}
	}
	a.refused(t, http.StatusTooManyRequests, s.ns+"/breakers", "bucket")
	a = s.caller.get(t, s.in+"/secrets")
	a.refused(t, http.StatusServiceUnavailable, s.ns+"/breakers", "bucket")
	require.GreaterOrEqual(t, float64(a.retryAfter()), (bucketSleeps - time.Since(start)).Seconds(), "longer than a token takes")
	require.LessOrEqual(t, float64(a.retryAfter()), bucketSleeps.Seconds())
	s.caller.recovers(t, s.in+"/secrets", "bucket")
	require.GreaterOrEqual(t, time.Since(start), bucketSleeps, "tokens alone do not close it")
}

func (s *breakerTest) halfOpen(t *testing.T) {
	for range 3 {
		require.Equal(t, http.StatusInternalServerError, s.caller.get(t, s.in+"/services").code)
	}
	s.caller.get(t, s.in+"/services").refused(t, http.StatusServiceUnavailable, s.ns+"/breakers", "sleeps")
	snapshot(t, s.b, s.pod.Name, "sleeps", opened)
	var start time.Time
	until(t, "a probe that fails", func(ctx context.Context) error {
		start = time.Now()
		return s.caller.answers(ctx, s.in+"/services", http.StatusInternalServerError)
	})
	s.caller.get(t, s.in+"/services").refused(t, http.StatusServiceUnavailable, s.ns+"/breakers", "sleeps")
	s.caller.recovers(t, s.in+"/services", "sleeps")
	require.GreaterOrEqual(t, time.Since(start), tripSleeps)
	require.Equal(t, http.StatusOK, s.caller.get(t, s.in+"/services").code)
	snapshot(t, s.b, s.pod.Name, "sleeps", closed)
}

func (s *breakerTest) byHand(t *testing.T) {
	for range 3 {
		require.Equal(t, http.StatusInternalServerError, s.caller.get(t, s.in+"/configmaps").code)
	}
	a := s.caller.get(t, s.in+"/configmaps")
	a.refused(t, http.StatusServiceUnavailable, s.ns+"/breakers", "by-hand")
	require.Contains(t, a.Message, meshv1alpha1.RecoverAnnotation)
	require.Empty(t, a.header.Get("Retry-After"))
	snapshot(t, s.b, s.pod.Name, "by-hand", opened)

	s.b.Spec.RateLimitings[0].Bucket.Burst = 50 // of another rule
	write(t, s.b)
	inForce(t, s.b, 1)
	s.caller.get(t, s.in+"/configmaps").refused(t, http.StatusServiceUnavailable, s.ns+"/breakers", "by-hand")

	patch(t, s.b, fmt.Sprintf(`{"metadata": {"annotations": {%q: "now"}}}`, meshv1alpha1.RecoverAnnotation))
	until(t, "the breaker to close", func(ctx context.Context) error { return s.caller.answers(ctx, s.in+"/configmaps", http.StatusOK) })
	snapshot(t, s.b, s.pod.Name, "by-hand", closed)
}

func (s *breakerTest) slowCalls(t *testing.T) {
	for range 2 {
		require.Equal(t, http.StatusOK, s.caller.get(t, s.in+"/endpoints").code)
	}
	s.caller.get(t, s.in+"/endpoints").refused(t, http.StatusServiceUnavailable, s.ns+"/breakers", "slow")
}

func (s *breakerTest) noErrors(t *testing.T) {
	for range 2 {
		require.Equal(t, http.StatusConflict, s.caller.get(t, s.in+"/limitranges").code)
		require.Equal(t, http.StatusNotFound, s.caller.get(t, s.in+"/limitranges/none").code)
		require.Equal(t, http.StatusGone, s.caller.get(t, s.in+"/limitranges/gone").code)
		a := s.caller.get(t, s.in+"/podtemplates?watch=true&timeoutSeconds=1")
		require.Equal(t, http.StatusOK, a.code)
		require.GreaterOrEqual(t, a.took, time.Second)
	}
	require.Equal(t, http.StatusOK, s.caller.get(t, s.in+"/podtemplates").code)
}

// TestTrafficUpgrade: counters and states of rules outlive the agent, and requests in flight
// complete.
func TestTrafficUpgrade(t *testing.T) {
	ns := namespace(t, "traffic")
	probeRights(t, ns)
	h := newHosts(t, ns)
	pod := h.known(clientPodOf(ns, "client"))
	create(t, pod)
	pod = ready(t, ns, pod.Name)
	h.serve(t, pod)
	caller := hastyClient(t, pod)
	b := breaker(t, ns, "kept", `
rateLimitings:
- name: bucket
  resourceRules: [{apiGroups: [""], resources: [secrets], verbs: ["*"], namespaces: ["*"]}]
  bucket: {burst: 2, interval: 1h, limit: 1}
  triggerPolicy: LimiterOnly
- name: opened
  resourceRules: [{apiGroups: [""], resources: [services], verbs: ["*"], namespaces: ["*"]}]
  bucket: {burst: 1, interval: 1h, limit: 1}
  recoverPolicy: {type: Manual}
trafficInterceptRules:
- name: one-host
  interceptType: Whitelist
  contentType: Normal
  contents: [api.example.com]
`, 1)
	f := faults(t, ns, "counted", `
httpFault:
- name: twice
  match: {resources: [{resources: [configmaps]}]}
  abort: {httpStatus: 409, percent: "100"}
  count: 2
`, 1)
	useUpRules(t, caller, ns)
	requireUsedUp(t, caller, ns)
	snapshot(t, b, pod.Name, "opened", func(s meshv1alpha1.LimitingSnapshot) bool { return s.State == meshv1alpha1.BreakerOpened })

	i, missed := watchMissing(t, pod)
	uploaded := uploads(t, pod)
	before := agentOn(t, pod.Spec.NodeName)
	restartAgents(t)
	for range 2 {
		require.Contains(t, <-uploaded, fmt.Sprintf(`"bytes":%d`, 32<<20))
	}
	passes(t, pod, "https://api.example.com/")
	shut(t, pod, "https://evil.example.com/")
	i.holds(t, missed)
	i.truth(t)
	require.NotEqual(t, before.Name, agentOn(t, pod.Spec.NodeName).Name)
	requireUsedUp(t, hastyClient(t, pod), ns)
	inForce(t, b, 1)
	snapshot(t, b, pod.Name, "opened", func(s meshv1alpha1.LimitingSnapshot) bool {
		return s.State == meshv1alpha1.BreakerOpened && s.Passed == 1 && s.Refused >= 2
	})
	injected(t, f, pod.Name, "twice", 2)
}

// useUpRules uses up the rules of TestTrafficUpgrade: the bucket, the breaker and the fault.
func useUpRules(t *testing.T, caller hasty, ns string) {
	t.Helper()
	in := "/api/v1/namespaces/" + ns
	for range 2 {
		require.Equal(t, http.StatusOK, caller.get(t, in+"/secrets").code)
	}
	require.Equal(t, http.StatusOK, caller.get(t, in+"/services").code)
	require.Equal(t, http.StatusTooManyRequests, caller.get(t, in+"/services").code, "it opens")
	for range 2 {
		require.Equal(t, http.StatusConflict, caller.get(t, in+"/configmaps").code)
	}
}

// requireUsedUp requires that the rules of TestTrafficUpgrade are used up.
func requireUsedUp(t *testing.T, caller hasty, ns string) {
	t.Helper()
	in := "/api/v1/namespaces/" + ns
	caller.get(t, in+"/secrets").refused(t, http.StatusTooManyRequests, ns+"/kept", "bucket")
	caller.get(t, in+"/services").refused(t, http.StatusServiceUnavailable, ns+"/kept", "opened")
	require.Equal(t, http.StatusOK, caller.get(t, in+"/configmaps").code)
}

// watchMissing starts a watch in the pod and creates an object whose event a fault drops.
// The watch receives it when its agent exits.
func watchMissing(t *testing.T, pod *corev1.Pod) (*watcher, *corev1.ConfigMap) {
	t.Helper()
	ns := pod.Namespace
	faults(t, ns, "forgetful", `
httpFault:
- name: forgets
  match: {resources: [{resources: [configmaps], verbs: [watch]}]}
  watch: {drop: {percent: "100", madeUpAfter: 1h}}
`, 1)
	i := newWatcher(t, pod)
	missed := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "missed"}}
	create(t, missed)
	counted(t, pod.Spec.NodeName, "ctrlmesh_faults_injected_total", map[string]string{"namespace": ns, "faultinjection": "forgetful"}, 1)
	require.NotContains(t, i.store.ListKeys(), ns+"/missed")
	return i, missed
}

// uploads starts two uploads of eight seconds and returns their output when they end.
func uploads(t *testing.T, pod *corev1.Pod) <-chan string {
	t.Helper()
	uploaded := make(chan string, 2)
	for _, scheme := range []string{"http", "https"} {
		go func() {
			stdout, stderr, err := cluster.Exec(t.Context(), pod.Namespace, pod.Name, pod.Spec.Containers[0].Name, "sh", "-c",
				"dd if=/dev/zero bs=1M count=32 2>/dev/null | curl -sSk --limit-rate 4M -m 180 -T - "+scheme+"://api.example.com/")
			uploaded <- fmt.Sprint(stdout, stderr, err)
		}()
	}
	return uploaded
}

// restartAgents replaces all agents, as an upgrade does.
func restartAgents(t *testing.T) {
	t.Helper()
	_, err := cluster.Kubectl(t.Context(), "-n", kube.SystemNamespace, "rollout", "restart", "daemonset/"+kube.AgentName)
	require.NoError(t, err)
	require.NoError(t, kube.UntilWithin(t.Context(), rollout, "the agents' rollout", agentsCurrent))
}

// answers returns an error unless the answer has the given code.
func (p hasty) answers(ctx context.Context, path string, code int) error {
	a, err := p.try(ctx, http.MethodGet, path)
	if err == nil && a.code != code {
		err = fmt.Errorf("it is answered %d: %s", a.code, a.Message)
	}
	return err
}

// recovers waits until a breaker is closed.
func (p hasty) recovers(t *testing.T, path, rule string) {
	t.Helper()
	until(t, rule+" to recover", func(ctx context.Context) error { return p.answers(ctx, path, http.StatusOK) })
}

// patch changes an object by a merge patch.
func patch(t *testing.T, obj client.Object, text string) {
	t.Helper()
	require.NoError(t, cluster.Patch(t.Context(), obj, client.RawPatch("application/merge-patch+json", []byte(text))))
}
