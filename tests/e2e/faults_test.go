package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// faultTest has the subtests of TestFaults: one pod under one FaultInjection.
type faultTest struct {
	pod       *corev1.Pod
	ns        string
	caller    hasty
	clientset *kubernetes.Clientset
	maps      typedcorev1.ConfigMapInterface
	in        string
	since     kube.Mark
	f         *meshv1alpha1.FaultInjection
}

// Each fault in requests and answers, as clients observe it.
func TestFaults(t *testing.T) {
	t.Parallel()
	pod := clientPod(t)
	ns, caller := pod.Namespace, hastyClient(t, pod)
	clientset, err := kubernetes.NewForConfig(from(t, pod))
	require.NoError(t, err)
	maps, in := clientset.CoreV1().ConfigMaps(ns), "/api/v1/namespaces/"+ns
	create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "here"}, Data: map[string]string{"text": strings.Repeat("a", 3000)}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "cut"}})
	since := mark(t)
	f := faults(t, ns, "faults", everyFault(t, ns, since.At), 1)

	s := &faultTest{pod: pod, ns: ns, caller: caller, clientset: clientset, maps: maps, in: in, since: since, f: f}
	t.Run("abort", s.abort)
	t.Run("header", s.header)
	t.Run("subresource and namespace", s.subresourceAndNamespace)
	t.Run("effective time", s.effectiveTime)
	t.Run("Node's fetch", s.nodeFetch)
	t.Run("delay", s.delay)
	t.Run("reset", s.reset)
	t.Run("reset after the answer", s.resetAfterAnswer)
	t.Run("truncate", s.truncate)
	t.Run("slow body", s.slowBody)
	t.Run("stale list", s.staleList)
	t.Run("percent", s.percent)
	t.Run("kubectl", s.kubectl)
	t.Run("marked in the access line", s.accessLine)
	t.Run("removed", s.removed)
}

// everyFault returns a specification with a rule for every kind of fault and of match.
func everyFault(t *testing.T, ns string, start time.Time) string {
	t.Helper()
	tokyo, err := time.LoadLocation("Asia/Tokyo")
	require.NoError(t, err)
	clock := func(zone *time.Location, off time.Duration) string {
		return start.In(zone).Add(off).Format(time.TimeOnly)
	}
	return `
httpFault:
- name: conflict
  match: {resources: [{resources: [configmaps], verbs: [update, patch], names: [here]}]}
  abort: {httpStatus: 409, percent: "100"}
  count: 3
- name: teapot
  match: {resources: [{apiGroups: [""], resources: [nodes], verbs: [get], headers: [{name: X-Inject, value: "yes"}]}]}
  abort: {httpStatus: 429, percent: "100", reason: TooManyRequests}
- name: delay
  match: {resources: [{resources: [secrets]}]}
  delay: {fixedDelay: 1s, percent: "100"}
- name: reset
  match: {resources: [{resources: [limitranges]}]}
  reset: {percent: "100"}
- name: reset-after
  match: {resources: [{resources: [configmaps], verbs: [create]}]}
  reset: {percent: "100", afterAnswer: true}
  count: 2
- name: truncate
  match: {resources: [{resources: [configmaps], verbs: [get], names: [cut]}]}
  truncate: {percent: "100", afterBytes: 100}
  count: 2
- name: slow
  match: {resources: [{resources: [configmaps], verbs: [list]}]}
  slowBody: {percent: "100", bytesPerSecond: 2000}
- name: stale
  match: {resources: [{resources: [services]}]}
  staleList: {percent: "100", age: 1h}
- name: half
  match: {resources: [{resources: [endpoints]}]}
  abort: {httpStatus: 500, percent: "50"}
  seed: 7
- name: never
  match: {resources: [{resources: [pods]}]}
  abort: {httpStatus: 500, percent: "0"}
- name: not-now
  match: {resources: [{resources: [pods]}]}
  abort: {httpStatus: 500, percent: "100"}
  effectiveTime: {months: [` + fmt.Sprint(int(time.Now().UTC().AddDate(0, 0, -40).Month())) + `], timeZone: Europe/Berlin}
- name: at-noon # the same hours are others elsewhere
  match: {resources: [{resources: [podtemplates]}]}
  abort: {httpStatus: 500, percent: "100"}
  effectiveTime: {startTime: "` + clock(tokyo, -time.Hour) + `", endTime: "` + clock(tokyo, time.Hour) + `", timeZone: America/New_York}
- name: in-tokyo
  match: {resources: [{resources: [replicationcontrollers]}]}
  abort: {httpStatus: 500, percent: "100"}
  effectiveTime: {startTime: "` + clock(tokyo, -time.Hour) + `", endTime: "` + clock(tokyo, time.Hour) + `", timeZone: Asia/Tokyo}
- name: over-midnight # it is always midnight within that
  match: {resources: [{resources: [resourcequotas]}]}
  abort: {httpStatus: 500, percent: "100"}
  effectiveTime: {startTime: "` + clock(time.UTC, -time.Hour) + `", endTime: "` + clock(time.UTC, -2*time.Hour) + `"}
- name: status
  match: {resources: [{resources: ["*/status"], namespaces: [` + ns + `]}]}
  abort: {httpStatus: 500, percent: "100"}
`
}

func (s *faultTest) abort(t *testing.T) {
	cm, err := s.clientset.CoreV1().ConfigMaps(s.ns).Patch(t.Context(), "here", "application/merge-patch+json", []byte(`{"data": {"k": "1"}}`), metav1.PatchOptions{})
	require.True(t, apierrors.IsConflict(err), "%v, %v", cm, err)
	require.ErrorContains(t, err, "FaultInjection "+s.ns+"/faults/conflict")
	cm = &corev1.ConfigMap{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: s.ns, Name: "here"}, cm))
	_, err = s.maps.Update(t.Context(), cm, metav1.UpdateOptions{})
	require.True(t, apierrors.IsConflict(err), "%v", err)
	require.Contains(t, shell(t, s.pod, `kubectl label configmap here a=b 2>&1 || true`), "Error from server (Conflict)")
	_, err = s.maps.Update(t.Context(), cm, metav1.UpdateOptions{})
	require.NoError(t, err, "the count is 3")
	injected(t, s.f, s.pod.Name, "conflict", 3)

	requests, err := cluster.PodRequests(s.since, s.ns+"/"+s.pod.Name)
	require.NoError(t, err)
	require.Equal(t, 1, writesOf(requests, "configmaps"), "aborted requests do not reach the apiserver")
}

func (s *faultTest) header(t *testing.T) {
	node := "/api/v1/nodes/" + nodes(t)[0]
	require.Equal(t, "429", shell(t, s.pod, "curl $curl -o body -w '%{http_code}' -H 'X-Inject: yes' $api"+node+" || true"))
	require.Equal(t, "200", shell(t, s.pod, "curl $curl -o body -w '%{http_code}' -H 'X-Inject: no' $api"+node))
}

func (s *faultTest) subresourceAndNamespace(t *testing.T) {
	of := s.in + "/pods/" + s.pod.Name
	require.Equal(t, http.StatusOK, s.caller.get(t, of).code)
	require.Equal(t, http.StatusInternalServerError, s.caller.get(t, of+"/status").code)
	require.Equal(t, http.StatusNotFound, s.caller.get(t, "/api/v1/namespaces/default/pods/none/status").code)
}

func (s *faultTest) effectiveTime(t *testing.T) {
	require.Equal(t, http.StatusOK, s.caller.get(t, s.in+"/podtemplates").code)
	require.Equal(t, http.StatusInternalServerError, s.caller.get(t, s.in+"/replicationcontrollers").code)
	require.Equal(t, http.StatusInternalServerError, s.caller.get(t, s.in+"/resourcequotas").code)
}

func (s *faultTest) nodeFetch(t *testing.T) {
	out := shell(t, s.pod, `NODE_EXTRA_CA_CERTS=$sa/ca.crt node -e 'const [url, authorization] = process.argv.slice(1)
fetch(url, {headers: {authorization: authorization.split(": ")[1]}}).then(async r => console.log(r.status, (await r.json()).message))' $api`+s.in+`/resourcequotas "$auth"`)
	require.Contains(t, out, "500 ctrlmesh: injected by FaultInjection "+s.ns+"/faults/over-midnight")
}

func (s *faultTest) delay(t *testing.T) {
	a := s.caller.get(t, s.in+"/secrets")
	require.Equal(t, http.StatusOK, a.code)
	require.GreaterOrEqual(t, a.took, time.Second)
}

func (s *faultTest) reset(t *testing.T) {
	for flag, exits := range map[string][]string{"--http1.1": {"35", "52", "56"}, "--http2": {"92"}} {
		require.Contains(t, exits, shell(t, s.pod, "curl $curl "+flag+" $api"+s.in+"/limitranges 2>/dev/null || echo $?"), flag)
	}
	_, err := s.caller.try(t.Context(), http.MethodGet, s.in+"/limitranges")
	require.Error(t, err)
}

func (s *faultTest) resetAfterAnswer(t *testing.T) {
	for _, flag := range []string{"--http1.1", "--http2"} {
		name := "made" + strings.Trim(strings.ReplaceAll(flag, ".", ""), "-")
		body := fmt.Sprintf(`{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": %q}}`, name)
		require.NotEmpty(t, shell(t, s.pod, "curl $curl "+flag+" -H 'Content-Type: application/json' -d '"+body+"' $api"+s.in+"/configmaps >/dev/null 2>&1 || echo $?"))
		require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: s.ns, Name: name}, &corev1.ConfigMap{}), "it took effect")
	}
}

func (s *faultTest) truncate(t *testing.T) {
	for _, flag := range []string{"--http1.1", "--http2"} {
		out := shell(t, s.pod, "curl $curl "+flag+" -o body $api"+s.in+"/configmaps/cut 2>/dev/null || echo $? $(wc -c <body)")
		require.Contains(t, []string{"18 100", "92 100", "56 100"}, out, flag)
	}
	require.Equal(t, http.StatusOK, s.caller.get(t, s.in+"/configmaps/cut").code)
}

func (s *faultTest) slowBody(t *testing.T) {
	a := s.caller.get(t, s.in+"/configmaps?fieldSelector=metadata.name%3Dhere")
	require.Equal(t, http.StatusOK, a.code)
	require.Greater(t, len(a.body), 3000)
	require.GreaterOrEqual(t, a.took.Seconds(), float64(len(a.body)-200)/2000, "all but the bytes of the first tenth of a second")
}

func (s *faultTest) staleList(t *testing.T) {
	_, err := s.clientset.CoreV1().Services(s.ns).List(t.Context(), metav1.ListOptions{}) // a stale list is at least this old
	require.NoError(t, err)
	create(t, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "new"}, Spec: corev1.ServiceSpec{
		Ports: []corev1.ServicePort{{Port: 80}}}})
	list, err := s.clientset.CoreV1().Services(s.ns).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Empty(t, list.Items)
	_, err = s.clientset.CoreV1().Services(s.ns).Get(t.Context(), "new", metav1.GetOptions{})
	require.NoError(t, err, "a get is no list")
}

func (s *faultTest) percent(t *testing.T) {
	var hit []int
	for i := range 40 {
		if s.caller.get(t, s.in+"/endpoints").code == http.StatusInternalServerError {
			hit = append(hit, i)
		}
	}
	require.InDelta(t, 20, len(hit), 10)
	other := clientPodOf(s.ns, "other")
	create(t, other)
	other = ready(t, s.ns, other.Name)
	inForce(t, s.f, 2)
	again := hastyClient(t, other)
	for i := range 40 {
		require.Equal(t, slices.Contains(hit, i), again.get(t, s.in+"/endpoints").code == http.StatusInternalServerError, "the same seed, the same faults")
	}
	require.Equal(t, http.StatusOK, s.caller.get(t, s.in+"/pods").code, "never, and not now")
}

func (s *faultTest) kubectl(t *testing.T) {
	until(t, "the columns", func(context.Context) error { // the columns are seconds old
		head, row := columns(t, s.pod, "faultinjections", "faults")
		require.Equal(t, []string{"NAME", "PODS", "IN FORCE", "INJECTED", "EXPIRES", "STATE", "AGE"}, head)
		return orElse(slices.Equal(row[:3], []string{"faults", "2", "2"}) && row[3] != "0" && slices.Contains(row, "InForce"), fmt.Sprint(row))
	})
	for rule, why := range map[string]string{
		`{name: a}`: "set a fault",
		`{name: a, abort: {httpStatus: 99, percent: "1"}}`:                                                        "httpStatus",
		`{name: a, delay: {fixedDelay: 1s, percent: "101"}}`:                                                      "percent",
		`{name: a, delay: {fixedDelay: 1s, percent: "1"}, effectiveTime: {startTime: "10:00:00"}}`:                "go together",
		`{name: a, delay: {fixedDelay: 1s, percent: "1"}, effectiveTime: {timeZone: Mars/Base}}`:                  "Mars/Base", // the webhook
		`{name: a, delay: {fixedDelay: 1s, percent: "1"}, match: {httpMatch: [{path: {regex: "("}}]}}`:            "regex",
		`{name: a, delay: {fixedDelay: 1s, percent: "1"}, match: {httpMatch: [{path: {exact: /a, prefix: /a}}]}}`: "path",
	} {
		out := shell(t, s.pod, `kubectl create -f - 2>&1 <<'END' || true
{apiVersion: ctrlmesh.kusionstack.io/v1alpha1, kind: FaultInjection, metadata: {name: wrong}, spec: {selector: {}, httpFault: [`+rule+`]}}
END`)
		require.Contains(t, out, why, rule)
	}
}

func (s *faultTest) accessLine(t *testing.T) {
	until(t, "the access line", func(context.Context) error {
		return faultLine(s.ns, s.pod.Name, "faults/delay")
	})
	for _, rule := range []string{"conflict", "delay", "reset", "reset-after", "truncate", "slow", "stale", "half"} {
		counted(t, s.pod.Spec.NodeName, "ctrlmesh_faults_injected_total", map[string]string{"namespace": s.ns, "faultinjection": "faults", "rule": rule}, 1)
	}
}

func (s *faultTest) removed(t *testing.T) {
	remove(t, s.f)
	until(t, "the faults' end", func(ctx context.Context) error { return s.caller.answers(ctx, s.in+"/limitranges", http.StatusOK) })
	list, err := s.clientset.CoreV1().Services(s.ns).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Len(t, list.Items, 1)
	until(t, "an answer without delay", func(context.Context) error {
		return orElse(s.caller.get(t, s.in+"/secrets").took < time.Second, "it is delayed")
	})
}

func writesOf(requests []audit.Request, resource string) (n int) {
	for _, r := range requests {
		if r.Resource == resource && r.Writes() {
			n++
		}
	}
	return n
}

// faultLine returns an error unless an access line of a pod names a fault.
func faultLine(ns, pod, rule string) error {
	found := false
	err := cluster.MeshLogs(kube.AgentName, func(_ string, log io.Reader) error {
		text, err := io.ReadAll(log)
		for line := range strings.SplitSeq(string(text), "\n") {
			found = found || strings.Contains(line, `"faults"`) && strings.Contains(line, rule) && strings.Contains(line, ns) && strings.Contains(line, pod)
		}
		return err
	})
	if err != nil {
		return err
	}
	return orElse(found, "there is none")
}

// No fault is injected into pods outside the mesh, into namespaces whose label forbids it,
// into locks, while the rule is disabled, and after it has expired.
func TestFaultExemptions(t *testing.T) {
	t.Parallel()
	pod := clientPod(t)
	ns, caller := pod.Namespace, hastyClient(t, pod)
	exempt := namespace(t, "exempt")
	patch(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: exempt}}, fmt.Sprintf(`{"metadata": {"labels": {%q: "true"}}}`, meshv1alpha1.NoFaultsLabel))
	here, there := "/api/v1/namespaces/"+ns+"/secrets", "/api/v1/namespaces/"+exempt+"/secrets"
	const all = `
httpFault:
- name: all
  abort: {httpStatus: 500, percent: "100"}
`
	answers := func(code int) {
		t.Helper()
		until(t, fmt.Sprint("answers of ", code), func(ctx context.Context) error { return caller.answers(ctx, here, code) })
	}
	f := faults(t, ns, "all", all, 1)
	require.Equal(t, http.StatusInternalServerError, caller.get(t, here).code)
	require.Equal(t, http.StatusOK, caller.get(t, there).code, "objects of a namespace that forbids it")
	leases := "/apis/coordination.k8s.io/v1/namespaces/" + ns + "/leases"
	require.Equal(t, http.StatusNotFound, caller.get(t, leases+"/lock").code, "locks")
	require.Equal(t, http.StatusOK, hastyClient(t, outsider(t, ns, "outsider")).get(t, here).code, "pods without the label")

	f.Spec.Disabled = true
	write(t, f)
	notInForce(t, f, "Disabled")
	answers(http.StatusOK)
	f.Spec.Disabled = false
	write(t, f)
	answers(http.StatusInternalServerError)

	patch(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, fmt.Sprintf(`{"metadata": {"labels": {%q: ""}}}`, meshv1alpha1.NoFaultsLabel))
	notInForce(t, f, "Forbidden")
	answers(http.StatusOK)
	patch(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, fmt.Sprintf(`{"metadata": {"labels": {%q: null}}}`, meshv1alpha1.NoFaultsLabel))
	answers(http.StatusInternalServerError)
	remove(t, f)
	answers(http.StatusOK)

	f = faults(t, ns, "for-a-while", "duration: 1h"+all, 1)
	for range 3 {
		require.Equal(t, http.StatusInternalServerError, caller.get(t, here).code)
	}
	injected(t, f, pod.Name, "all", 3)
	const lasts = 10 * time.Second // from the change on
	f.Spec.Duration = new(meshv1alpha1.Duration(lasts.String()))
	start := time.Now()
	write(t, f)
	answers(http.StatusOK)
	require.GreaterOrEqual(t, time.Since(start), lasts)
	notInForce(t, f, "Expired")
	require.NotNil(t, f.Status.ExpirationTime)
	require.GreaterOrEqual(t, f.Status.Injected, int64(3), "the count stays when it has expired")
}

// A leader whose renewals fail stops leading, if a rule names its lock.
func TestLockLost(t *testing.T) {
	t.Parallel()
	pod := clientPod(t)
	ns := pod.Namespace
	clientset, err := kubernetes.NewForConfig(from(t, pod))
	require.NoError(t, err)
	var leads, lost atomic.Bool
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() { cancel(); <-done })
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: ns, Name: "lock"}, Client: clientset.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: "me"}},
		// Much longer than a renewal takes on a busy machine.
		LeaseDuration: 40 * time.Second, RenewDeadline: 30 * time.Second, RetryPeriod: 500 * time.Millisecond,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { leads.Store(true) },
			OnStoppedLeading: func() { lost.Store(true) },
		},
	})
	require.NoError(t, err)
	go func() { elector.Run(ctx); close(done) }()
	until(t, "the lock", func(context.Context) error { return orElse(leads.Load(), "it does not lead") })

	const lose = `
httpFault:
- name: renewals
  match: {resources: [{apiGroups: [coordination.k8s.io], resources: [leases], verbs: [update, patch]%s}]}
  abort: {httpStatus: 500, percent: "100"}
`
	faults(t, ns, "lost", fmt.Sprintf(lose, ""), 1)
	renewed := func() time.Time {
		lease := &coordinationv1.Lease{}
		require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "lock"}, lease))
		return lease.Spec.RenewTime.Time
	}
	before := renewed()
	until(t, "renewals", func(context.Context) error {
		return orElse(renewed().After(before.Add(2*time.Second)), "there are none")
	})
	require.False(t, lost.Load(), "locks are exempt")

	faults(t, ns, "lost", fmt.Sprintf(lose, ", names: [lock]"), 1)
	start := time.Now()
	until(t, "the loss of the lock", func(context.Context) error { return orElse(lost.Load(), "it leads") })
	t.Logf("lost after %v", time.Since(start).Round(time.Millisecond))
}

func orElse(ok bool, why string) error {
	if !ok {
		return errors.New(why)
	}
	return nil
}
