package answer

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/cost"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/parallel"
)

const (
	// metricsAtOnce bounds the agents whose metrics are read at the same time, and metricsBytes what is read of one.
	metricsAtOnce = 16
	metricsBytes  = 32 << 20
)

// ReadCosts reads the metrics of the agents on the nodes with labelled pods of a namespace; of all if it is empty.
func ReadCosts(ctx context.Context, r snapshot.Reader, namespace string) (cost.Reading, error) {
	out := cost.Reading{Agents: map[string]cost.Counts{}}
	s, err := r.ReadAll(ctx, snapshot.Programs, snapshot.Members(namespace))
	if err != nil {
		return out, err
	}
	agents := slices.DeleteFunc(report.AgentsByNode(s), func(a report.Agent) bool { return a.Members == 0 || a.Pod == "" })
	var lock sync.Mutex
	errs := parallel.Each(agents, metricsAtOnce, func(a report.Agent) error {
		counts, err := readMetrics(ctx, r, s, a.Pod)
		lock.Lock()
		defer lock.Unlock()
		out.Agents[a.Pod] = counts
		return err
	})
	if i := slices.IndexFunc(errs, func(err error) bool { return err != nil }); i >= 0 {
		return out, errs[i] // the others are much the same
	}
	out.At = r.Now()
	return out, nil
}

// readMetrics reads what an agent has counted.
func readMetrics(ctx context.Context, r snapshot.Reader, s *snapshot.Snapshot, name string) (cost.Counts, error) {
	i := slices.IndexFunc(s.Mesh.Pods, func(p corev1.Pod) bool { return p.Name == name })
	pod := &s.Mesh.Pods[i] // of a report about them
	text, err := r.Metrics(ctx, pod)
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of %s: %w: you need permission to create pods/portforward in namespace %s", name, err, pod.Namespace)
	}
	defer text.Close()
	limited := &io.LimitedReader{R: text, N: metricsBytes}
	counts, err := cost.Parse(limited)
	if limited.N <= 0 {
		return nil, fmt.Errorf("reading the metrics of %s: they are longer than %d MiB", name, metricsBytes>>20)
	}
	return counts, err
}
