package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
	"github.com/ctrlmesh/ctrlmesh/tests/reviews"
)

// Timeout bounds a wait for what takes seconds on an idle machine.
const Timeout = 90 * time.Second

// Labels marks the namespaces that a run creates.
var Labels = client.MatchingLabels{"app.kubernetes.io/part-of": "ctrlmesh-chaos"}

// Testbed is the cluster under test. Call Connect before any other method.
type Testbed struct {
	*kube.Cluster
	Nodes   []string  // sorted names, at least two
	Started time.Time // when the run began

	access     accessLog
	stopAccess func() // ends the reading of the agents' logs
}

// Connect connects to the cluster, removes what an interrupted run left, and starts to
// read the agents' logs. The caller must Close the testbed if Connect succeeds.
func (w *Testbed) Connect(ctx context.Context) (err error) {
	if w.Cluster, err = kube.Connect(tallyv1.AddToScheme, reviews.AddToScheme); err != nil {
		return err
	}
	w.Started = time.Now()
	if _, err := os.Stat(w.AuditLog()); err != nil {
		return fmt.Errorf("this needs the cluster of tests/cluster, for its audit log: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	if err := kube.Until(ctx, "ctrlmesh to be ready", w.MeshReady); err != nil {
		return err
	}
	var nodes corev1.NodeList
	if err := w.List(ctx, &nodes); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	for _, n := range nodes.Items {
		w.Nodes = append(w.Nodes, n.Name)
	}
	slices.Sort(w.Nodes)
	if len(w.Nodes) < 2 {
		return errors.New("this needs two nodes")
	}
	if err := w.sweep(ctx); err != nil {
		return err
	}
	// The kubelet removes a pod's logs with the pod, so they are read as they are written.
	w.access.root = w.Root
	reading, stop := context.WithCancel(context.Background())
	var reader sync.WaitGroup
	reader.Go(func() { w.access.follow(reading) })
	w.stopAccess = func() { stop(); reader.Wait() }
	return nil
}

// Close stops reading logs and deletes the namespaces of the run. It does not wait for the
// deletion.
func (w *Testbed) Close() {
	w.stopAccess()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	if err := w.remove(ctx); err != nil {
		w.Logf("! %v", err)
	}
}

// sweep deletes the namespaces of an interrupted run and waits for the deletion.
func (w *Testbed) sweep(ctx context.Context) error {
	if err := w.remove(ctx); err != nil {
		return err
	}
	return kube.Until(ctx, "the end of what an earlier run left", func(ctx context.Context) error {
		var left corev1.NamespaceList
		return kube.Empty(&left, w.List(ctx, &left, Labels))
	})
}

func (w *Testbed) remove(ctx context.Context) error {
	var left corev1.NamespaceList
	if err := w.List(ctx, &left, Labels); err != nil {
		return fmt.Errorf("looking for namespaces to remove: %w", err)
	}
	for i := range left.Items {
		if err := w.Delete(ctx, &left.Items[i]); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("removing namespace %s: %w", left.Items[i].Name, err)
		}
	}
	return nil
}

// Logf prints a line of progress.
func (w *Testbed) Logf(format string, args ...any) {
	fmt.Printf("[%6.1f s] %s\n", time.Since(w.Started).Seconds(), fmt.Sprintf(format, args...))
}

// LogSome prints at most n of some findings.
func LogSome[T any](w *Testbed, n int, format string, findings []T) {
	for _, f := range findings[:min(n, len(findings))] {
		w.Logf(format, f)
	}
}

// Until waits for cond for at most Timeout.
func (w *Testbed) Until(ctx context.Context, what string, cond func(context.Context) error) error {
	return kube.UntilWithin(ctx, Timeout, what, cond)
}

// UntilObject reads obj, again and again, until cond returns nil.
func (w *Testbed) UntilObject(ctx context.Context, what string, obj client.Object, cond func() error) error {
	return w.Until(ctx, what, func(ctx context.Context) error {
		if err := w.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil {
			return err
		}
		return cond()
	})
}
