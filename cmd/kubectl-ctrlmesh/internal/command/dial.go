package command

import (
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// requestTimeout bounds a request, if --request-timeout does not.
const requestTimeout = 30 * time.Second

// dial connects to the apiserver of the kubeconfig.
func (e *environment) dial() (snapshot.Reader, string, error) {
	config, err := e.flags.ToRESTConfig()
	if err != nil {
		return snapshot.Reader{}, "", fmt.Errorf("reading the kubeconfig: %w: name another by --kubeconfig or --context", err)
	}
	namespace, _, err := e.flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return snapshot.Reader{}, "", fmt.Errorf("reading the namespace of the kubeconfig: %w: name one by -n", err)
	}
	at := &clock{}
	config = rest.CopyConfig(config)
	config.UserAgent = "kubectl-ctrlmesh/" + e.version
	config.QPS = -1 // the apiserver's priority and fairness decides
	config.WarningHandler = e.warnings
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
	return snapshot.Reader{Client: c, Version: d.ServerVersion, Now: at.now, Namespace: e.meshNamespace}, namespace, nil
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
