package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// The examples of deploy/examples do what their comments say. Only their namespace differs, so
// that they can be tested in parallel.

// example applies an example, and waits until it is in force in the given number of pods.
func example[T any, P interface {
	*T
	client.Object
}](t *testing.T, file, ns, name string, pods int) P {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(cluster.Root, "deploy", "examples", file))
	require.NoError(t, err)
	const theirs = "namespace: operator-demo\n"
	require.Contains(t, string(text), theirs)
	require.NoError(t, cluster.Apply(t.Context(), []byte(strings.ReplaceAll(string(text), theirs, "namespace: "+ns+"\n"))))
	obj := P(new(T))
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, obj))
	inForce(t, obj, pods)
	return obj
}

// A user applies the examples as they are.
func TestExamplesAreAdmitted(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "e2e-examples")
	files, err := filepath.Glob(filepath.Join(cluster.Root, "deploy", "examples", "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for doc := range strings.SplitSeq(string(text), "\n---\n") {
			obj := &unstructured.Unstructured{}
			require.NoError(t, yaml.Unmarshal([]byte(doc), &obj.Object))
			obj.SetNamespace(ns)
			require.NoError(t, cluster.Create(t.Context(), obj, client.DryRunAll), "%s: %s %s", filepath.Base(file), obj.GetKind(), obj.GetName())
		}
	}
}

// examplePods creates pods of the operator that the examples select.
func examplePods(t *testing.T, replicas int32, labels ...string) (ns string, pods []*corev1.Pod) {
	t.Helper()
	ns = namespace(t, "operator-demo")
	probeRights(t, ns)
	all := map[string]string{"app": "operator-demo"}
	for i := 0; i+1 < len(labels); i += 2 {
		all[labels[i]] = labels[i+1]
	}
	return ns, clientSet(t, ns, "operator-demo", replicas, all)
}

// An operator that sends too many requests is limited.
func TestExampleCap(t *testing.T) {
	t.Parallel()
	ns, pods := examplePods(t, 1)
	caller := hastyClient(t, pods[0])
	example[meshv1alpha1.CircuitBreaker](t, "breaker-cap.yaml", ns, "cap", 1)

	in := "/api/v1/namespaces/" + ns
	hammer := func(method string, n int) (ok, refused int, took time.Duration) {
		start := time.Now()
		codes := strings.Fields(shell(t, pods[0], fmt.Sprintf(
			`curl -s --cacert $sa/ca.crt --header @auth --parallel --parallel-max 16 -X %s -o 'body#1' -w '%%{http_code}\n' "$api%s/configmaps/none?[1-%d]"
grep -l 'CircuitBreaker %s/cap' body* | wc -l`, method, in, n, ns)))
		took = time.Since(start)
		said := codes[len(codes)-1]
		codes = codes[:len(codes)-1]
		for _, code := range codes {
			switch code {
			case "404":
				ok++
			case "429":
				refused++
			}
		}
		require.Equal(t, n, ok+refused, codes)
		require.Equal(t, fmt.Sprint(refused), said, "each refusal names the CircuitBreaker")
		return ok, refused, took
	}
	capped := func(method string, n int, burst, perSecond float64) {
		t.Helper()
		passed := 0
		until(t, "more than the cap to be asked for", func(context.Context) error { // a busy machine may send fewer requests at first
			ok, refused, took := hammer(method, n)
			passed += ok
			require.LessOrEqual(t, float64(ok), burst+perSecond*took.Seconds())
			return orElse(refused > 0, fmt.Sprintf("%d passed in %v", ok, took))
		})
		require.GreaterOrEqual(t, float64(passed), burst, "what is below it passes")
	}
	capped(http.MethodGet, 600, 100, 50)
	capped(http.MethodDelete, 100, 20, 10)

	// The breaker opens when half of the updates of status fail; here a fault fails all of them.
	faults(t, ns, "fails", `
httpFault:
- name: status
  match: {resources: [{resources: ["*/status"]}]}
  abort: {httpStatus: 500, percent: "100"}
`, 1)
	update := func() answered {
		return caller.ask(t, http.MethodPatch, in+"/pods/"+pods[0].Name+"/status", `{"status": {}}`)
	}
	until(t, "the breaker to open", func(context.Context) error {
		var a answered
		for range 20 { // enough writes in ten seconds
			a = update()
		}
		if a.code != http.StatusServiceUnavailable {
			return fmt.Errorf("answered %d", a.code)
		}
		a.refused(t, http.StatusServiceUnavailable, ns+"/failing-status", "failing-status")
		require.LessOrEqual(t, a.retryAfter(), 10)
		return nil
	})
	require.Equal(t, http.StatusOK, caller.get(t, in+"/pods/"+pods[0].Name).code, "no more than that is cut off")
}

// All pods together delete one object in ten seconds.
func TestExampleDeletes(t *testing.T) {
	t.Parallel()
	ns, pods := examplePods(t, 3)
	b := example[meshv1alpha1.CircuitBreaker](t, "breaker-deletes.yaml", ns, "deletes", 3)
	for _, pod := range pods {
		snapshot(t, b, pod.Name, "one-in-ten-seconds", func(s meshv1alpha1.LimitingSnapshot) bool { return strings.HasSuffix(s.Share, "/3") })
	}
	for i := range 10 {
		create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprint("victim-", i), Labels: map[string]string{"victim": ""}}})
	}
	maps := "/api/v1/namespaces/" + ns + "/configmaps"
	hastyClient(t, pods[0]).ask(t, http.MethodDelete, maps).refused(t, http.StatusServiceUnavailable, ns+"/deletes", "none-at-once")

	const lasts = 25 * time.Second
	since := mark(t)
	of := audit.Callers{}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	stop := func() { cancel(); all.Wait() }
	defer stop()
	for n, pod := range pods {
		of.Pods = append(of.Pods, ns+"/"+pod.Name)
		caller := hastyClient(t, pod)
		all.Go(func() { // like a client that sends many requests with pauses
			kube.Every(ctx, 100*time.Millisecond, func(ctx context.Context, i int) {
				a, err := caller.try(ctx, http.MethodDelete, dated(maps+"/victim-"+strconv.Itoa((i+n)%10)))
				if err == nil && a.code == http.StatusTooManyRequests {
					assert.Contains(t, a.Message, "CircuitBreaker "+ns+"/deletes")
				}
			})
		})
	}
	log := cluster.RequestLog(since, of)
	passed := func() []passage {
		requests, err := log.Requests()
		require.NoError(t, err)
		return passages(t, requests, "configmaps")
	}
	until(t, "a deletion, for some time", func(context.Context) error {
		return orElse(len(passed()) > 0 && time.Since(since.At) > lasts, "none, or too early")
	})
	stop()
	neverMore(t, passed(), 1, 0.1)
	allowed := 1 + 0.1*time.Since(since.At).Seconds()
	var left corev1.ConfigMapList
	require.NoError(t, cluster.List(t.Context(), &left, client.InNamespace(ns), client.HasLabels{"victim"}))
	require.GreaterOrEqual(t, len(left.Items), 10-int(allowed))
}

// A canary gets a conflict on one update in twenty.
func TestExampleConflicts(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "operator-demo")
	probeRights(t, ns)
	labels := func(shard string) map[string]string {
		return map[string]string{"app": "operator-demo", meshv1alpha1.EnableProxyLabel: "true", "canary": shard}
	}
	canary, other := clientPodOf(ns, "canary"), clientPodOf(ns, "other")
	canary.Labels, other.Labels = labels("yes"), labels("no")
	create(t, canary, other)
	canary, other = ready(t, ns, "canary"), ready(t, ns, "other")
	patch(t, canary, fmt.Sprintf(`{"metadata": {"labels": {%q: "operator-demo-0-canary"}}}`, meshv1alpha1.ShardLabel))
	f := example[meshv1alpha1.FaultInjection](t, "faults-canary-conflicts.yaml", ns, "canary-conflicts", 1)
	require.GreaterOrEqual(t, f.Status.ExpirationTime.Sub(f.CreationTimestamp.Time), time.Hour)
	require.LessOrEqual(t, time.Until(f.Status.ExpirationTime.Time), time.Hour+time.Second)
	create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "busy"}})

	conflicts := func(pod *corev1.Pod) (n int) {
		caller := hastyClient(t, pod)
		for i := range 200 {
			a := caller.ask(t, http.MethodPatch, "/api/v1/namespaces/"+ns+"/configmaps/busy", fmt.Sprintf(`{"data": {"n": "%d"}}`, i))
			if a.code != http.StatusOK {
				require.Equal(t, http.StatusConflict, a.code)
				require.Equal(t, metav1.StatusReasonConflict, a.Reason)
				n++
			}
		}
		return n
	}
	n := conflicts(canary)
	require.InDelta(t, 10, n, 8)
	require.Zero(t, conflicts(other))
	injected(t, f, canary.Name, "conflicts", int64(n))
}
