package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// clientPod creates a pod on the mesh, with clients of all kinds in it, in a namespace of its own.
func clientPod(t *testing.T, change ...func(*corev1.Pod)) *corev1.Pod {
	t.Helper()
	ns := namespace(t, "traffic")
	probeRights(t, ns)
	pod := clientPodOf(ns, "client")
	for _, f := range change {
		f(pod)
	}
	create(t, pod)
	return ready(t, ns, pod.Name)
}

func clientPodOf(ns, name string) *corev1.Pod {
	pod := netPod(ns, name, "")
	pod.Spec.Containers[0].Image = probeImage
	return pod
}

// clientSet creates a StatefulSet of such pods, with labels.
func clientSet(t *testing.T, ns, name string, replicas int32, labels map[string]string) (pods []*corev1.Pod) {
	t.Helper()
	labels[meshv1alpha1.EnableProxyLabel] = "true"
	create(t, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: clientPodOf(ns, name).Spec},
		},
	})
	for i := range replicas {
		pods = append(pods, ready(t, ns, fmt.Sprintf("%s-%d", name, i)))
	}
	return pods
}

// breaker applies a CircuitBreaker with a spec in YAML, which selects all pods of the
// namespace by default. It waits until the object is in force in the given number of pods.
func breaker(t *testing.T, ns, name, spec string, pods int) *meshv1alpha1.CircuitBreaker {
	t.Helper()
	b := &meshv1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	b.Spec.Selector = &metav1.LabelSelector{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(spec), &b.Spec))
	write(t, b)
	inForce(t, b, pods)
	return b
}

// faults does for a FaultInjection what breaker does for a CircuitBreaker.
func faults(t *testing.T, ns, name, spec string, pods int) *meshv1alpha1.FaultInjection {
	t.Helper()
	f := &meshv1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	f.Spec.Selector = &metav1.LabelSelector{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(spec), &f.Spec))
	write(t, f)
	inForce(t, f, pods)
	return f
}

// write creates an object, or replaces the one that has its name, whatever the manager
// writes into its status meanwhile.
func write(t *testing.T, obj client.Object) {
	t.Helper()
	old := obj.DeepCopyObject().(client.Object)
	require.NoError(t, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := cluster.Get(t.Context(), client.ObjectKeyFromObject(obj), old); apierrors.IsNotFound(err) {
			create(t, obj)
			return nil
		} else if err != nil {
			return err
		}
		obj.SetResourceVersion(old.GetResourceVersion())
		return cluster.Update(t.Context(), obj)
	}))
}

func remove(t *testing.T, obj client.Object) {
	t.Helper()
	require.NoError(t, cluster.Delete(t.Context(), obj))
}

// inForce waits until an object is in force in as many pods as it selects.
func inForce(t *testing.T, obj client.Object, pods int) {
	t.Helper()
	until(t, obj.GetName()+" to be in force", func(ctx context.Context) error {
		generation, in, ready, err := fares(ctx, obj)
		if err == nil && (generation != obj.GetGeneration() || in != int32(pods) || ready == nil || pods > 0 && ready.Status != metav1.ConditionTrue) {
			err = fmt.Errorf("generation %d of %d, in force in %d pods of %d: %+v", generation, obj.GetGeneration(), in, pods, ready)
		}
		return err
	})
}

// notInForce waits until an object reports the reason for which it has no effect, and that all
// agents have confirmed that.
func notInForce(t *testing.T, obj client.Object, reason string) {
	t.Helper()
	until(t, obj.GetName()+" to be "+reason, func(ctx context.Context) error {
		generation, _, ready, err := fares(ctx, obj)
		if err == nil && (generation != obj.GetGeneration() || ready == nil || ready.Reason != reason || strings.Contains(ready.Message, meshv1alpha1.EarlierInForce)) {
			err = fmt.Errorf("generation %d of %d: %+v", generation, obj.GetGeneration(), ready)
		}
		return err
	})
}

func fares(ctx context.Context, obj client.Object) (generation int64, pods int32, ready *metav1.Condition, err error) {
	if err := cluster.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil {
		return 0, 0, nil, err
	}
	switch o := obj.(type) {
	case *meshv1alpha1.CircuitBreaker:
		return o.Status.ObservedGeneration, o.Status.PodsInForce, meta.FindStatusCondition(o.Status.Conditions, "Ready"), nil
	case *meshv1alpha1.FaultInjection:
		return o.Status.ObservedGeneration, o.Status.PodsInForce, meta.FindStatusCondition(o.Status.Conditions, "Ready"), nil
	}
	return 0, 0, nil, fmt.Errorf("%T has no such status", obj)
}

// snapshot waits until the status of a rule in a pod satisfies want.
func snapshot(t *testing.T, b *meshv1alpha1.CircuitBreaker, pod, rule string, want func(meshv1alpha1.LimitingSnapshot) bool) {
	t.Helper()
	until(t, "the status of rule "+rule, func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(b), b); err != nil {
			return err
		}
		for _, p := range b.Status.TargetStatus {
			for _, s := range p.LimitingSnapshots {
				if p.PodName == pod && s.Name == rule && want(s) {
					return nil
				}
			}
		}
		return fmt.Errorf("it does not: %+v", b.Status.TargetStatus)
	})
}

// injected waits until the status reports that a rule injected want faults in a pod.
func injected(t *testing.T, f *meshv1alpha1.FaultInjection, pod, rule string, want int64) {
	t.Helper()
	until(t, "the status of rule "+rule, func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(f), f); err != nil {
			return err
		}
		for _, p := range f.Status.TargetStatus {
			for _, s := range p.FaultSnapshots {
				if p.PodName == pod && s.Name == rule && s.Injected == want {
					return nil
				}
			}
		}
		return fmt.Errorf("it does not report %d: %+v", want, f.Status.TargetStatus)
	})
}

// hasty is a client in a pod that does not retry: client-go's transport alone.
type hasty struct {
	*http.Client
	host string
}

func hastyClient(t *testing.T, pod *corev1.Pod) hasty {
	t.Helper()
	config := from(t, pod)
	c, err := rest.HTTPClientFor(config)
	require.NoError(t, err)
	t.Cleanup(c.CloseIdleConnections)
	return hasty{c, config.Host}
}

// answered is the answer to a request.
type answered struct {
	code   int
	header http.Header
	body   string
	took   time.Duration
	metav1.Status
}

func (a answered) retryAfter() int {
	n, _ := strconv.Atoi(a.header.Get("Retry-After"))
	return n
}

// ask sends a request, with a body of JSON if there is one.
func (p hasty) ask(t *testing.T, method, path string, body ...string) answered {
	t.Helper()
	a, err := p.try(t.Context(), method, path, body...)
	require.NoError(t, err)
	return a
}

func (p hasty) get(t *testing.T, path string) answered {
	t.Helper()
	return p.ask(t, http.MethodGet, path)
}

func (p hasty) try(ctx context.Context, method, path string, body ...string) (answered, error) {
	req, err := http.NewRequestWithContext(ctx, method, p.host+path, strings.NewReader(strings.Join(body, "")))
	if err != nil {
		return answered{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	req.Header.Set("User-Agent", "e2e/1")
	start := time.Now()
	resp, err := p.Do(req)
	if err != nil {
		return answered{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	out, err := io.ReadAll(resp.Body)
	a := answered{code: resp.StatusCode, header: resp.Header, body: string(out), took: time.Since(start)}
	_ = json.Unmarshal(out, &a.Status) // empty if the body is no Status
	return a, err
}

// refused requires that a rule of the pod's namespace refused a request, with a Status that
// names the rule.
func (a answered) refused(t *testing.T, code int, breaker, rule string) {
	t.Helper()
	require.Equal(t, code, a.code, a.body)
	require.Equal(t, metav1.StatusFailure, a.Status.Status, a.body)
	require.EqualValues(t, code, a.Code)
	reason := map[int]metav1.StatusReason{
		http.StatusTooManyRequests: metav1.StatusReasonTooManyRequests, http.StatusServiceUnavailable: metav1.StatusReasonServiceUnavailable,
	}[code]
	require.Equal(t, reason, a.Reason)
	require.Contains(t, a.Message, "CircuitBreaker "+breaker)
	require.Contains(t, a.Message, strconv.Quote(rule))
}

// shell runs a script in a pod, and returns what it printed.
func shell(t *testing.T, pod *corev1.Pod, script string) string {
	t.Helper()
	const end = "<end>"
	file := fmt.Sprintf("said-%d", scripts.Add(1))
	out := in(t, pod, "sh", "-c", "("+clientPrelude+script+"\n) >"+file+"; code=$?; cat "+file+"; echo '"+end+"'; exit $code")
	if !strings.HasSuffix(out, end+"\n") { // an exec may lose its output, and must not run the script again
		until(t, "the output of a script", func(context.Context) error {
			out = in(t, pod, "sh", "-c", "cat "+file+"; echo '"+end+"'")
			return orElse(strings.HasSuffix(out, end+"\n"), "an exec has lost it again")
		})
	}
	return strings.TrimSpace(strings.TrimSuffix(out, end+"\n"))
}

// scripts counts the scripts of shell, which may run at the same time in one pod.
var scripts atomic.Int64
