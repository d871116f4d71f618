package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// requestTimeout bounds a request, if --request-timeout does not.
const requestTimeout = 30 * time.Second

// dial connects to the apiserver of the kubeconfig.
func (e *environment) dial() (snapshot.Reader, string, error) {
	config, err := e.config()
	if err != nil {
		return snapshot.Reader{}, "", err
	}
	namespace, _, err := e.flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return snapshot.Reader{}, "", fmt.Errorf("reading the namespace of the kubeconfig: %w: name one by -n", err)
	}
	at := &clock{}
	if config.Timeout == 0 {
		config.Timeout = requestTimeout
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return clocked{next, at} })
	scheme, err := snapshot.NewScheme()
	if err != nil {
		return snapshot.Reader{}, "", err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return snapshot.Reader{}, "", fmt.Errorf("connecting to the apiserver: %w: check the kubeconfig", err)
	}
	d, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return snapshot.Reader{}, "", fmt.Errorf("connecting to the apiserver: %w: check the kubeconfig", err)
	}
	served := func() ([]*metav1.APIResourceList, error) {
		_, lists, err := d.ServerGroupsAndResources()
		return lists, err
	}
	return snapshot.Reader{Client: c, Version: d.ServerVersion, Resources: served, Logs: e.follow, Metrics: e.metrics, Now: at.now, Namespace: e.meshNamespace}, namespace, nil
}

// config returns how to connect to the apiserver of the kubeconfig.
func (e *environment) config() (*rest.Config, error) {
	config, err := e.flags.ToRESTConfig()
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w: name another by --kubeconfig or --context", err)
	}
	config = rest.CopyConfig(config)
	config.UserAgent = "kubectl-ctrlmesh/" + e.version
	config.QPS = -1 // the apiserver's priority and fairness decides
	config.WarningHandler = e.warnings
	return config, nil
}

// follow follows the log of a pod.
func (e *environment) follow(ctx context.Context, namespace, pod string, options *corev1.PodLogOptions) (io.ReadCloser, error) {
	c, _, err := e.streaming()
	if err != nil {
		return nil, err
	}
	return c.Pods(namespace).GetLogs(pod, options).Stream(ctx)
}

// metrics reads the metrics of a pod of the mesh.
func (e *environment) metrics(ctx context.Context, pod *corev1.Pod) (io.ReadCloser, error) {
	c, config, err := e.streaming()
	if err != nil {
		return nil, err
	}
	for _, p := range pod.Spec.Containers[0].Ports {
		if p.Name == "metrics" {
			at := c.RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("portforward").URL()
			return forward(ctx, config, at, p.ContainerPort, "/metrics")
		}
	}
	return nil, errors.New("it has no port for metrics")
}

// streaming returns a client for answers that may take long, and how it connects.
func (e *environment) streaming() (*typedcorev1.CoreV1Client, *rest.Config, error) {
	config, err := e.config()
	if err != nil {
		return nil, nil, err
	}
	config.Timeout = 0 // it would end the answer, too
	c, err := typedcorev1.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("connecting to the apiserver: %w: check the kubeconfig", err)
	}
	return c, config, nil
}

// clock is the clock of the apiserver, by which leases end. The clock of this machine may be wrong.
type clock struct{ ahead atomic.Int64 }

func (c *clock) now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

// skew is by how much the clock of the apiserver must differ: it is known in seconds.
const skew = 2 * time.Second

// set compares the time of an answer with that of this machine.
func (c *clock) set(date string, here time.Time) {
	there, err := http.ParseTime(date)
	if err != nil {
		return
	}
	if ahead := there.Sub(here); ahead.Abs() > skew {
		c.ahead.Store(int64(ahead))
	}
}

// clocked sets a clock by the answers of the apiserver.
type clocked struct {
	next http.RoundTripper
	*clock
}

// RoundTrip implements http.RoundTripper.
func (c clocked) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := c.next.RoundTrip(r)
	if err == nil {
		c.set(answer.Header.Get("Date"), time.Now())
	}
	return answer, err
}
